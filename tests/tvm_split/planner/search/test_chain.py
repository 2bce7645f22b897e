from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tvm_split.planner.search.oracle import best, chain_plans, judge
from tests.tvm_split.planner.search.problems import random_problem
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Problem, Solution
from tvm_split.planner.search import solve

SEEDS = st.integers(0, 2**32)


def solution_of(problem: Problem) -> Solution | None:
    try:
        return solve(problem)
    except PlanError:
        return None


def assert_is_best(problem: Problem, expected: tuple[float, float] | None) -> None:
    found = solution_of(problem)
    if expected is None:
        assert found is None
        return
    assert found is not None
    evaluation = found.evaluation
    judged = judge(problem, [(stage.machines, list(stage.layers)) for stage in found.stages])
    assert judged == pytest.approx((evaluation.period_seconds, evaluation.latency_seconds), rel=1e-9, abs=1e-15)
    values = evaluation.period_seconds, evaluation.latency_seconds
    if problem.objective == "latency":
        values = values[::-1]
    assert values == pytest.approx(expected, rel=2e-9, abs=1e-15)
    assert found.gap == 0.0
    assert found.lower_bound_seconds == pytest.approx(expected[0], rel=1e-9, abs=1e-15)


@settings(max_examples=1500)
@given(SEEDS, st.integers(1, 6), st.integers(1, 3))
def test_chains_equal_the_best_of_all_plans(seed: int, pieces: int, machines: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines)
    assert_is_best(problem, best(problem, chain_plans(problem)))


@settings(max_examples=200)
@given(SEEDS, st.integers(1, 6))
def test_four_machines_equal_the_best_of_all_plans(seed: int, pieces: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=4)
    assert_is_best(problem, best(problem, chain_plans(problem)))


@settings(max_examples=400)
@given(SEEDS, st.integers(1, 5), st.integers(1, 3))
def test_replicas_equal_the_best_of_all_partitions(seed: int, pieces: int, machines: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines, replicas=True)
    assert_is_best(problem, best(problem, chain_plans(problem)))


@settings(max_examples=30)
@given(SEEDS, st.integers(7, 60), st.integers(2, 6))
def test_other_plans_are_never_better(seed: int, pieces: int, machines: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines, plain=True)
    found = solve(problem)
    value = found.lower_bound_seconds
    for other in found.alternatives:
        other_value = other.period_seconds if problem.objective == "throughput" else other.latency_seconds
        assert other_value >= value * (1 - 1e-9)
        assert other.why
    used = {machine for stage in found.stages for machine in stage.machines}
    for machine in problem.machines:
        assert (f"{machine.name} is idle" in found.why_no_more_machines) == (machine.name not in used)
    assert math.isfinite(value)
