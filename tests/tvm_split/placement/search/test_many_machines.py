"""Problems with too many machines for exact tables: plans are no worse than simple ones, and bounds hold."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from tests.helpers.placement.many_machines import (
    LinkKinds,
    MachineKinds,
    Networks,
    dealt_to_all,
    first_fit,
    many_machines_problem,
)
from tests.helpers.placement.oracle import best, graph_plans, judge
from tests.helpers.placement.problems import random_problem
from tests.helpers.placement.steps import evaluate_stages
from tvm_split.cluster.machine import SharedCores
from tvm_split.placement.problem import Objective, Piece, Problem, ProblemLink, ProblemMachine
from tvm_split.placement.search import Budget, solve
from tvm_split.placement.search.bounds import Prices
from tvm_split.placement.search.candidate import Placement, one_machine_candidates
from tvm_split.placement.search.instance import instance_of
from tvm_split.placement.search.order_costs import DeviceClasses, OrderCosts
from tvm_split.placement.search.priced_search import PricedSearch, StageBeam
from tvm_split.placement.solution import Solution

SEEDS = st.integers(0, 2**32)
LITTLE = 1.0e8
"""Work limit of one search, about half a second."""


def solved(problem: Problem, work: float = LITTLE) -> Solution:
    solution = solve(problem, budget=Budget(work=work))
    assert evaluate_stages(problem, solution.stages) == solution.evaluation
    return solution


def least_of_simple_plans(problem: Problem) -> float:
    plans = [first_fit(problem), *([dealt_to_all(problem)] if problem.replicas else [])]
    return min(evaluate_stages(problem, plan).period_seconds for plan in plans if plan)


@settings(max_examples=14)
@given(
    st.integers(10, 128),
    st.sampled_from(["equal", "three kinds", "unlike"]),
    st.sampled_from(["alike", "two racks", "four sites", "a third slow"]),
    st.sampled_from(["chain", "residual", "unet", "branches"]),
    st.booleans(),
    st.sampled_from([0.0, 1e7]),
    SEEDS,
)
@example(11, "equal", "four sites", "chain", False, LITTLE, 189)
def test_no_simple_plan_is_better(
    machines: int, kinds: MachineKinds, links: LinkKinds, network: Networks, replicas: bool, work: float, seed: int
) -> None:
    """This holds for any work limit."""
    problem = many_machines_problem(
        machines, 60, kinds=kinds, links=links, network=network, replicas=replicas, seed=seed
    )
    solution = solved(problem, work)
    assert 0.0 < solution.lower_bound_seconds <= solution.evaluation.period_seconds
    assert solution.evaluation.period_seconds <= least_of_simple_plans(problem) * (1 + 1e-9)


def test_what_the_client_sends_is_a_bound_however_many_machines_there_are() -> None:
    """With this many replicas, sending an input takes longer than computing it."""
    problem = many_machines_problem(40, 6, replicas=True)
    quick = tuple(
        dataclasses.replace(piece, seconds={name: duration / 10 for name, duration in piece.seconds.items()})
        for piece in problem.pieces
    )
    solution = solved(dataclasses.replace(problem, pieces=quick))
    assert solution.evaluation.period_seconds == pytest.approx(3e5 / 1.25e8)
    assert solution.gap == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=60)
@given(SEEDS, st.integers(2, 6), st.integers(2, 3), st.booleans(), st.booleans(), st.booleans())
@example(971, 2, 2, False, False, False)  # pieces take no time
@example(240, 2, 3, True, True, False)  # the period is 0
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
        return  # `solve` raises this before it searches
    search = PricedSearch(instance, Budget())
    search.search(4)
    expected = best(problem, graph_plans(problem))
    if expected is None:
        assert not search.plans
        return
    alone = [plan.flow.period_seconds for plan in one_machine_candidates(instance)]
    assert min([search.bound, *alone]) <= expected[0] * (1 + 1e-9)
    for plan in search.plans:
        judged = judge(problem, [(stage.machines, list(stage.layers)) for stage in plan.named(instance)])
        assert judged is not None
        assert judged[0] >= expected[0] * (1 - 1e-9)
        assert judged == pytest.approx((plan.flow.period_seconds, plan.flow.latency_seconds), rel=1e-9)


def test_machines_that_differ_only_in_their_site_do_not_fill_the_beam() -> None:
    """So more partial plans are more different plans."""
    instance = instance_of(many_machines_problem(32, 320, kinds="three kinds", links="four sites"))

    def least_period(width: int) -> float:
        search = PricedSearch(instance, Budget())
        search.search(width)
        return min(plan.flow.period_seconds for plan in search.plans)

    assert least_period(32) < 0.99 * least_period(4)


def test_sixteen_workers_whose_times_scatter_get_sixteen_stages() -> None:
    problem = many_machines_problem(16, 40, seed=2)
    assert len(solved(dataclasses.replace(problem, stages=16)).stages) == 16
    solution = solved(dataclasses.replace(problem, stages=3, replicas=True))
    assert len(solution.stages) == 3


def test_limits_are_kept_by_many_machines() -> None:
    problem = many_machines_problem(20, 60, seed=5)
    solution = solved(dataclasses.replace(problem, maximum_machines=7))
    assert sum(len(stage.machines) for stage in solution.stages) <= 7
    latency = 1.2 * solved(dataclasses.replace(problem, maximum_machines=1)).evaluation.latency_seconds
    quick = solved(dataclasses.replace(problem, maximum_latency_seconds=latency))
    assert quick.evaluation.latency_seconds <= latency
    assert len(quick.stages) > 1


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_machines_are_filled_as_far_as_their_memory_goes(objective: Objective) -> None:
    """Including activations and buffers: no machine can hold a third of everything."""
    problem = many_machines_problem(9, 60, network="residual", seed=3)
    whole = math.fsum(piece.weight_bytes for piece in problem.pieces)
    largest = max(piece.activation_bytes for piece in problem.pieces)
    crossing = 3 * problem.buffers * max(edge.bytes for edge in problem.edges)
    machines = tuple(
        dataclasses.replace(machine, memory_bytes=whole / 5 + largest + crossing) for machine in problem.machines
    )
    problem = dataclasses.replace(problem, machines=machines, objective=objective)
    assert solve(problem, budget=Budget(work=0.0)).stages


def oversubscribed(problem: Problem, machines_a_host: int, cores: int) -> Problem:
    """The problem in which each group of ``machines_a_host`` machines shares ``cores`` cores."""
    names = [machine.name for machine in problem.machines]
    hosts = [tuple(names[start : start + machines_a_host]) for start in range(0, len(names), machines_a_host)]
    return dataclasses.replace(problem, shared_cores=tuple(SharedCores(host, cores) for host in hosts))


def test_hosts_whose_cores_are_too_few_are_as_good_as_their_cores() -> None:
    """Four identical machines on one core are as fast as one; the search finds and nearly proves this."""
    four = 4
    few = many_machines_problem(3, 60, kinds="three kinds", seed=4)
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
            *(ProblemLink(source, end, 1.25e8, 2e-4) for source in names for end in names if source != end),
            *(ProblemLink("client", name, 1.25e8, 2e-4) for name in names),
            *(ProblemLink(name, "client", 1.25e8, 2e-4) for name in names),
        ),
    )
    solution = solved(oversubscribed(many, four, 1), 4 * LITTLE)
    assert solution.gap <= 0.06
    assert solution.evaluation.period_seconds <= solved(few, 4 * LITTLE).evaluation.period_seconds * 1.02


def latency_problem(machines: int, pieces: int, room: float = math.inf, **settings: object) -> Problem:
    """A latency problem in which each machine has memory for ``room`` pieces of mean size."""
    problem = many_machines_problem(machines, pieces, **settings)  # type: ignore[arg-type]
    mean = sum(piece.weight_bytes for piece in problem.pieces) / pieces
    beside = max(piece.activation_bytes for piece in problem.pieces) + 9 * max(edge.bytes for edge in problem.edges)
    small = tuple(dataclasses.replace(machine, memory_bytes=room * mean + beside) for machine in problem.machines)
    return dataclasses.replace(problem, objective="latency", machines=small)


@pytest.mark.parametrize("network", ["chain", "residual", "branches"])
def test_what_only_many_machines_can_hold_is_planned_for_latency(network: Networks) -> None:
    """Each machine has memory for about three pieces, so twelve machines are too few."""
    solution = solved(latency_problem(24, 48, 3.2, network=network, seed=6))
    assert len(solution.stages) > 12
    assert solution.lower_bound_seconds <= solution.evaluation.latency_seconds


def test_each_piece_goes_where_it_is_fastest() -> None:
    """Thirty machines, each fast for only two pieces; the twelve machines of least total time miss most of them."""
    problem = latency_problem(30, 60, kinds="equal", seed=7)
    pieces = tuple(
        dataclasses.replace(
            piece,
            seconds={
                name: seconds * (0.05 if place == number // 2 else 1.0)
                for place, (name, seconds) in enumerate(piece.seconds.items())
            },
        )
        for number, piece in enumerate(problem.pieces)
    )
    assert len(solved(dataclasses.replace(problem, pieces=pieces)).stages) > 20


@pytest.mark.parametrize("machines", [10, 20])
def test_branches_are_computed_side_by_side(machines: int) -> None:
    """The fastest machine alone takes 0.261 s; a pipeline of stages takes hardly less."""
    problem = latency_problem(machines, 30, kinds="three kinds", links="two racks", network="branches", seed=76)
    assert solved(problem, 2 * LITTLE).evaluation.latency_seconds <= 0.245


def test_each_stage_may_have_two_replicas() -> None:
    """One piece fits into a machine, so four machines are two stages of two replicas, at half the period."""
    problem = many_machines_problem(4, 2, kinds="equal", links="two racks", replicas=True)
    pieces = tuple(dataclasses.replace(piece, weight_bytes=1e9) for piece in problem.pieces)
    machines = tuple(dataclasses.replace(machine, memory_bytes=1.5e9) for machine in problem.machines)
    instance = instance_of(dataclasses.replace(problem, pieces=pieces, machines=machines))
    search = PricedSearch(instance, Budget())
    search.search(4)
    best_plan = min(search.plans, key=lambda plan: plan.flow.period_seconds)
    assert [len(stage.machines) for stage in best_plan.named(instance)] == [2, 2]
    assert best_plan.flow.period_seconds == pytest.approx(instance.seconds.max() / 2)


def test_the_example_of_the_beam_search_is_right() -> None:
    """It is drawn in the docstring of `StageBeam`; no plan takes 3.9 s."""
    seconds = {"fast": (1.0, 1.0, 2.0, 2.0), "slow-a": (2.0, 4.0, 1.0, 4.0), "slow-b": (2.0, 4.0, 1.0, 4.0)}
    pieces = tuple(Piece(f"p{index}", {name: row[index] for name, row in seconds.items()}) for index in range(4))
    instance = instance_of(Problem("throughput", tuple(map(ProblemMachine, seconds)), (), pieces, ()))
    classes = DeviceClasses(instance)
    prices = Prices(np.array([0.5, 0.25]), np.array([0.5, 0.5, 0.25, 1.0]), 2.25)
    beam = StageBeam(OrderCosts(instance), classes, prices, width=2)
    placed = beam.stages(4.0, 3, classes.counts, Budget())
    assert placed == [Placement((0,), (0, 1, 2)), Placement((1,), (3,))]
    assert beam.stages(3.9, 3, classes.counts, Budget()) is None
