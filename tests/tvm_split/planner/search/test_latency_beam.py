"""The least latency on more machines than tables can list, and plans that hold on few."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.planner.many_machines import LinkKinds, MachineKinds, Networks, many_machines_problem
from tests.helpers.planner.oracle import best, graph_plans, judge
from tests.helpers.planner.problems import random_problem
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Problem
from tvm_split.planner.search import solve
from tvm_split.planner.search.candidate import Candidate, candidate, fits, one_machine_candidates, within_limits
from tvm_split.planner.search.instance import instance_of
from tvm_split.planner.search.latency_beam import MOST_KINDS
from tvm_split.planner.search.latency_bound import LatencyBound
from tvm_split.planner.search.latency_search import search_latencies
from tvm_split.planner.search.placement import Placed
from tvm_split.planner.search.simple_plans import simple_plans


def found(problem: Problem, *widths: int) -> list[Candidate]:
    """What beams find along all orders that holds."""
    instance = instance_of(problem)
    kept: list[Candidate] = []

    def keep(stages: list[Placed]) -> float:
        with contextlib.suppress(PlanError):
            plan = candidate(instance, stages)
            if fits(instance, plan) and within_limits(problem, plan.evaluation):
                kept.append(plan)
        return min((plan.evaluation.latency_seconds for plan in kept), default=math.inf)

    search_latencies(instance, LatencyBound(instance), keep, math.inf, widths or (2, 8))
    return kept


@pytest.mark.parametrize("network", ["chain", "residual", "branches"])
def test_what_only_many_machines_can_hold_is_planned_for_latency(network: Networks) -> None:
    """Each holds a sixteenth of the weights, so that the fastest dozen are too few."""
    problem = many_machines_problem(24, 48, network=network, seed=6)
    weights = sum(piece.weight_bytes for piece in problem.pieces)
    small = tuple(dataclasses.replace(machine, memory_bytes=weights / 16 + 8e6) for machine in problem.machines)
    problem = dataclasses.replace(problem, objective="latency", machines=small)
    plan = solve(problem, time_limit_seconds=2.0)
    assert len(plan.stages) > 12
    assert plan.lower_bound_seconds <= plan.evaluation.latency_seconds


def with_room_for(problem: Problem, pieces: float) -> Problem:
    """For the least latency, where no machine holds many more than so many pieces of the mean size."""
    mean = sum(piece.weight_bytes for piece in problem.pieces) / len(problem.pieces)
    crossing = 3 * problem.buffers * max(edge.bytes for edge in problem.edges)
    room = pieces * mean + max(piece.activation_bytes for piece in problem.pieces) + crossing
    chosen = random.Random(0)
    small = (dataclasses.replace(each, memory_bytes=room * chosen.uniform(1, 1.5)) for each in problem.machines)
    return dataclasses.replace(problem, objective="latency", machines=tuple(small))


@pytest.mark.parametrize(("kinds", "room"), [("unlike", 3.0), ("equal", 2.0)])
def test_no_time_is_too_short_for_a_latency_by_first_fit(kinds: MachineKinds, room: float) -> None:
    problem = with_room_for(many_machines_problem(60, 100, kinds=kinds, network="branches", seed=9), room)
    simple = simple_plans(instance_of(problem))
    assert simple
    found = solve(problem, time_limit_seconds=0.0).evaluation.latency_seconds
    assert found <= min(each.evaluation.latency_seconds for each in simple) * (1 + 1e-9)


def test_more_kinds_of_machines_than_are_looked_at() -> None:
    """Each holds one piece, so that a way that has used all that are looked at is not at its end."""
    problem = many_machines_problem(MOST_KINDS + 4, MOST_KINDS + 2, seed=8)
    problem = dataclasses.replace(
        problem,
        objective="latency",
        pieces=tuple(dataclasses.replace(piece, weight_bytes=1e9) for piece in problem.pieces),
        machines=tuple(dataclasses.replace(machine, memory_bytes=1.5e9) for machine in problem.machines),
    )
    assert len(solve(problem, time_limit_seconds=1.0).stages) == MOST_KINDS + 2


def test_each_piece_goes_where_it_is_fastest() -> None:
    """Thirty machines, each of them fast with its own two pieces only; the dozen of least sums would miss most."""
    problem = many_machines_problem(30, 60, kinds="equal", seed=7)
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
    problem = dataclasses.replace(problem, objective="latency", pieces=pieces)
    assert len(solve(problem, time_limit_seconds=2.0).stages) > 20


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(2, 4), st.booleans())
def test_plans_hold_and_none_is_better_than_the_best(seed: int, pieces: int, machines: int, chain: bool) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines, chain=chain, replicas=False, objective="latency")
    if np.isinf(instance_of(problem).seconds).all(axis=1).any():
        return
    expected = best(problem, graph_plans(problem))
    for plan in found(problem):
        judged = judge(problem, [(stage.machines, list(stage.layers)) for stage in plan.named(instance_of(problem))])
        assert judged == pytest.approx((plan.evaluation.period_seconds, plan.evaluation.latency_seconds), rel=1e-9)
        assert expected is not None
        assert plan.evaluation.latency_seconds >= expected[0] * (1 - 1e-9)


def latency_problem(
    machines: int, pieces: int, kinds: MachineKinds, links: LinkKinds, network: Networks, seed: int
) -> Problem:
    problem = many_machines_problem(machines, pieces, kinds=kinds, links=links, network=network, seed=seed)
    return dataclasses.replace(problem, objective="latency")


def test_branches_are_computed_side_by_side() -> None:
    """The fastest machine alone takes 0.261 s, and stages one after the other take hardly less."""
    few, many = (latency_problem(count, 30, "three kinds", "two racks", "branches", 76) for count in (10, 20))
    least = [min(each.evaluation.latency_seconds for each in found(problem, 2)) for problem in (few, many)]
    assert least[0] <= 0.245
    assert least[1] <= LatencyBound(instance_of(many)).whole * 1.01


@settings(max_examples=5)
@given(
    st.integers(6, 20),
    st.integers(1, 8),
    st.sampled_from(["three kinds", "unlike"]),
    st.sampled_from(["alike", "two racks", "four sites"]),
    st.sampled_from(["residual", "branches"]),
    st.integers(0, 2**32),
)
def test_more_machines_are_never_slower(
    machines: int, fewer: int, kinds: MachineKinds, links: LinkKinds, network: Networks, seed: int
) -> None:
    """Also where the fewer ones are as few as tables list; single machines and a dozen as a chain are among them."""
    least = []
    for count in (machines, max(2, machines - fewer)):
        problem = latency_problem(count, 23, kinds, links, network, seed)
        instance = instance_of(problem)
        plans = [*found(problem, 2), *one_machine_candidates(instance)]
        least.append(min(each.evaluation.latency_seconds for each in plans))
    assert least[0] <= least[1] * (1 + 1e-9)
