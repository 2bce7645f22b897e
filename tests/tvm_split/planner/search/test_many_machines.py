"""More machines than tables can list: never worse than what anyone would do, and bounds that hold."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from tests.helpers.planner.many_machines import (
    LinkKinds,
    MachineKinds,
    Networks,
    best_single,
    dealt_to_all,
    first_fit,
    many_machines_problem,
)
from tests.helpers.planner.oracle import best, graph_plans, judge
from tests.helpers.planner.problems import random_problem
from tests.helpers.planner.steps import evaluate_stages
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Objective, Pin, Problem, ProblemLink, ProblemMachine, Solution
from tvm_split.planner.search import solve
from tvm_split.planner.search.candidate import Candidate, Deliveries, one_machine_candidates
from tvm_split.planner.search.instance import Instance, instance_of
from tvm_split.planner.search.many_machines import ManyMachines
from tvm_split.planner.search.simple_plans import simple_plans
from tvm_split.planner.search.subsets import restricted

SEEDS = st.integers(0, 2**32)
CASES: list[tuple[MachineKinds, LinkKinds, Networks, bool]] = [
    ("equal", "alike", "residual", False),
    ("three kinds", "alike", "chain", False),
    ("three kinds", "four sites", "unet", True),
    ("unlike", "alike", "branches", False),
    ("unlike", "a third slow", "chain", True),
    ("unlike", "two racks", "unet", False),
]


def searched(problem: Problem) -> tuple[float, float]:
    """The least period found with all the time there is, and the bound."""
    instance = instance_of(problem)
    search = ManyMachines(instance, math.inf)
    search.search()
    return delivered(instance, search.found), search.bound


def delivered(instance: Instance, plans: Iterable[Candidate]) -> float:
    """The least period of some plans whose replicas have turns."""
    best = Deliveries(instance).best_of(plans, math.inf)
    return math.inf if best is None else best.evaluation.period_seconds


@pytest.mark.parametrize(("kinds", "links", "network", "replicas"), CASES)
def test_no_simple_way_is_better_and_fewer_machines_are_not(
    kinds: MachineKinds, links: LinkKinds, network: Networks, replicas: bool
) -> None:
    found = []
    for machines in (6, 12):
        problem = many_machines_problem(
            machines, 30, kinds=kinds, links=links, network=network, replicas=replicas, seed=3
        )
        simple = [first_fit(problem), best_single(problem), *([dealt_to_all(problem)] if replicas else [])]
        period, bound = searched(problem)
        assert bound <= period
        ways = [evaluate_stages(problem, each).period_seconds for each in simple if each]
        assert period <= min(ways) * (1 + 1e-9)
        found.append(period)
    assert found[1] <= found[0]


@pytest.mark.parametrize(
    ("machines", "pieces", "network", "seed"),
    [
        (11, 30, "chain", 189),  # by 0.02 %, where halving ends at a tenth of a percent
        (4, 15, "residual", 626),  # by 4 %, if what goes around pieces is sent twice wherever its readers are
    ],
)
def test_what_first_fit_once_did_better(machines: int, pieces: int, network: Networks, seed: int) -> None:
    problem = many_machines_problem(machines, pieces, kinds="equal", links="four sites", network=network, seed=seed)
    stages = first_fit(problem)
    assert stages is not None
    assert searched(problem)[0] <= evaluate_stages(problem, stages).period_seconds * (1 + 1e-9)


def test_what_the_client_sends_is_a_bound_however_many_machines_there_are() -> None:
    """With so many replicas each input takes longer to be sent than to be computed."""
    problem = many_machines_problem(40, 6, replicas=True)
    quick = tuple(
        dataclasses.replace(piece, seconds={name: each / 10 for name, each in piece.seconds.items()})
        for piece in problem.pieces
    )
    period, bound = searched(dataclasses.replace(problem, pieces=quick))
    assert period == pytest.approx(3e5 / 1.25e8)
    assert bound == pytest.approx(period)


@settings(max_examples=5)
@given(
    st.integers(6, 16),
    st.integers(1, 8),
    st.sampled_from(["equal", "three kinds", "unlike"]),
    st.sampled_from(["alike", "two racks", "four sites"]),
    st.sampled_from(["chain", "residual", "unet", "branches"]),
    st.booleans(),
    SEEDS,
)
@example(13, 4, "unlike", "four sites", "residual", False, 6519)  # by 11 %, where no machines are left out
def test_more_machines_are_never_worse(
    machines: int, fewer: int, kinds: MachineKinds, links: LinkKinds, network: Networks, replicas: bool, seed: int
) -> None:
    """Whichever the fewer ones are; single machines are always compared."""
    problem = many_machines_problem(
        machines, 20, kinds=kinds, links=links, network=network, replicas=replicas, seed=seed
    )
    all_machines = instance_of(problem)
    kept = sorted(random.Random(seed).sample(range(machines), max(2, machines - fewer)))
    least = []
    for instance in (all_machines, restricted(all_machines, tuple(kept))):
        search = ManyMachines(instance, math.inf)
        search.search()
        plans = [*search.found, *one_machine_candidates(instance)]
        least.append(delivered(instance, plans))
    assert least[0] <= least[1] * (1 + 1e-9)


def test_ten_pieces_a_machine_end_near_the_bound() -> None:
    for kinds in ("equal", "three kinds", "unlike"):
        period, bound = searched(many_machines_problem(12, 120, kinds=kinds, seed=1))
        assert period <= bound * 1.05


@settings(max_examples=60)
@given(SEEDS, st.integers(2, 6), st.integers(2, 3), st.booleans(), st.booleans(), st.booleans())
@example(971, 2, 2, False, False, False)  # whose pieces take no time
def test_plans_hold_and_bounds_are_below_every_plan(
    seed: int, pieces: int, machines: int, chain: bool, replicas: bool, shared_cores: bool
) -> None:
    problem = random_problem(
        seed,
        pieces=pieces,
        machines=machines,
        chain=chain,
        replicas=replicas,
        shared_cores=shared_cores,
        objective="throughput",
    )
    problem = dataclasses.replace(problem, maximum_latency_seconds=math.inf, maximum_period_seconds=math.inf)
    instance = instance_of(problem)
    if np.isinf(instance.seconds).all(axis=1).any():
        return  # which `solve` says before it searches
    search = ManyMachines(instance, math.inf)
    search.search()
    expected = best(problem, graph_plans(problem))
    if expected is None:
        assert not search.found
        return
    alone = [each.evaluation.period_seconds for each in one_machine_candidates(instance)]
    assert min([search.bound, *alone]) <= expected[0] * (1 + 1e-9)
    for plan in search.found:
        judged = judge(problem, [(stage.machines, list(stage.layers)) for stage in plan.named(instance)])
        assert judged is not None
        assert judged[0] >= expected[0] * (1 - 1e-9)
        assert judged == pytest.approx((plan.evaluation.period_seconds, plan.evaluation.latency_seconds), rel=1e-9)


def test_what_takes_no_time_ends_the_search() -> None:
    """Nothing is below a period of 0, however slightly."""
    problem = random_problem(240, pieces=2, machines=3, chain=True, replicas=True, objective="throughput")
    problem = dataclasses.replace(problem, maximum_latency_seconds=math.inf, maximum_period_seconds=math.inf)
    assert searched(problem)[0] == 0.0


def solved(problem: Problem) -> Solution:
    found = solve(problem, time_limit_seconds=1.0)
    assert evaluate_stages(problem, found.stages) == found.evaluation
    return found


def test_sixteen_workers_whose_times_scatter_get_sixteen_stages() -> None:
    problem = many_machines_problem(16, 40, seed=2)
    assert len(solved(dataclasses.replace(problem, stages=16)).stages) == 16
    found = solved(dataclasses.replace(problem, stages=3, replicas=True))
    assert len(found.stages) == 3


def test_limits_are_kept_by_many_machines() -> None:
    problem = many_machines_problem(20, 60, seed=5)
    found = solved(dataclasses.replace(problem, maximum_machines=7))
    assert sum(len(stage.machines) for stage in found.stages) <= 7
    latency = 1.2 * evaluate_stages(problem, best_single(problem)).latency_seconds
    quick = solved(dataclasses.replace(problem, maximum_latency_seconds=latency))
    assert quick.evaluation.latency_seconds <= latency
    assert len(quick.stages) > 1


def test_what_many_machines_hold_fits_their_memory() -> None:
    """All weights are too much for any of them, so that no plan deals the whole network out."""
    problem = many_machines_problem(16, 40, kinds="three kinds", replicas=True)
    weights = sum(piece.weight_bytes for piece in problem.pieces)
    small = tuple(dataclasses.replace(machine, memory_bytes=weights / 2) for machine in problem.machines)
    found = solved(dataclasses.replace(problem, machines=small))
    assert len(found.stages) > 2
    assert all(load.memory_bytes <= weights / 2 for load in found.evaluation.loads)


def test_too_few_machines_for_the_stages_are_counted() -> None:
    problem = many_machines_problem(16, 40)
    able = {machine.name for machine in problem.machines[:10]}
    pieces = tuple(
        dataclasses.replace(piece, seconds={name: piece.seconds[name] for name in able}) for piece in problem.pieces
    )
    with pytest.raises(PlanError, match="no plan has 16 stages: only 10 machines have seconds for any piece"):
        solve(dataclasses.replace(problem, pieces=pieces, stages=16), time_limit_seconds=0.5)


def test_idle_machines_are_named_up_to_a_dozen() -> None:
    problem = dataclasses.replace(many_machines_problem(30, 40), maximum_machines=4)
    why = solved(problem).why_no_more_machines
    assert why.count("is idle") == 12
    assert why.endswith("; 14 more machines are idle")


def test_a_search_without_time_still_has_a_plan_and_a_bound() -> None:
    problem = many_machines_problem(16, 40)
    found = solve(problem, time_limit_seconds=0.0)
    assert 0.0 < found.lower_bound_seconds < found.evaluation.period_seconds
    assert found.evaluation.period_seconds < evaluate_stages(problem, best_single(problem)).period_seconds / 2


@pytest.mark.parametrize(("kinds", "links", "network", "replicas"), CASES)
def test_no_time_is_too_short_for_the_simple_ways(
    kinds: MachineKinds, links: LinkKinds, network: Networks, replicas: bool
) -> None:
    problem = many_machines_problem(60, 90, kinds=kinds, links=links, network=network, replicas=replicas, seed=1)
    simple = [first_fit(problem), best_single(problem), *([dealt_to_all(problem)] if replicas else [])]
    found = solve(problem, time_limit_seconds=0.0)
    ways = [evaluate_stages(problem, each).period_seconds for each in simple if each]
    assert found.evaluation.period_seconds <= min(ways) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.integers(2, 9), st.integers(2, 25), st.sampled_from(["alike", "four sites"]), st.booleans(), SEEDS)
def test_the_planner_fills_machines_as_anyone_would(
    machines: int, pieces: int, links: LinkKinds, pins: bool, seed: int
) -> None:
    problem = many_machines_problem(machines, pieces, links=links, network="residual", seed=seed)
    if pins:
        chosen = random.Random(seed)
        problem = dataclasses.replace(
            problem, pins=(Pin(chosen.choice(problem.pieces).name, not_on=chosen.choice(problem.machines).name),)
        )
    by_hand, found = first_fit(problem), simple_plans(instance_of(problem))
    assert (by_hand is None) == (not found)
    if by_hand is not None:
        period, least = (
            evaluate_stages(problem, by_hand).period_seconds,
            min(each.evaluation.period_seconds for each in found),
        )
        assert least <= period * (1 + 1e-9)
        assert pins or least == pytest.approx(period, rel=1e-9)  # who may not run all comes last by hand


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_machines_are_filled_as_far_as_their_memory_goes(objective: Objective) -> None:
    """With activations, and with what is in flight: no machine can hold a third of it all."""
    problem = many_machines_problem(9, 60, network="residual", seed=3)
    whole = math.fsum(piece.weight_bytes for piece in problem.pieces)
    largest = max(piece.activation_bytes for piece in problem.pieces)
    crossing = 3 * problem.buffers * max(edge.bytes for edge in problem.edges)
    machines = tuple(
        dataclasses.replace(each, memory_bytes=whole / 5 + largest + crossing) for each in problem.machines
    )
    problem = dataclasses.replace(problem, machines=machines, objective=objective)
    assert simple_plans(instance_of(problem))
    assert solve(problem, time_limit_seconds=0.0).stages


def test_the_bound_knows_how_many_machines_may_be_used() -> None:
    problem = dataclasses.replace(many_machines_problem(30, 150, seed=2), maximum_machines=8)
    found = solve(problem, time_limit_seconds=2.0)
    assert len(found.stages) == 8
    assert found.gap < 0.1


def crowded(problem: Problem, machines_a_host: int, cores: int) -> Problem:
    """The same, where so many machines after each other share so many cores."""
    names = [machine.name for machine in problem.machines]
    hosts = [tuple(names[start : start + machines_a_host]) for start in range(0, len(names), machines_a_host)]
    return dataclasses.replace(problem, shared_cores=tuple(SharedCores(host, cores) for host in hosts))


@pytest.mark.parametrize(
    ("kinds", "replicas", "hosts", "pieces"),
    [
        ("three kinds", False, 3, 60),
        *(
            pytest.param(kinds, replicas, 6, 120, marks=pytest.mark.slow)
            for kinds in ("three kinds", "unlike")
            for replicas in (False, True)
        ),
    ],
)
def test_hosts_whose_cores_are_too_few_are_as_good_as_their_cores(
    kinds: MachineKinds, replicas: bool, hosts: int, pieces: int
) -> None:
    """Of four alike machines on one core three could as well not be there; that is found, and nearly proven."""
    four = 4
    few = many_machines_problem(hosts, pieces, kinds=kinds, replicas=replicas, seed=4)
    names = [f"{machine.name}-{place}" for machine in few.machines for place in range(four)]
    hosts_of = {name: name.rpartition("-")[0] for name in names}
    many = dataclasses.replace(
        few,
        machines=tuple(ProblemMachine(name, 16e9) for name in names),
        pieces=tuple(
            dataclasses.replace(piece, seconds={name: piece.seconds[hosts_of[name]] for name in names})
            for piece in few.pieces
        ),
        links=(
            *(ProblemLink(one, other, 1.25e8, 2e-4) for one in names for other in names if one != other),
            *(ProblemLink("client", name, 1.25e8, 2e-4) for name in names),
            *(ProblemLink(name, "client", 1.25e8, 2e-4) for name in names),
        ),
    )
    period, bound = searched(crowded(many, four, 1))
    assert bound <= period <= bound * 1.06
    assert period <= searched(few)[0] * 1.01
