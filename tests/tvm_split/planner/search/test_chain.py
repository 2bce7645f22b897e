from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.planner.many_machines import many_machines_problem
from tests.helpers.planner.oracle import assert_is_best, best, chain_plans
from tests.helpers.planner.problems import random_problem
from tvm_split.planner.search import solve
from tvm_split.planner.search.chain import ChainSearch, is_small_enough, solve_chain
from tvm_split.planner.search.instance import instance_of
from tvm_split.planner.search.stage_dp import OutOfTimeError

SEEDS = st.integers(0, 2**32)


@settings(max_examples=600)
@given(SEEDS, st.integers(1, 6), st.integers(1, 3))
def test_chains_equal_the_best_of_all_plans(seed: int, pieces: int, machines: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines)
    assert_is_best(problem, best(problem, chain_plans(problem)))


@settings(max_examples=80)
@given(SEEDS, st.integers(1, 6))
def test_four_machines_equal_the_best_of_all_plans(seed: int, pieces: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=4)
    assert_is_best(problem, best(problem, chain_plans(problem)))


@settings(max_examples=200)
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


def test_tables_are_made_where_they_take_seconds() -> None:
    """Of eleven unlike machines two hundred pieces, but not twenty with replicas: most calls are for few elements."""
    assert is_small_enough(instance_of(many_machines_problem(11, 200)))
    assert is_small_enough(instance_of(many_machines_problem(8, 200, replicas=True)))
    assert not is_small_enough(instance_of(many_machines_problem(11, 20, replicas=True)))


def test_tables_end_with_the_time() -> None:
    """What is too much for the limit is not begun, and what was begun ends at the deadline."""
    problem = many_machines_problem(256, 500, kinds="equal")
    assert is_small_enough(instance_of(problem), 10.0)
    assert not is_small_enough(instance_of(problem), 0.1)
    small = many_machines_problem(4, 12)
    with pytest.raises(OutOfTimeError):
        solve_chain(ChainSearch(instance_of(small), time.monotonic() - 1.0))
    search = ChainSearch(instance_of(small), math.inf)
    chosen = solve_chain(search)
    assert chosen is not None
    search.deadline = time.monotonic() - 1.0
    with pytest.raises(OutOfTimeError):
        search.others(chosen)


@pytest.mark.parametrize("replicas", [False, True])
def test_a_chain_has_a_plan_and_its_bound_also_when_its_tables_are_not_filled(replicas: bool) -> None:
    problem = many_machines_problem(9, 40, replicas=replicas)
    found = solve(problem, time_limit_seconds=1e-3)
    assert "dynamic programming over sets" not in found.method
    exact = solve(problem, time_limit_seconds=60.0)
    assert exact.method.startswith("exact: dynamic programming over sets")
    least = exact.lower_bound_seconds
    assert found.lower_bound_seconds <= least * (1 + 1e-9) <= found.evaluation.period_seconds * (1 + 2e-9)


def test_equal_machines_whose_one_table_is_too_much_are_searched_without_it() -> None:
    found = solve(many_machines_problem(120, 120, kinds="equal"), time_limit_seconds=0.02)
    assert "dynamic programming" not in found.method
    assert found.lower_bound_seconds <= found.evaluation.period_seconds
