"""Simulated streams: lower bounds, ideal pipelines, and deviations from them."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings, strategies as st

import tvm_split
from rpc_runtime.errors import InputError
from rpc_runtime.program.routes import CLIENT
from tests.helpers.placement.problems import on_one_host, one_each, random_problem
from tests.helpers.scenarios import busiest, chain, scenario_of_problem
from tvm_split.cluster.machine import SharedCores
from tvm_split.errors import PlanError
from tvm_split.placement.problem import Problem, Stage
from tvm_split.placement.search import Budget, solve
from tvm_split.simulation.scenario import (
    LinkTimes,
    Loss,
    MachineTimes,
    Scenario,
    Slowdown,
    StageTimes,
    WhatIf,
    program_of,
)
from tvm_split.simulation.simulate import Simulation, simulate

SEEDS = st.integers(0, 2**32)
SECONDS = st.floats(1e-4, 0.1)
DURATIONS = st.lists(SECONDS, min_size=1, max_size=5)


def planned(problem: Problem) -> tuple[Stage, ...]:
    try:
        return solve(problem, budget=Budget(work=1e8)).stages
    except PlanError:
        assume(False)
        raise


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3]))
@example(16939, 2, 4, False, True, 0.0)  # a replica whose share is too small for a schedule
def test_no_stream_is_faster_than_the_busiest_machine_link_or_cores(
    seed: int, pieces: int, machines: int, is_chain: bool, replicas: bool, scatter: float
) -> None:
    problem = random_problem(
        seed, pieces=pieces, machines=machines, chain=is_chain, plain=True, replicas=replicas, shared_cores=True
    )
    scenario = scenario_of_problem(problem, planned(problem))
    limit = busiest(scenario)
    assume(limit > 1e-4)
    simulation = simulate(scenario, WhatIf(compute_scatter=scatter, seed=seed), in_flight=20)
    assert simulation.period_seconds is not None
    # Micro-batches in flight at half of the results may finish faster, and durations scatter.
    assert simulation.period_seconds >= limit * (1 - 20 / 150 - scatter / 3)


@settings(max_examples=80)
@given(DURATIONS, st.data())
def test_a_chain_without_scatter_is_as_fast_as_its_busiest_part(
    computing: Sequence[float], data: st.DataObject
) -> None:
    wires = data.draw(st.lists(SECONDS, min_size=len(computing) + 1, max_size=len(computing) + 1))
    simulation = simulate(chain(computing, wires), micro_batches=100)
    assert simulation.period_seconds == pytest.approx(max(*computing, *wires), rel=1e-9)
    assert simulation.first_seconds == pytest.approx(math.fsum([*computing, *wires]), rel=1e-9)


def test_workers_share_cores() -> None:
    crowded, roomy = on_one_host(8, 8, 2), on_one_host(8, 8, 8)
    slow, fast = (simulate(scenario_of_problem(problem, one_each(problem))) for problem in (crowded, roomy))
    assert slow.period_seconds == pytest.approx(0.04, rel=1e-3)
    assert fast.period_seconds == pytest.approx(0.01, rel=1e-9)
    assert slow.single == fast.single


def with_latency(*, shares_memory: bool) -> Simulation:
    far = chain([0.01, 0.01], [1e-4] * 3, [0.0, 0.1, 0.0], shares_memory=shares_memory)
    return simulate(far, micro_batches=600)


def test_windows_of_far_links_widen_and_those_in_memory_do_not() -> None:
    widened, fixed = with_latency(shares_memory=False), with_latency(shares_memory=True)
    assert widened.period_seconds == pytest.approx(0.01, rel=0.05)
    assert fixed.period_seconds is not None
    # Two or three per round trip: a credit for which no sender waits is sent with the next one.
    assert 0.21 / 3 <= fixed.period_seconds <= 0.22 / 2


def around(stages: int, seconds: float, far: float, *, returns: bool, slow: int | None = None) -> Scenario:
    """A chain with a skip connection from the first stage to the last: over a fast link, or local (``returns``).

    All other links have the latency ``far``.
    """
    places = [f"m{index}" for index in range(stages)]
    places[-1] = places[0] if returns else places[-1]
    machines: dict[str, dict[str, StageTimes]] = {}
    for index, place in enumerate(places):
        stage_seconds = seconds * (3 if index == slow else 1)
        machines.setdefault(place, {})[f"s{index}"] = StageTimes(stage_seconds, stage_seconds)
    names: list[str | None] = [None, *(f"s{index}" for index in range(stages)), None]
    tensors = [(f"t{index}", 8, names[index], [names[index + 1]]) for index in range(stages + 1)]
    tensors.append(("skip", 8, "s0", [f"s{stages - 1}"]))
    program = program_of({f"s{index}": ((place,), (0,)) for index, place in enumerate(places)}, tensors)
    links = {
        (places[index - 1], places[index]): LinkTimes(far, {f"t{index}": seconds / 10}) for index in range(1, stages)
    }
    near = [(CLIENT, places[0], "t0"), (places[-1], CLIENT, f"t{stages}")]
    near += [] if returns else [(places[0], places[-1], "skip")]
    links |= {(source, end): LinkTimes(0.001, {name: seconds / 10}) for source, end, name in near}
    return Scenario(program, {name: MachineTimes(times) for name, times in machines.items()}, links)


@pytest.mark.parametrize("slow", [None, 1])
@pytest.mark.parametrize("returns", [False, True])
def test_what_skips_a_far_way_does_not_hold_it_up(returns: bool, slow: int | None) -> None:
    scenario = around(4, 0.002, 0.02, returns=returns, slow=slow)
    simulation = simulate(scenario, micro_batches=1000)
    assert simulation.period_seconds == pytest.approx(busiest(scenario), rel=0.05)


def test_scatter_costs_throughput_and_a_seed_repeats_it() -> None:
    scenario = chain([0.01] * 4, [0.001] * 5)
    calm, wild = (simulate(scenario, WhatIf(compute_scatter=scatter, seed=3)) for scatter in (0.0, 0.5))
    assert calm.period_seconds is not None
    assert wild.period_seconds is not None
    assert wild.period_seconds > 1.05 * calm.period_seconds
    assert wild == simulate(scenario, WhatIf(compute_scatter=0.5, seed=3))
    assert wild != simulate(scenario, WhatIf(compute_scatter=0.5, seed=4))
    assert wild.single is not None
    assert wild.single.percentiles_seconds[99] > wild.single.percentiles_seconds[50]


def test_a_machine_that_slows_down_holds_the_others_up() -> None:
    scenario = chain([0.01, 0.01], [0.001] * 3)
    whole = simulate(scenario, WhatIf((Slowdown("m1a", 3.0),)))
    assert whole.period_seconds == pytest.approx(0.03, rel=1e-9)
    assert whole.single is not None
    assert whole.single.mean_seconds == pytest.approx(0.01 + 0.03 + 0.003)
    uses = {machine.machine: machine for machine in whole.machines}
    assert uses["m1a"].compute_share == pytest.approx(1.0)
    assert uses["m0a"].compute_share == pytest.approx(1 / 3, rel=0.02)
    assert uses["m0a"].block_share > 0.6
    later = simulate(scenario, WhatIf((Slowdown("m1a", 3.0, since_seconds=1e6),)))
    assert later == simulate(scenario)


@pytest.mark.parametrize("more", [(), (Loss("m1a", 1000.0),)])
def test_a_lost_machine_has_computed_until_then(more: tuple[Loss, ...]) -> None:
    """Shares of the time until the last event: the other machine continues with its inputs."""
    simulation = simulate(chain([1.0, 10.0], [0.0] * 3), WhatIf(losses=(Loss("m0a", 3.5), *more)))
    assert (simulation.results, simulation.seconds) == (3, pytest.approx(31.0))
    uses = {use.machine: use for use in simulation.machines}
    assert uses["m0a"].compute_share == pytest.approx(3.5 / 31)
    assert uses["m1a"].compute_share == pytest.approx(30 / 31)


def test_without_a_machine_nothing_comes_any_more() -> None:
    scenario = chain([0.01, 0.01, 0.01], [0.001] * 4)
    simulation = simulate(scenario, WhatIf(losses=(Loss("m1a", 1.0),)), micro_batches=1000)
    whole = simulate(scenario, micro_batches=1000)
    assert whole.results == 1000
    assert 0 < simulation.results < 110
    assert simulation.results < simulation.submitted
    # Micro-batches that the machine had finished still arrive; the one it was computing does not.
    assert 1.0 < simulation.seconds < 1.0 + 0.04
    early = simulate(scenario, WhatIf(losses=(Loss("m1a", 0.0),)))
    assert (early.results, early.period_seconds, early.streamed, early.first_seconds) == (0, None, None, None)


def replicas(*seconds: float) -> Scenario:
    """One stage with replicas whose shares follow their speeds."""
    problem = on_one_host(len(seconds), 1, len(seconds))
    names = tuple(machine.name for machine in problem.machines)
    piece = dataclasses.replace(problem.pieces[0], seconds=dict(zip(names, seconds, strict=True)))
    whole = math.fsum(1 / duration for duration in seconds)
    stage = Stage(names, (piece.name,), tuple(1 / duration / whole for duration in seconds))
    return scenario_of_problem(dataclasses.replace(problem, pieces=(piece,), replicas=True), [stage])


@pytest.mark.parametrize("micro_batches", [2, 3, 60, 61, 118])
def test_as_many_results_as_were_asked_for_and_no_rate_of_too_few(micro_batches: int) -> None:
    """Results of the fast replica wait for one of the slow replica, and come with it."""
    simulation = simulate(replicas(0.01, 0.59), micro_batches=micro_batches)
    assert (simulation.wanted, simulation.results, simulation.schedule_cycle) == (micro_batches, micro_batches, 60)
    assert simulation.period_seconds is None
    assert simulation.micro_batches_per_second is None


@pytest.mark.parametrize("micro_batches", [None, 120, 500])
def test_after_the_whole_schedule_the_rate_is_that_of_the_replicas(micro_batches: int | None) -> None:
    simulation = simulate(replicas(0.01, 0.59), micro_batches=micro_batches)
    assert simulation.results == (micro_batches or 2 * simulation.in_flight)
    assert simulation.period_seconds == pytest.approx(0.59 / 60, rel=1e-6)


def test_no_more_results_than_schedules_can_need() -> None:
    with pytest.raises(InputError, match="micro_batches is 100001: must be less than or equal to 100000"):
        tvm_split.simulate(chain([0.01], [0.001] * 2), micro_batches=100_001)


def test_cores_in_two_sets_are_as_scarce_as_the_scarcer() -> None:
    scenario = chain([0.01] * 4, [0.0] * 5)
    names = tuple(scenario.machines)
    shared = (SharedCores(names, 2), SharedCores(names[:2], 1))
    simulation = simulate(dataclasses.replace(scenario, shared_cores=shared), micro_batches=400)
    assert simulation.period_seconds == pytest.approx(0.02, rel=0.02)
