"""Small cases whose numbers are worked out by hand."""

from __future__ import annotations

import pytest

from tvm_split.errors import PlanError
from tvm_split.planner.problem import Edge, Piece, Problem, ProblemLink, ProblemMachine, Stage
from tvm_split.planner.search import evaluate

MACHINES = (ProblemMachine("a", 1000.0), ProblemMachine("b", contention=1.5), ProblemMachine("c"))
LINKS = (
    ProblemLink("a", "b", 100.0, 0.5),
    ProblemLink("a", "c", 200.0, 0.25),
    ProblemLink("b", "c", 50.0, 1.0),
    ProblemLink("client", "a", 1000.0, 0.125),
    ProblemLink("c", "client", 10.0, 2.0),
)


def pieces(*names: str) -> tuple[Piece, ...]:
    return tuple(
        Piece(name, {"a": 1.0, "b": 2.0, "c": 3.0}, weight_bytes=10.0, activation_bytes=float(index))
        for index, name in enumerate(names)
    )


def stage(machine: str, *names: str) -> Stage:
    return Stage((machine,), names)


DIAMOND = Problem(
    "throughput",
    MACHINES,
    LINKS,
    pieces("p", "q", "r"),
    (
        Edge("client", "p", 1000.0),
        Edge("p", "q", 100.0, "out"),
        Edge("p", "r", 100.0, "out"),
        Edge("q", "r", 50.0),
        Edge("r", "client", 20.0),
    ),
    buffers=2,
)


def test_a_diamond_over_three_machines() -> None:
    found = evaluate(DIAMOND, [stage("a", "p"), stage("b", "q"), stage("c", "r")])
    # a: receives 1000 at 1000/s, sends 100 at 100/s and 100 at 200/s; c: receives 100 at 200/s and 50 at 50/s.
    loads = {load.machine: load for load in found.loads}
    assert (loads["a"].compute_seconds, loads["a"].receive_seconds, loads["a"].send_seconds) == (1.0, 1.0, 1.5)
    assert (loads["b"].compute_seconds, loads["b"].receive_seconds, loads["b"].send_seconds) == (3.0, 1.0, 1.0)
    assert (loads["c"].compute_seconds, loads["c"].receive_seconds, loads["c"].send_seconds) == (3.0, 1.5, 2.0)
    assert loads["a"].memory_bytes == 10.0 + 0.0 + 2 * (1000.0 + 200.0)
    assert loads["c"].memory_bytes == 10.0 + 2.0 + 2 * (150.0 + 20.0)
    assert found.period_seconds == 3.0
    assert found.limiting == "compute of b"
    # 1.125 to arrive, 1 on a, 1.5 to b, 2 on b without contention, 2 to c, 3 on c, 4 to the client.
    assert found.latency_seconds == 1.125 + 1.0 + 1.5 + 2.0 + 2.0 + 3.0 + 4.0


def test_a_shared_tensor_crosses_once_to_a_machine_and_others_each_time() -> None:
    stages = [stage("a", "p"), stage("c", "q", "r")]
    assert evaluate(DIAMOND, stages).loads[1].bytes_received == 100.0
    edges = tuple(Edge(edge.source, edge.destination, edge.bytes) for edge in DIAMOND.edges)
    separate = Problem("throughput", MACHINES, LINKS, DIAMOND.pieces, edges)
    assert evaluate(separate, stages).loads[1].bytes_received == 200.0


def test_one_machine_has_no_contention_and_pays_for_the_client() -> None:
    problem = Problem(
        "throughput",
        (ProblemMachine("b", transfer_seconds=0.25, transfer_seconds_per_byte=0.01, contention=1.5),),
        (ProblemLink("client", "b", 10.0), ProblemLink("b", "client", 4.0, 1.0)),
        (Piece("p", {"b": 2.0}), Piece("q", {"b": 1.0})),
        (Edge("client", "p", 100.0), Edge("p", "q", 7.0), Edge("q", "client", 50.0)),
    )
    found = evaluate(problem, [stage("b", "p", "q")])
    assert found.loads[0].compute_seconds == 3.0 + 2 * 0.25 + 150 * 0.01
    assert found.period_seconds == 12.5
    assert found.limiting == "sending on b over the link to the client"
    assert found.latency_seconds == 10.0 + 3.0 + 13.5


def test_replicas_compute_together_and_pay_for_the_slowest_link() -> None:
    problem = Problem("throughput", MACHINES, LINKS, pieces("p", "q"), (Edge("p", "q", 100.0),), replicas=True)
    found = evaluate(problem, [stage("a", "p"), Stage(("b", "c"), ("q",))])
    loads = {load.machine: load for load in found.loads}
    # b takes 2 × 1.5 of contention, c 3: one every 1.5 seconds together; 100 bytes at 100/s and at 200/s.
    assert loads["b"].compute_seconds == loads["c"].compute_seconds == pytest.approx(1.5)
    assert loads["c"].receive_seconds == 1.0
    assert found.limiting == "compute of b and c together (replicas)"
    assert found.latency_seconds == 1.0 + 1.5 + 3.0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage("a", "p"), stage("b", "q")], "places no piece 'r'"),
        ([stage("a", "p", "q", "r", "r")], "'r' is placed twice"),
        ([stage("a", "p"), stage("a", "q", "r")], "'a' has two stages"),
        ([stage("d", "p", "q", "r")], "'d'; there are a, b, c"),
        ([stage("a", "p", "q", "r", "s")], "'s', which the problem does not have"),
        ([stage("a", "p", "r"), stage("b", "q")], "no link from b to a"),
        ([stage("a", "p", "q", "r"), stage("b")], "no stage"),
    ],
)
def test_what_is_no_plan(stages: list[Stage], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(DIAMOND, stages)


def test_a_circle_of_stages_is_named() -> None:
    links = (ProblemLink("a", "b", 1.0), ProblemLink("b", "a", 1.0))
    problem = Problem("throughput", MACHINES, links, pieces("p", "q", "r"), (Edge("p", "q", 1.0), Edge("q", "r", 1.0)))
    with pytest.raises(PlanError, match=r"in a circle: (a → b → a|b → a → b)"):
        evaluate(problem, [stage("a", "p", "r"), stage("b", "q")])
