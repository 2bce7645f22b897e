"""Who takes the stages of a lost machine, compared with an independent evaluation and with numbers by hand."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from tests.helpers.placement.oracle import judge
from tests.helpers.placement.problems import random_problem
from tests.helpers.placement.profiles import A, B, C, chain_problem, chain_profile
from tvm_split.placement.fallback import Fallback, Slower, fallback
from tvm_split.placement.problem import Problem, Stage
from tvm_split.placement.solution import solution_of
from tvm_split.placement.step_graph import Step, lower


def by_pieces(problem: Problem, stages: tuple[Stage, ...]) -> Slower:
    """The factors that follow from the seconds of pieces; stages are named by `lower`."""
    layers = {step.name: step for step in lower(problem, stages).steps}
    machines = {stage.machines: stage.layers for stage in stages}
    seconds = {piece.name: piece.seconds for piece in problem.pieces}

    def slower(step: Step, own: str, other: str) -> float:
        moved = [seconds[name] for name in machines[layers[step.name].machines]]
        if any(other not in one for one in moved):
            return math.inf
        before, after = (math.fsum(one[name] for one in moved) for name in (own, other))
        return after / before if before else 1.0

    return slower


def some_stages(problem: Problem, cuts: set[int], order: Sequence[int]) -> tuple[Stage, ...]:
    """Return stages of neighbouring pieces on different machines."""
    names, ends = [piece.name for piece in problem.pieces], [0, *sorted(cuts), len(problem.pieces)]
    return tuple(
        Stage((problem.machines[machine].name,), tuple(names[first:last]))
        for machine, (first, last) in zip(order, pairwise(ends), strict=False)
    )


@given(st.integers(0, 10_000), st.sets(st.integers(1, 4), max_size=2), st.permutations(range(4)), st.booleans())
def test_the_best_taker(seed: int, cuts: set[int], order: Sequence[int], chain: bool) -> None:
    drawn = random_problem(seed, pieces=5, machines=4, chain=chain)
    problem = dataclasses.replace(drawn, pins=(), maximum_machines=None, stages=None)
    problem = dataclasses.replace(problem, maximum_period_seconds=math.inf, maximum_latency_seconds=math.inf)
    stages = some_stages(problem, cuts, order)
    if judge(problem, [(stage.machines, list(stage.layers)) for stage in stages]) is None:
        return
    graph, used = lower(problem, stages), [stage.machine for stage in stages]
    for lost in used:
        best = fallback(problem, graph, lost, by_pieces(problem, stages))
        value = best.period_seconds if problem.objective == "throughput" else best.latency_seconds
        for machine in problem.machines:
            if machine.name in used:
                continue
            moved = [
                ((machine.name if stage.machine == lost else stage.machine,), list(stage.layers)) for stage in stages
            ]
            judged = judge(problem, moved)
            if judged is not None:
                assert value is not None
                assert value <= judged[problem.objective == "latency"] * (1 + 1e-6)
                if machine.name == best.destination:
                    assert (best.period_seconds, best.latency_seconds) == pytest.approx(judged, rel=1e-6, abs=1e-12)
        assert best.destination != lost
        assert (best.destination == "") == (value is None)


SECONDS = {A: [0.002, 0.003, 0.004], B: [0.004, 0.006, 0.008], C: [0.01, 0.01, 0.01]}
PROFILE = chain_profile(SECONDS, latency_seconds=0.0)
HALVES = (Stage((A,), ("layer_0", "layer_1")), Stage((B,), ("layer_2",)))


def test_a_busy_machine_takes_a_stage_beside_its_own() -> None:
    problem = chain_problem(PROFILE)
    graph, slower = lower(problem, HALVES), by_pieces(problem, HALVES)
    assert fallback(problem, graph, B, slower) == Fallback(B, A, pytest.approx(0.009), pytest.approx(0.009, rel=1e-2))
    without_a = fallback(problem, graph, A, slower)
    assert (without_a.destination, without_a.period_seconds) == (B, pytest.approx(0.010 + 0.008))
    small = chain_problem(PROFILE, memory={A: 6250})
    assert fallback(small, graph, B, slower).destination == C
    far = chain_problem(chain_profile({**SECONDS, C: SECONDS[A]}, bytes_per_second=1e4))
    assert fallback(far, graph, B, by_pieces(far, HALVES)).destination == C  # as good as on A, and idle
    none = dataclasses.replace(problem, links=(), machines=problem.machines[:2])
    assert fallback(none, graph, A, slower) == Fallback(A)


def test_a_lost_replica_is_left_out_or_goes_to_an_idle_machine() -> None:
    def replicas(*machines: str) -> tuple[Stage, ...]:
        return (Stage(machines, ("layer_0", "layer_1", "layer_2"), (1 / len(machines),) * len(machines)),)

    for seconds, left in ((SECONDS, replicas(A)), ({**SECONDS, C: SECONDS[A]}, replicas(A, C))):
        problem = chain_problem(chain_profile(seconds))
        graph, slower = lower(problem, replicas(A, B)), by_pieces(problem, replicas(A, B))
        assert fallback(problem, graph, B, slower) == Fallback(B, left[0].machines[-1], *_times(problem, left))


def test_a_busy_machine_takes_no_replica() -> None:
    problem = chain_problem(chain_profile({**SECONDS, C: [0.001] * 3}))
    first = Stage((C,), ("layer_0", "layer_1"))
    stages, left = (
        (first, Stage(machines, ("layer_2",), (1 / len(machines),) * len(machines))) for machines in ((A, B), (A,))
    )
    assert fallback(problem, lower(problem, stages), B, by_pieces(problem, stages)) == Fallback(
        B, A, *_times(problem, left)
    )


def _times(problem: Problem, stages: tuple[Stage, ...]) -> tuple[float, float]:
    solution = solution_of(problem, stages)
    return pytest.approx(solution.period_seconds), pytest.approx(solution.latency_seconds)
