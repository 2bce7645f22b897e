"""Chains on alike machines that share too few cores, against every plan there is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.planner.oracle import best, graph_plans
from tests.helpers.planner.problems import on_one_host
from tvm_split.planner.problem import Problem
from tvm_split.planner.search import solve
from tvm_split.planner.search.crowded_chain import is_crowded_chain, solve_crowded_chain
from tvm_split.planner.search.instance import instance_of


def crowded_problem(seed: int, workers: int, pieces: int, cores: int) -> Problem:
    """Alike workers of one host, with unequal pieces and tensors, and cores that transfers take of, too."""
    chance = random.Random(seed)
    problem = on_one_host(workers, pieces, cores)
    seconds = [chance.choice([0.0, 0.001, 0.01]) + chance.uniform(0, 0.01) for _ in problem.pieces]
    slow = chance.choice([0.0, 0.002, 0.01])
    machines = tuple(
        replace(
            each,
            transfer_seconds=slow,
            transfer_seconds_per_byte=slow / 100,
            contention=chance_of_all,
            memory_bytes=memory,
        )
        for chance_of_all, memory in [(chance.choice([1.0, 1.3]), chance.choice([float("inf"), 400.0]))]
        for each in problem.machines
    )
    return replace(
        problem,
        machines=machines,
        pieces=tuple(
            replace(piece, seconds=dict.fromkeys(piece.seconds, each), weight_bytes=100.0)
            for piece, each in zip(problem.pieces, seconds, strict=True)
        ),
        edges=tuple(replace(edge, bytes=chance.choice([0.0, 8.0, 100.0])) for edge in problem.edges),
        links=tuple(replace(link, bytes_per_second=2e4) for link in problem.links),
        client_transfer_seconds=slow / 2,
        stages=chance.choice([None, None, 2, workers]),
        maximum_machines=chance.choice([None, 2]),
    )


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(4, 6), st.integers(1, 3))
def test_no_plan_is_better(seed: int, workers: int, pieces: int, cores: int) -> None:
    problem = crowded_problem(seed, workers, pieces, cores)
    if problem.maximum_machines is not None and (problem.stages or 0) > problem.maximum_machines:
        return
    instance = instance_of(problem)
    assert is_crowded_chain(instance)
    chosen, found = solve_crowded_chain(instance)
    expected = best(problem, graph_plans(problem))
    assert (chosen is None) == (expected is None)
    if chosen is not None and expected is not None:
        assert chosen.evaluation.period_seconds == pytest.approx(expected[0], rel=1e-9)
        assert chosen in found


def test_many_workers_on_two_cores_are_solved_exactly_and_at_once() -> None:
    problem = on_one_host(64, 200, 2)
    machines = tuple(replace(each, transfer_seconds=1e-4) for each in problem.machines)
    found = solve(replace(problem, machines=machines), time_limit_seconds=0.1)
    assert found.gap == 0.0
    assert found.method.startswith("exact: dynamic programming over cuts of a chain on machines that share cores")
    assert len(found.stages) == 2


def test_where_cores_suffice_or_machines_are_unlike_it_is_no_such_chain() -> None:
    problem = on_one_host(3, 12, 2)
    assert is_crowded_chain(instance_of(problem))
    unlike = replace(problem, machines=(replace(problem.machines[0], memory_bytes=1e9), *problem.machines[1:]))
    for other in (
        replace(problem, shared_cores=()),
        replace(problem, replicas=True),
        replace(problem, objective="latency"),
        unlike,
    ):
        assert not is_crowded_chain(instance_of(other))
