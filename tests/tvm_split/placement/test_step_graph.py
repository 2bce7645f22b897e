"""Timetables drawn by hand, and bounds that hold for random ones."""

import math

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.program.routes import CLIENT
from tests.helpers.placement.profiles import A, B, C
from tests.helpers.placement.steps import random_graph, step
from tvm_split.placement.evaluate import flow_of
from tvm_split.placement.problem import Problem, ProblemLink, ProblemMachine
from tvm_split.placement.step_graph import StepGraph, Transfer


def links(bytes_per_second: float = 100.0, latency_seconds: float = 0.5) -> dict[tuple[str, str], ProblemLink]:
    ends = [(source, end) for source in (A, B, C, CLIENT) for end in (A, B, C, CLIENT) if source != end]
    return {pair: ProblemLink(*pair, bytes_per_second, latency_seconds) for pair in ends}


def timetable(graph: StepGraph, links: dict[tuple[str, str], ProblemLink]) -> tuple[dict[str, float | None], float]:
    """The start of each step, and the latency."""
    machines = tuple(ProblemMachine(name) for name in (A, B, C))
    result = flow_of(Problem("latency", machines, tuple(links.values()), (), ()), graph).timetable
    return {
        graph_step.name: start for graph_step, start in zip(graph.steps, result.starts, strict=True)
    }, result.latency_seconds


def test_halos_cross_at_the_same_time() -> None:
    """conv1 on both machines, a halo in each direction, conv2 on both; a concatenates the halves of the result.

    second       0    1    2    3    4    5    6    7
    a            in···conv1────halo·conv2─────····join▸client
    b            in···conv1──────halo·conv2───half
    """
    plan = StepGraph(
        (step("a0", A, 2.0), step("b0", B, 3.0), step("a1", A, 2.0), step("b1", B, 1.0), step("join", A, 0.25)),
        (
            Transfer("x", CLIENT, ("a0",), 50.0),
            Transfer("x", CLIENT, ("b0",), 50.0),
            Transfer("a_edge", "a0", ("b1",), 10.0),
            Transfer("b_edge", "b0", ("a1",), 10.0),
            Transfer("a_own", "a0", ("a1",), 100.0),
            Transfer("b_own", "b0", ("b1",), 100.0),
            Transfer("a_half", "a1", ("join",), 100.0),
            Transfer("b_half", "b1", ("join",), 100.0),
            Transfer("y", "join", (), 50.0),
        ),
    )
    starts, latency = timetable(plan, links())
    # 0.5 + 0.5 for the input; b is done with conv1 after 4, its halo arrives 0.6 later; local data needs no transfer.
    assert starts == pytest.approx({"a0": 1.0, "b0": 1.0, "b1": 4.0, "a1": 4.6, "join": 6.6})
    assert latency == pytest.approx(6.6 + 0.25 + 1.0)


def test_a_machine_does_one_thing_at_a_time_and_the_last_in_order_first() -> None:
    plan = StepGraph(
        (step("first", A, 1.0), step("left", A, 2.0), step("right", A, 3.0)),
        (Transfer("l", "first", ("left",), 0.0), Transfer("r", "first", ("right",), 0.0)),
    )
    starts, latency = timetable(plan, {})
    assert starts == {"first": 0.0, "right": 1.0, "left": 4.0}
    assert latency == 6.0


def test_tensors_of_one_link_follow_each_other_and_their_latencies_overlap() -> None:
    plan = StepGraph(
        (step("first", A, 1.0), step("both", B, 1.0), step("one", B, 1.0)),
        (Transfer("s", "first", ("both", "one"), 100.0), Transfer("t", "first", ("both",), 100.0)),
    )
    starts, _ = timetable(plan, links())
    assert starts == pytest.approx({"first": 0.0, "one": 2.5, "both": 3.5})


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5]))
def test_never_below_a_path_or_a_machine_and_never_above_all_in_turn(seed: int, latency_seconds: float) -> None:
    plan, ways = random_graph(seed), links(100.0, latency_seconds)
    _, latency = timetable(plan, ways)
    machine = {plan_step.name: plan_step.machines[0] for plan_step in plan.steps} | {CLIENT: CLIENT}

    def wire(transfer: Transfer) -> float:
        ends = machine[transfer.source], machine[transfer.targets[0]] if transfer.targets else CLIENT
        return 0.0 if ends[0] == ends[1] else ways[ends].latency_seconds + transfer.bytes / ways[ends].bytes_per_second

    done: dict[str, float] = {CLIENT: 0.0}
    for plan_step in plan.steps:
        arrivals = [done[d.source] + wire(d) for d in plan.transfers if plan_step.name in d.targets]
        done[plan_step.name] = max(arrivals, default=0.0) + plan_step.contended_seconds[0]
    longest = max([*done.values(), *(done[d.source] + wire(d) for d in plan.transfers if not d.targets)])
    busiest = max(math.fsum(p.contended_seconds[0] for p in plan.steps if p.machines == (m,)) for m in (A, B, C))
    in_turn = math.fsum(plan_step.contended_seconds[0] for plan_step in plan.steps) + math.fsum(
        map(wire, plan.transfers)
    )
    assert max(longest, busiest) <= latency * (1 + 1e-9) + 1e-12
    assert latency <= in_turn * (1 + 1e-9) + 1e-12
