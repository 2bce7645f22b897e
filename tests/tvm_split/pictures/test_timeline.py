from pathlib import Path
from xml.etree import ElementTree

import pytest

from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, WAIT, TraceEvent
from tvm_split.pictures.timeline import draw_picture, drawn_timeline, machines_computing

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
    assert drawn_timeline(two_machines, MACHINES, columns=30).plain == DRAWING


DRAWING = """\
        ms ╷0.00               ╷0.02
a  receive 0◂        1◂
   compute ··0█████····1█████············
   send            0▸        1▸
b  receive           0◂        1◂
   compute ············0█████····1█████··
   send                      0▸        1▸"""


@pytest.mark.parametrize(
    ("times", "computing"),
    [
        ([(0, 0, 100), (1, 100, 100)], "0████████1"),
        ([(8, 0, 10), (12, 10, 20), (13, 20, 60), (14, 80, 100)], "8213██··14"),
        ([(0, 0, 50), (0, 50, 100)], "0████0████"),  # two stages of a machine
    ],
)
def test_spans_are_a_column_wide_at_least_and_numbers_are_shortened(times, computing):
    events = [event("a", sequence, COMPUTE, start, end) for sequence, start, end in times]
    _, _, line, _ = drawn_timeline(events, ("a",), columns=10).plain.splitlines()
    assert line.split() == ["compute", computing]


def test_nothing_recorded():
    assert drawn_timeline([event("a", 0, WAIT, 0, 5)], MACHINES).plain == "nothing was recorded"


def test_machines_computing(two_machines):
    computing = machines_computing(two_machines)
    # From 2 to 28 microseconds: a alone, none, both, none, b alone.
    assert computing == {0: pytest.approx(8 / 26), 1: pytest.approx(12 / 26), 2: pytest.approx(6 / 26)}
    assert machines_computing([]) == {}


@pytest.mark.parametrize("machines", [2, 400])
def test_the_picture_has_a_row_for_each_machine_and_a_bar_for_each_event(tmp_path: Path, machines: int) -> None:
    names = [f"machine-{number}" for number in range(machines)]
    events = [
        TraceEvent(name, "stage", 0, kind, number * 10**6, (number + 1) * 10**6, 0)
        for number, name in enumerate(names)
        for kind in (COMPUTE, SEND)
    ]
    draw_picture(events, names, "many <&> \x00", tmp_path / "work.svg")
    root = ElementTree.parse(tmp_path / "work.svg").getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] == "many <&> ?"
    assert [text for text in texts if "receive" in text] == [f"{name}  receive" for name in names]
    bars = [element for element in root.iter() if element.tag.endswith("rect")]
    assert len(bars) == len(events)
    height, width = float(root.get("height")), float(root.get("width"))
    assert all(0 <= float(bar.get("x")) <= width - float(bar.get("width")) for bar in bars)
    assert all(0 <= float(bar.get("y")) <= height - float(bar.get("height")) for bar in bars)
