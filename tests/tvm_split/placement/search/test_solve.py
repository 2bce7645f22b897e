"""Errors, ties, classes of identical machines, and the text of the certificate."""

import dataclasses

import pytest

from tvm_split.errors import PlanError
from tvm_split.placement.problem import Edge, Piece, Pin, Problem, ProblemLink, ProblemMachine
from tvm_split.placement.search import Budget, solve


def chain(
    seconds: dict[str, float], *, count: int = 4, weight: float = 10.0, size: float = 1.0, **settings: object
) -> Problem:
    """``count`` pieces with ``seconds`` by machine; all machines are linked."""
    problem = Problem(
        "throughput",
        tuple(ProblemMachine(name) for name in seconds),
        tuple(ProblemLink(a, b, 1000.0, 0.5) for a in seconds for b in seconds if a != b),
        tuple(Piece(f"p{index}", seconds, weight) for index in range(count)),
        tuple(Edge(f"p{index}", f"p{index + 1}", size) for index in range(count - 1)),
    )
    return dataclasses.replace(problem, **settings)  # type: ignore[arg-type]


EQUAL = chain({"a": 1.0, "b": 1.0})
CYCLE = (Pin("p0", "a"), Pin("p1", "b"), Pin("p2", "a"))
SMALL = tuple(ProblemMachine(name, 15.0) for name in "ab")


@pytest.mark.parametrize("beside", [(), (Piece("beside", {"a": 0.0, "b": 0.0}),)])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machines": SMALL}, "lacks 10 B: .* needs 20 B .* and has 15 B; .* needs 20 B"),
        ({"pins": (Pin("p1", "a"), Pin("p1", "b"))}, "'p1' can run on no machine: not on a, since it is pinned to b"),
        ({"pins": CYCLE}, "no plan keeps to the pins"),
        ({"pins": CYCLE[:2], "links": ()}, "no link from a to b"),
        ({"stages": 3}, "3 stages were asked for, but there are 2 machines"),
        ({"maximum_period_seconds": 1.5}, "period of at most 1.5 s; the least found is 2 s"),
        ({"maximum_latency_seconds": 3.5}, "latency of at most 3.5 s; the least found is 4 s"),
        ({"maximum_latency_seconds": 4.2, "maximum_period_seconds": 2.5}, "with that period, the least .* is 4.5 s"),
        ({"pins": (Pin("p9", "a"),)}, "no piece is named 'p9'; there are"),
        ({"links": (ProblemLink("a", "d", 1.0),)}, "no machine is named 'd'; there are a, b"),
        ({"edges": (Edge("p0", "p1", 1.0), Edge("p1", "p0", 1.0))}, "cycle among 'p0', 'p1'"),
    ],
)
def test_what_cannot_be_is_said_with_its_reason(
    changes: dict[str, object], message: str, beside: tuple[Piece, ...]
) -> None:
    problem = dataclasses.replace(EQUAL, **changes)  # type: ignore[arg-type]
    problem = dataclasses.replace(problem, pieces=(*problem.pieces, *beside))
    with pytest.raises(PlanError, match=message):
        solve(problem, budget=Budget(work=1e8))


def test_the_nearest_plan_names_every_machine_that_lacks_memory() -> None:
    machines = (ProblemMachine("a", 15.0), ProblemMachine("b", 8.0))
    with pytest.raises(PlanError, match=r"the plan found that comes nearest lacks 17 B: (a|b) needs .*; (a|b) needs"):
        solve(dataclasses.replace(EQUAL, machines=machines))


def test_equal_periods_are_decided_by_latency_and_then_by_fewer_machines() -> None:
    # p0 takes 4 seconds on every machine, so a third machine gains nothing.
    problem = chain({"a": 1.0, "b": 1.0, "c": 1.0})
    slow = Piece("p0", {"a": 4.0, "b": 4.0, "c": 4.0})
    problem = dataclasses.replace(problem, pieces=(slow, *problem.pieces[1:]))
    solution = solve(problem)
    assert solution.evaluation.period_seconds == 4.0
    assert len(solution.stages) == 2
    assert "c is idle: the best plan found that uses it has the same period of 4 s" in solution.why_no_more_machines


def test_a_slow_machine_and_a_slow_link_stay_unused() -> None:
    solution = solve(chain({"a": 1.0, "b": 100.0}))
    assert [stage.machines for stage in solution.stages] == [("a",)]
    assert "b is idle: the best plan found that uses it has a period of 100 s" in solution.why_no_more_machines
    slow = solve(chain({"a": 1.0, "b": 1.0}, size=10_000.0))
    assert len(slow.stages) == 1
    assert "over the link" in slow.why_no_more_machines


def test_far_fewer_machines_are_among_the_alternatives() -> None:
    """A plan on them may be preferred, though it is not near in the number of machines."""
    solution = solve(chain(dict.fromkeys("abcdefgh", 1.0), count=16))
    assert len(solution.stages) == 8
    assert {1, 2, 4} <= {len(alternative.stages) for alternative in solution.alternatives}


def test_alternatives_say_why_they_lost() -> None:
    solution = solve(chain({"a": 1.0, "b": 1.5, "c": 2.0}, count=6))
    assert 1 <= len(solution.alternatives) <= 4
    assert all(alternative.period_seconds > solution.evaluation.period_seconds for alternative in solution.alternatives)
    assert any(alternative.name == "all on a" and "6 s" in alternative.why for alternative in solution.alternatives)
