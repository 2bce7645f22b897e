from __future__ import annotations

import math

from hypothesis import given, settings, strategies as st

from tests.helpers.planner.many_machines import many_machines_problem
from tests.helpers.planner.oracle import assert_is_best, best, chain_plans
from tests.helpers.planner.problems import random_problem
from tvm_split.planner.search import solve
from tvm_split.planner.search.chain import is_small_enough
from tvm_split.planner.search.instance import instance_of

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
