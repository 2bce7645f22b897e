"""Evaluations of small plans, computed by hand, and violations of demands."""

import dataclasses

import pytest

from tests.helpers.placement.profiles import A, B, C, chain_problem, chain_profile
from tests.helpers.placement.steps import evaluate_stages, step
from tvm_split.errors import PlanError
from tvm_split.placement.evaluate import evaluate, keeps_demands, memory_shortage, violations
from tvm_split.placement.problem import Edge, Piece, Problem, ProblemLink, ProblemMachine, Stage
from tvm_split.placement.step_graph import StepGraph, Transfer

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
    evaluation = evaluate_stages(DIAMOND, [stage("a", "p"), stage("b", "q"), stage("c", "r")])
    # a: receives 1000 at 1000/s, sends 100 at 100/s and 100 at 200/s; c: receives 100 at 200/s and 50 at 50/s.
    loads = {load.machine: load for load in evaluation.loads}
    assert (loads["a"].compute_seconds, loads["a"].receive_seconds, loads["a"].send_seconds) == (1.0, 1.0, 1.5)
    assert (loads["b"].compute_seconds, loads["b"].receive_seconds, loads["b"].send_seconds) == (3.0, 1.0, 1.0)
    assert (loads["c"].compute_seconds, loads["c"].receive_seconds, loads["c"].send_seconds) == (3.0, 1.5, 2.0)
    assert loads["a"].memory_bytes == 10.0 + 0.0 + 2 * (1000.0 + 200.0)
    assert loads["c"].memory_bytes == 10.0 + 2.0 + 2 * (150.0 + 20.0)
    assert evaluation.period_seconds == 3.0
    assert evaluation.limiting == "compute of b"
    # 1.125 to arrive, 1 on a, 1.5 to b, 2 on b without contention, 2 to c, 3 on c, 4 to the client.
    assert evaluation.latency_seconds == 1.125 + 1.0 + 1.5 + 2.0 + 2.0 + 3.0 + 4.0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage("a", "p"), stage("b", "q")], "places no piece 'r'"),
        ([stage("a", "p", "q", "r", "r")], "'r' is placed twice"),
        ([stage("a", "p"), stage("a", "q", "r")], "'a' has two stages"),
        ([stage("d", "p", "q", "r")], "'d'; there are a, b, c"),
        ([stage("a", "p", "q", "r", "s")], "'s', which the problem does not have"),
        ([stage("b", "p"), stage("a", "q", "r")], "no link from the client to b"),
        ([stage("a", "p", "q", "r"), stage("b")], "no stage"),
    ],
)
def test_what_is_no_plan(stages: list[Stage], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate_stages(DIAMOND, stages)


def test_a_circle_of_stages_is_named() -> None:
    links = (ProblemLink("a", "b", 1.0), ProblemLink("b", "a", 1.0))
    problem = Problem("throughput", MACHINES, links, pieces("p", "q", "r"), (Edge("p", "q", 1.0), Edge("q", "r", 1.0)))
    with pytest.raises(PlanError, match=r"in a cycle: (a → b → a|b → a → b)"):
        evaluate_stages(problem, [stage("a", "p", "r"), stage("b", "q")])


ENDS = [(source, end) for source in ("a", "b", "client") for end in ("a", "b", "client") if source != end]
TWO = Problem(
    "latency",
    (ProblemMachine("a", 1000.0, contention=2.0, transfer_seconds=0.5), ProblemMachine("b", 50.0)),
    tuple(ProblemLink(*ends, 100.0, 1.0) for ends in ENDS),
    (),
    (),
    buffers=3,
)
SHARDS = StepGraph(
    (
        step("a0", "a", 2.0, 3.0, weight_bytes=5.0, activation_bytes=7.0),
        step("b0", "b", 1.0, 1.5, weight_bytes=5.0, activation_bytes=9.0),
        step("a1", "a", 0.5, weight_bytes=4.0, activation_bytes=8.0),
    ),
    (
        Transfer("x", "client", ("a0",), 100.0),
        Transfer("x", "client", ("b0",), 100.0),
        Transfer("half", "b0", ("a1",), 10.0),
        Transfer("own", "a0", ("a1",), 10.0),
        Transfer("y", "a1", (), 20.0),
    ),
)


def test_a_stage_that_two_machines_compute_together() -> None:
    evaluation = evaluate(TWO, SHARDS)
    # The latency under contention: 2 for the input, 3 on a; b's half arrives earlier.
    assert evaluation.latency_seconds == pytest.approx(2.0 + 3.0 + 0.5 + 1.2)
    first, second = evaluation.loads
    # In a stream: twice 2.5, and three tensors to serialise.
    assert first.compute_seconds == pytest.approx(2.5 * 2.0 + 3 * 0.5)
    assert (first.receive_seconds, first.send_seconds) == (pytest.approx(1.1), pytest.approx(0.2))
    assert (first.weight_bytes, first.activation_bytes, first.buffer_bytes) == (9.0, 8.0, 3 * 130.0)
    assert (second.bytes_received, second.bytes_sent) == (100.0, 10.0)
    assert evaluation.period_seconds == first.compute_seconds
    assert evaluation.limiting == "compute of a"
    assert memory_shortage(TWO, evaluation) == pytest.approx(5 + 9 + 3 * 110 - 50)


def test_a_link_that_limits_is_named() -> None:
    slow = dataclasses.replace(TWO, links=tuple(dataclasses.replace(link, bytes_per_second=1.0) for link in TWO.links))
    assert evaluate(slow, SHARDS).limiting == "receiving on a over the links from the client and b"


def test_steps_that_wait_for_each_other() -> None:
    circle = (Transfer("t", "p", ("q",), 1.0), Transfer("u", "q", ("p",), 1.0))
    with pytest.raises(PlanError, match="a waits for itself"):
        evaluate(TWO, StepGraph((step("p", "a", 1.0), step("q", "a", 1.0)), circle))


PROFILE = chain_profile({A: [0.01, 0.02], B: [0.01, 0.02], C: [0.01, 0.02]})
STAGES = (Stage((A,), ("layer_0",)), Stage((B, C), ("layer_1",), (0.5, 0.5)))


@pytest.mark.parametrize(
    ("demands", "satisfied"),
    [
        ({}, True),
        ({"stages": 2, "maximum_machines": 3}, True),
        ({"stages": 1}, False),
        ({"pin": {"layer_0": A}}, True),
        ({"pin": {"layer_1": B}}, False),  # one replica is not on it
        ({"keep_off": {"layer_1": C}}, False),
        ({"minimum_throughput": 1 / 0.009}, False),
        ({"maximum_latency_seconds": 0.031}, True),
        ({"maximum_latency_seconds": 0.029}, False),
    ],
)
def test_demands(demands: dict[str, object], satisfied: bool) -> None:
    problem = chain_problem(PROFILE, replicas=True, **demands)
    evaluation = evaluate_stages(problem, STAGES)
    assert keeps_demands(problem, STAGES, evaluation) == satisfied
    assert bool(violations(problem, STAGES, evaluation)) != satisfied


def test_memory_is_a_violation_and_no_demand() -> None:
    problem = chain_problem(PROFILE, memory={B: 10})
    evaluation = evaluate_stages(problem, STAGES)
    assert keeps_demands(problem, STAGES, evaluation)
    (text,) = violations(problem, STAGES, evaluation)
    assert text.startswith(f"{B} needs ")
