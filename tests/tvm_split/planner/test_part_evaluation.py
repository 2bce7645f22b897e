"""Plans as parts: the same as whole stages where they are such, and what shared ones add."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tests.helpers.planner.parts import part, parts_of_stages
from tests.helpers.planner.problems import random_problem
from tvm_split.errors import PlanError
from tvm_split.planner.part_evaluation import evaluate_parts, lack_of_memory
from tvm_split.planner.parts import Delivery, PlanParts
from tvm_split.planner.problem import Problem, ProblemLink, ProblemMachine, Stage, objective_seconds
from tvm_split.planner.search import evaluate, solve
from tvm_split.planner.search.bounds import division_bound

ENDS = [(one, other) for one in ("a", "b", "client") for other in ("a", "b", "client") if one != other]
MACHINES = (ProblemMachine("a", 1000.0, contention=2.0, transfer_seconds=0.5), ProblemMachine("b", 50.0))
PROBLEM = Problem("latency", MACHINES, tuple(ProblemLink(*each, 100.0, 1.0) for each in ENDS), (), (), buffers=3)
SHARED = PlanParts(
    (
        part("a0", "a", 2.0, 3.0, weight_bytes=5.0, activation_bytes=7.0),
        part("b0", "b", 1.0, 1.5, weight_bytes=5.0, activation_bytes=9.0),
        part("a1", "a", 0.5, weight_bytes=4.0, activation_bytes=8.0),
    ),
    (
        Delivery("x", "client", ("a0",), 100.0),
        Delivery("x", "client", ("b0",), 100.0),
        Delivery("half", "b0", ("a1",), 10.0),
        Delivery("own", "a0", ("a1",), 10.0),
        Delivery("y", "a1", (), 20.0),
    ),
)


def test_a_shared_stage() -> None:
    found = evaluate_parts(PROBLEM, SHARED)
    # The latency with what company costs: 2 for the input, 3 on a; the half of b is there before.
    assert found.latency_seconds == pytest.approx(2.0 + 3.0 + 0.5 + 1.2)
    first, second = found.loads
    # In a stream twice 2.5, and three tensors to serialise.
    assert first.compute_seconds == pytest.approx(2.5 * 2.0 + 3 * 0.5)
    assert (first.receive_seconds, first.send_seconds) == (pytest.approx(1.1), pytest.approx(0.2))
    assert (first.weight_bytes, first.activation_bytes, first.buffer_bytes) == (9.0, 8.0, 3 * 130.0)
    assert (second.bytes_received, second.bytes_sent) == (100.0, 10.0)
    assert found.period_seconds == first.compute_seconds
    assert found.limiting == "compute of a"
    assert lack_of_memory(PROBLEM, found) == pytest.approx(5 + 9 + 3 * 110 - 50)


def test_a_link_that_limits_is_named() -> None:
    slow = replace(PROBLEM, links=tuple(replace(link, bytes_per_second=1.0) for link in PROBLEM.links))
    assert evaluate_parts(slow, SHARED).limiting == "receiving on a over the links from the client and b"


def test_a_machine_that_there_is_not() -> None:
    with pytest.raises(PlanError, match="'z'; there are a, b"):
        evaluate_parts(PROBLEM, PlanParts((part("z0", "z", 1.0),), ()))


@given(st.integers(0, 10**6), st.booleans())
def test_whole_stages_are_what_the_search_says_of_them(seed: int, chain: bool) -> None:
    generator = random.Random(seed)
    problem = random_problem(seed, pieces=generator.randint(1, 7), machines=3, chain=chain, plain=True)
    names = [piece.name for piece in problem.pieces]
    machines = generator.sample([machine.name for machine in problem.machines], 3)
    cuts = sorted(generator.sample(range(1, len(names)), min(len(names) - 1, generator.randint(0, 2))))
    stages = [
        Stage((machine,), tuple(names[first:end]))
        for machine, first, end in zip(machines, [0, *cuts], [*cuts, len(names)], strict=False)
    ]
    expected, found = evaluate(problem, stages), evaluate_parts(problem, parts_of_stages(problem, stages))
    assert found.latency_seconds == pytest.approx(expected.latency_seconds)
    assert found.period_seconds == pytest.approx(expected.period_seconds)
    by_machine = {load.machine: load for load in expected.loads}
    for load in found.loads:
        other = by_machine[load.machine]
        for field in ("compute_seconds", "receive_seconds", "send_seconds", "memory_bytes"):
            assert getattr(load, field) == pytest.approx(getattr(other, field))


@given(st.integers(0, 10**6), st.sampled_from(["throughput", "latency"]))
def test_no_plan_of_several_machines_is_below_pieces_divided_at_will(seed: int, objective: str) -> None:
    problem = random_problem(seed, pieces=4, machines=3, plain=True, objective=objective)
    best = solve(replace(problem, stages=2))
    assert division_bound(problem) <= objective_seconds(objective, best.evaluation) * (1 + 1e-5)
