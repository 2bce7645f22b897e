import math

import pytest

from rpc_runtime.program.measurements import COMPUTE, RECEIVE, SEND, WAIT, TraceEvent
from tvm_split.deployment.timeline import (
    LANE_NAMES,
    Cell,
    Lane,
    Span,
    cells,
    draw,
    first_micro_batches,
    machines_at_once,
    timeline,
)

MACHINES = ("a", "b")


def event(machine: str, sequence: int, kind: str, start: int, end: int) -> TraceEvent:
    return TraceEvent(machine, f"stage on {machine}", sequence, kind, start, end)


@pytest.fixture
def two_machines() -> list[TraceEvent]:
    """Two micro-batches on two machines; while b computes 0, a computes 1."""
    events = []
    for sequence in range(2):
        for place, machine in enumerate(MACHINES):
            start = 1_000_000 + (sequence + place) * 10_000
            events += [
                event(machine, sequence, RECEIVE, start, start + 2_000),
                event(machine, sequence, COMPUTE, start + 2_000, start + 8_000),
                event(machine, sequence, SEND, start + 8_000, start + 10_000),
            ]
    return events


def test_the_drawing(two_machines):
    assert draw(timeline(two_machines, MACHINES, columns=30)) == DRAWING


DRAWING = """\
        ms ╷0.00               ╷0.02
a  receive 0◂        1◂
   compute ··0█████····1█████············
   send            0▸        1▸
b  receive           0◂        1◂
   compute ············0█████····1█████··
   send                      0▸        1▸"""


def test_nothing_recorded():
    assert draw(timeline([event("a", 0, WAIT, 0, 5)], MACHINES)) == "nothing was recorded"


def test_instants_are_one_column_wide_and_inside():
    events = [event("a", 0, COMPUTE, 0, 100), event("a", 1, COMPUTE, 100, 100)]
    (lane,) = (lane for lane in timeline(events, ("a",), columns=10).lanes if lane.kind == COMPUTE)
    assert lane.spans == (Span(0, 10, 0), Span(9, 10, 1))


def test_cells_cover_the_lane_and_shorten_numbers():
    lane = Lane("a", COMPUTE, (Span(1, 2, 12), Span(2, 6, 13)))
    assert list(cells(lane, 8)) == [Cell("·", None), Cell("2", 12), Cell("13██", 13), Cell("··", None)]


def test_first_micro_batches_are_renumbered(two_machines):
    chosen = first_micro_batches(two_machines, 1, 5)
    assert {trace_event.sequence for trace_event in chosen} == {0}
    assert len(chosen) == 6


def test_machines_at_once(two_machines):
    computing = machines_at_once(two_machines, (COMPUTE,))
    # From 2 to 28 microseconds: a alone, none, both, none, b alone.
    assert computing == {0: pytest.approx(8 / 26), 1: pytest.approx(12 / 26), 2: pytest.approx(6 / 26)}
    assert math.isclose(sum(machines_at_once(two_machines, LANE_NAMES).values()), 1.0)
    assert machines_at_once([], (COMPUTE,)) == {}
