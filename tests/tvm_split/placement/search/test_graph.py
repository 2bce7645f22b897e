"""Graphs with branches and skips: small ones compared with exhaustive search, larger ones with their bounds."""

import dataclasses

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.helpers.placement.oracle import assert_is_best, best, graph_plans
from tests.helpers.placement.problems import random_problem
from tests.helpers.placement.steps import evaluate_stages
from tvm_split.placement.problem import Edge, Piece, Problem, ProblemLink, ProblemMachine
from tvm_split.placement.search import Budget, solve
from tvm_split.placement.search.bounds import longest_path, period_bound
from tvm_split.placement.search.candidate import one_machine_candidates
from tvm_split.placement.search.instance import instance_of
from tvm_split.placement.search.search import RESOLVED

SEEDS = st.integers(0, 2**32)
LITTLE = 1.0e8
"""Work limit of a search that need not prove optimality."""


@settings(max_examples=80)
@given(SEEDS, st.integers(2, 6), st.integers(1, 3), st.booleans(), st.booleans())
@example(144, 2, 3, False, False)  # all periods are 0, so only the latency matters
@example(53552, 3, 3, True, False)
@example(233, 4, 3, True, False)
def test_small_graphs_equal_the_best_of_all_plans(
    seed: int, pieces: int, machines: int, replicas: bool, shared_cores: bool
) -> None:
    problem = random_problem(
        seed, pieces=pieces, machines=machines, chain=False, replicas=replicas, shared_cores=shared_cores
    )
    assert_is_best(problem, best(problem, graph_plans(problem)), is_exact=False)


@settings(max_examples=30)
@given(SEEDS, st.integers(2, 6), st.integers(1, 3))
def test_bounds_are_below_every_plan(seed: int, pieces: int, machines: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines, chain=False)
    instance = instance_of(problem)
    for objective in ("throughput", "latency"):
        expected = best(dataclasses.replace(problem, objective=objective), graph_plans(problem))
        if expected is None:
            continue
        alone = [plan.flow.period_seconds for plan in one_machine_candidates(instance)]
        if objective == "throughput":
            assert min([period_bound(instance, Budget()), *alone]) <= expected[0] * (1 + 1e-9)
        else:
            assert longest_path(instance) <= expected[0] * (1 + 1e-9)


@settings(max_examples=5)
@given(SEEDS, st.integers(12, 24), st.integers(2, 4))
def test_larger_graphs_have_plans_that_hold_and_bounds_below_them(seed: int, pieces: int, machines: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines, chain=False, plain=True)
    solution = solve(problem, budget=Budget(work=LITTLE))
    assert evaluate_stages(problem, solution.stages) == solution.evaluation
    value = value_of(problem, solution.evaluation.period_seconds, solution.evaluation.latency_seconds)
    assert solution.lower_bound_seconds <= value
    assert solution.gap == pytest.approx((value - solution.lower_bound_seconds) / value if value else 0.0)
    for alternative in solution.alternatives:
        assert value_of(problem, alternative.period_seconds, alternative.latency_seconds) >= value * (1 - 1e-9)


def test_a_stage_with_a_skip_gets_replicas() -> None:
    """The slow middle block, with a skip connection around it, gets replicas on two machines."""
    names = ["machine-0", "machine-1", "machine-2"]
    seconds = {"enter": 0.001, "left": 0.01, "right": 0.01, "join": 0.001}
    links = [(a, b) for a in [*names, "client"] for b in [*names, "client"] if a != b]
    problem = Problem(
        objective="throughput",
        machines=tuple(ProblemMachine(name) for name in names),
        links=tuple(ProblemLink(a, b, 1e9, 0.0) for a, b in links),
        pieces=tuple(Piece(name, dict.fromkeys(names, duration)) for name, duration in seconds.items()),
        edges=tuple(
            Edge(a, b, 8.0)
            for a, b in [("enter", "left"), ("enter", "right"), ("enter", "join"), ("left", "join"), ("right", "join")]
        ),
        replicas=True,
    )
    solution = solve(problem)
    assert solution.gap < 1e-6
    assert solution.evaluation.period_seconds == pytest.approx(0.022 / 3, rel=1e-6)
    alone = solve(dataclasses.replace(problem, replicas=False))
    assert alone.evaluation.period_seconds > solution.evaluation.period_seconds


@settings(max_examples=3, derandomize=True)
@given(SEEDS, st.integers(12, 24))
def test_replicas_on_larger_graphs_hold_and_are_no_worse_than_without(seed: int, pieces: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=3, chain=False, plain=True, replicas=True)
    solution = solve(problem, budget=Budget(work=2 * LITTLE))
    assert evaluate_stages(problem, solution.stages) == solution.evaluation
    without = solve(dataclasses.replace(problem, replicas=False), budget=Budget(work=LITTLE))
    value, value_without = (
        value_of(problem, result.evaluation.period_seconds, result.evaluation.latency_seconds)
        for result in (solution, without)
    )
    assert solution.lower_bound_seconds <= value <= value_without * (1 + RESOLVED)


def value_of(problem: Problem, period: float, latency: float) -> float:
    return period if problem.objective == "throughput" else latency
