"""Exact solutions of chains, compared with exhaustive search."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.helpers.placement.many_machines import many_machines_problem
from tests.helpers.placement.oracle import assert_is_best, best, chain_plans, graph_plans
from tests.helpers.placement.problems import on_one_host, random_problem
from tvm_split.placement.problem import Problem
from tvm_split.placement.search import Budget, solve

SEEDS = st.integers(0, 2**32)


@settings(max_examples=150)
@given(SEEDS, st.integers(1, 6), st.integers(1, 3), st.booleans(), st.booleans())
@example(9, 1, 3, True, False)
@example(71780, 1, 1, False, True)  # cores that only the client uses
@example(9, 1, 3, True, True)  # the plan exceeds the bound without shared cores in its last digit
def test_chains_equal_the_best_of_all_plans(
    seed: int, pieces: int, machines: int, replicas: bool, shared_cores: bool
) -> None:
    pieces = min(pieces, 5) if replicas else pieces
    problem = random_problem(seed, pieces=pieces, machines=machines, replicas=replicas, shared_cores=shared_cores)
    assert_is_best(problem, best(problem, chain_plans(problem)), is_exact=not shared_cores)


@settings(max_examples=15)
@given(SEEDS, st.integers(1, 6))
def test_four_machines_equal_the_best_of_all_plans(seed: int, pieces: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=4)
    assert_is_best(problem, best(problem, chain_plans(problem)))


@settings(max_examples=30)
@given(SEEDS, st.integers(7, 60), st.integers(2, 6))
def test_other_plans_are_never_better(seed: int, pieces: int, machines: int) -> None:
    problem = random_problem(seed, pieces=pieces, machines=machines, plain=True)
    solution = solve(problem, budget=Budget())
    value = solution.lower_bound_seconds
    for alternative in solution.alternatives:
        other_value = alternative.period_seconds if problem.objective == "throughput" else alternative.latency_seconds
        assert other_value >= value * (1 - 1e-9)
        assert alternative.why
    used = {machine for stage in solution.stages for machine in stage.machines}
    for machine in problem.machines:
        assert (f"{machine.name} is idle" in solution.why_no_more_machines) == (machine.name not in used)
    assert math.isfinite(value)


@pytest.mark.parametrize("replicas", [False, True])
def test_a_chain_has_a_plan_and_its_bound_also_without_time_for_the_exact_one(replicas: bool) -> None:
    problem = many_machines_problem(7, 40, replicas=replicas)
    solution = solve(problem, budget=Budget(work=2e5))
    exact = solve(problem, budget=Budget())
    assert exact.method.startswith("exact")
    assert not solution.method.startswith("exact")
    least = exact.lower_bound_seconds
    assert solution.lower_bound_seconds <= least * (1 + 1e-9) <= solution.evaluation.period_seconds * (1 + 2e-9)


def oversubscribed_problem(seed: int, workers: int, pieces: int, cores: int) -> Problem:
    """Identical workers on one host, with unequal pieces and tensors; transfers also use cores."""
    chance = random.Random(seed)
    problem = on_one_host(workers, pieces, cores)
    seconds = [chance.choice([0.0, 0.001, 0.01]) + chance.uniform(0, 0.01) for _ in problem.pieces]
    slow, contention = chance.choice([0.0, 0.002, 0.01]), chance.choice([1.0, 1.3])
    settings = {"transfer_seconds": slow, "transfer_seconds_per_byte": slow / 100, "contention": contention}
    memory = chance.choice([math.inf, 400.0])
    return replace(
        problem,
        machines=tuple(replace(machine, memory_bytes=memory, **settings) for machine in problem.machines),
        pieces=tuple(
            replace(piece, seconds=dict.fromkeys(piece.seconds, duration), weight_bytes=100.0)
            for piece, duration in zip(problem.pieces, seconds, strict=True)
        ),
        edges=tuple(replace(edge, bytes=chance.choice([0.0, 8.0, 100.0])) for edge in problem.edges),
        links=tuple(replace(link, bytes_per_second=2e4) for link in problem.links),
        client_transfer_seconds=slow / 2,
        stages=chance.choice([None, None, 2, workers]),
    )


@settings(max_examples=8)
@given(SEEDS, st.integers(2, 4), st.integers(4, 6), st.integers(1, 3))
def test_identical_machines_on_shared_cores_equal_the_best_of_all_plans(
    seed: int, workers: int, pieces: int, cores: int
) -> None:
    problem = oversubscribed_problem(seed, workers, pieces, cores)
    assert_is_best(problem, best(problem, graph_plans(problem)), is_exact=False)


def test_many_workers_on_two_cores_need_no_more_than_two() -> None:
    problem = on_one_host(64, 200, 2)
    machines = tuple(replace(machine, transfer_seconds=1e-4) for machine in problem.machines)
    solution = solve(replace(problem, machines=machines), budget=Budget(work=2e8))
    assert solution.gap < 1e-3
    assert len(solution.stages) == 2
