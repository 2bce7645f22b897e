"""When parts compute, on timetables that are drawn by hand, and on random ones within what must hold of any."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.program.program import CLIENT
from tests.helpers.planner.parts import part
from tvm_split.errors import PlanError
from tvm_split.planner.parts import Delivery, PlanParts
from tvm_split.planner.problem import ProblemLink
from tvm_split.planner.timetable import timetable

A, B = "a", "b"


def links(bytes_per_second: float = 100.0, latency_seconds: float = 0.5) -> dict[tuple[str, str], ProblemLink]:
    ends = [(one, other) for one in (A, B, "c", CLIENT) for other in (A, B, "c", CLIENT) if one != other]
    return {pair: ProblemLink(*pair, bytes_per_second, latency_seconds) for pair in ends}


def test_halos_cross_at_the_same_time() -> None:
    """conv1 on both machines, an edge each way, conv2 on both; b's half of the result joins a's on a.

    second       0    1    2    3    4    5    6    7
    a            in···conv1────halo·conv2─────····join▸client
    b            in···conv1──────halo·conv2───half
    """
    plan = PlanParts(
        (part("a0", A, 2.0), part("b0", B, 3.0), part("a1", A, 2.0), part("b1", B, 1.0), part("join", A, 0.25)),
        (
            Delivery("x", CLIENT, ("a0",), 50.0),
            Delivery("x", CLIENT, ("b0",), 50.0),
            Delivery("a_edge", "a0", ("b1",), 10.0),
            Delivery("b_edge", "b0", ("a1",), 10.0),
            Delivery("a_own", "a0", ("a1",), 100.0),
            Delivery("b_own", "b0", ("b1",), 100.0),
            Delivery("a_half", "a1", ("join",), 100.0),
            Delivery("b_half", "b1", ("join",), 100.0),
            Delivery("y", "join", (), 50.0),
        ),
    )
    found = timetable(plan, links())
    # 0.5 + 0.5 for the input; b is done with conv1 after 4, its edge arrives 0.6 later, what stays there at once.
    assert found.starts == pytest.approx({"a0": 1.0, "b0": 1.0, "b1": 4.0, "a1": 4.6, "join": 6.6})
    assert found.latency_seconds == pytest.approx(6.6 + 0.25 + 1.0)


def test_a_machine_does_one_thing_at_a_time_and_the_last_in_order_first() -> None:
    plan = PlanParts(
        (part("first", A, 1.0), part("left", A, 2.0), part("right", A, 3.0)),
        (Delivery("l", "first", ("left",), 0.0), Delivery("r", "first", ("right",), 0.0)),
    )
    found = timetable(plan, {})
    assert found.starts == {"first": 0.0, "right": 1.0, "left": 4.0}
    assert found.latency_seconds == 6.0


def test_tensors_of_one_link_follow_each_other_and_their_latencies_overlap() -> None:
    plan = PlanParts(
        (part("first", A, 1.0), part("both", B, 1.0), part("one", B, 1.0)),
        (Delivery("s", "first", ("both", "one"), 100.0), Delivery("t", "first", ("both",), 100.0)),
    )
    found = timetable(plan, links())
    assert found.starts == pytest.approx({"first": 0.0, "one": 2.5, "both": 3.5})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no link from a to b, .* 7 bytes"):
        timetable(PlanParts((part("p", A, 1.0), part("q", B, 1.0)), (Delivery("t", "p", ("q",), 7.0),)), {})
    circle = (Delivery("t", "p", ("q",), 1.0), Delivery("u", "q", ("p",), 1.0))
    with pytest.raises(PlanError, match="p waits for itself"):
        timetable(PlanParts((part("p", A, 1.0), part("q", A, 1.0)), circle), {})


def random_plan(seed: int) -> tuple[PlanParts, dict[tuple[str, str], ProblemLink]]:
    generator = random.Random(seed)
    names = [f"p{number}" for number in range(generator.randint(1, 9))]
    parts = tuple(part(name, generator.choice((A, B, "c")), generator.choice((0.0, 1.0, 2.5))) for name in names)
    deliveries = [Delivery("x", CLIENT, (names[0],), generator.uniform(0, 100))]
    for number, name in enumerate(names[:-1]):
        for other in generator.sample(names[number + 1 :], generator.randint(0, len(names) - number - 1)):
            deliveries.append(Delivery(f"{name}_{other}", name, (other,), generator.choice((0.0, 30.0, 200.0))))
    deliveries.append(Delivery("y", names[-1], (), 10.0))
    return PlanParts(parts, tuple(deliveries)), links(100.0, generator.choice((0.0, 0.5)))


@given(st.integers(0, 10**6))
def test_never_below_a_path_or_a_machine_and_never_above_all_in_turn(seed: int) -> None:
    plan, ways = random_plan(seed)
    found = timetable(plan, ways).latency_seconds
    machine = {each.name: each.machine for each in plan.parts} | {CLIENT: CLIENT}

    def wire(each: Delivery) -> float:
        ends = machine[each.source], machine[each.takers[0]] if each.takers else CLIENT
        return 0.0 if ends[0] == ends[1] else ways[ends].latency_seconds + each.bytes / ways[ends].bytes_per_second

    done: dict[str, float] = {CLIENT: 0.0}
    for each in plan.parts:
        arrivals = [done[d.source] + wire(d) for d in plan.deliveries if each.name in d.takers]
        done[each.name] = max(arrivals, default=0.0) + each.together_seconds
    longest = max([*done.values(), *(done[d.source] + wire(d) for d in plan.deliveries if not d.takers)])
    busiest = max(math.fsum(p.together_seconds for p in plan.parts if p.machine == m) for m in (A, B, "c"))
    in_turn = math.fsum(each.together_seconds for each in plan.parts) + math.fsum(map(wire, plan.deliveries))
    assert max(longest, busiest) <= found * (1 + 1e-9) + 1e-12
    assert found <= in_turn * (1 + 1e-9) + 1e-12
