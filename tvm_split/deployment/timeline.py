"""Draw the trace of a run as a timeline: which machine received, computed and sent which micro-batch when.

Pure functions: from trace events to lanes of spans, and from these to text. Time runs from left to right. A span begins
with the number of its micro-batch:

               ms  0.00      0.10
    machine-a  in  0<<1<<2<<
               run    0####1####2####
               out          0>1>   2>

A machine has three lanes because receiving, computing and sending overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rpc_runtime.program.measurements import COMPUTE, RECEIVE, SEND, TraceEvent

LEAST_COLUMNS, MOST_COLUMNS = 40, 150
LANE_NAMES = {RECEIVE: "receive", COMPUTE: "compute", SEND: "send"}
"""The kinds of events that have a lane, in the order of a micro-batch. Waiting is shown as an empty space."""
FILL = {RECEIVE: "◂", COMPUTE: "█", SEND: "▸"}
EMPTY = {RECEIVE: " ", COMPUTE: "·", SEND: " "}
"""The character of an idle column; a dot is the bubble of the pipeline, where a machine could have computed."""
TICK_COLUMNS = 14
"""Least number of columns between two numbers of the axis."""


@dataclass(frozen=True)
class Span:
    """Columns ``start`` to ``end`` (exclusive) of a lane, for the micro-batch ``sequence``."""

    start: int
    end: int
    sequence: int


@dataclass(frozen=True)
class Lane:
    """The spans of one kind of event (receive, compute or send) on one machine, in the order of time."""

    machine: str
    kind: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """Lanes over ``columns`` columns of ``nanoseconds_per_column`` each."""

    lanes: tuple[Lane, ...]
    columns: int
    nanoseconds_per_column: float


@dataclass(frozen=True)
class Cell:
    """Neighbouring columns of a lane that look the same; ``sequence`` is None where the lane is idle."""

    text: str
    sequence: int | None


def first_micro_batches(events: Iterable[TraceEvent], first: int, count: int) -> tuple[TraceEvent, ...]:
    """The events of ``count`` micro-batches from number ``first`` on, renumbered from 0."""
    return tuple(
        replace(event, sequence=event.sequence - first) for event in events if first <= event.sequence < first + count
    )


def columns_in(width: int, machines: Sequence[str]) -> int:
    """The number of columns of the lanes next to their headings, on a page of ``width`` characters."""
    headings = len(max(machines, key=len)) + len("  receive ")
    return min(max(width - headings - 1, LEAST_COLUMNS), MOST_COLUMNS)


def timeline(events: Sequence[TraceEvent], machines: Sequence[str], columns: int = 96) -> Timeline:
    """Arrange events in columns, from the first event's start to the last event's end.

    A span is at least one column wide. If rounding puts two spans of a lane on the same column, the later one is shown.
    """
    shown = [event for event in events if event.kind in LANE_NAMES]
    if not shown:
        return Timeline((), columns, 1.0)
    origin = min(event.start_nanoseconds for event in shown)
    length = max(event.end_nanoseconds for event in shown) - origin
    scale = max(length, 1) / columns
    spans: dict[tuple[str, str], list[Span]] = {(machine, kind): [] for machine in machines for kind in LANE_NAMES}
    for event in sorted(shown, key=lambda event: (event.start_nanoseconds, event.sequence)):
        if (event.machine, event.kind) in spans:
            spans[event.machine, event.kind].append(_span(event, origin, scale, columns))
    lanes = [Lane(machine, kind, tuple(lane_spans)) for (machine, kind), lane_spans in spans.items()]
    return Timeline(tuple(lanes), columns, scale)


def cells(lane: Lane, columns: int) -> Iterator[Cell]:
    """The lane from left to right as texts, ``columns`` characters in all."""
    owners: list[Span | None] = [None] * columns
    for span in lane.spans:
        owners[span.start : span.end] = [span] * (span.end - span.start)
    for owner, same in itertools.groupby(owners):
        length = len(list(same))
        if owner is None:
            yield Cell(EMPTY[lane.kind] * length, None)
        else:
            # A number that does not fit is shown by its last digits, which differ between neighbours.
            yield Cell(str(owner.sequence)[-length:].ljust(length, FILL[lane.kind]), owner.sequence)


def axis(drawn: Timeline) -> str:
    """The axis line, with ticks at round times in milliseconds."""
    step = round_step(TICK_COLUMNS * drawn.nanoseconds_per_column)
    digits = max(0, 6 - int(math.log10(step)))
    line, tick = "", 0
    while (column := int(tick * step / drawn.nanoseconds_per_column)) < drawn.columns:
        line = line.ljust(column) + f"╷{tick * step / 1e6:.{digits}f}"
        tick += 1
    return line


def round_step(least_nanoseconds: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, … nanoseconds that is not less than ``least_nanoseconds``."""
    power = 10.0 ** math.floor(math.log10(max(least_nanoseconds, 1.0)))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least_nanoseconds), 10 * power)


def headings(lanes: Sequence[Lane]) -> list[str]:
    """The heading of each lane, all of the same width: its name, and before a machine's first lane also the machine."""
    width = max((len(lane.machine) for lane in lanes), default=0)
    kinds = max(len(name) for name in LANE_NAMES.values())
    first_kind = next(iter(LANE_NAMES))
    return [
        f"{lane.machine if lane.kind == first_kind else '':<{width}}  {LANE_NAMES[lane.kind]:<{kinds}} "
        for lane in lanes
    ]


def draw(drawn: Timeline) -> str:
    """The timeline as plain text, an axis and one line per lane, without trailing spaces."""
    if not drawn.lanes:
        return "nothing was recorded"
    names = headings(drawn.lanes)
    lines = ["ms".rjust(len(names[0]) - 1) + " " + axis(drawn)]
    for name, lane in zip(names, drawn.lanes, strict=True):
        lines.append(name + "".join(cell.text for cell in cells(lane, drawn.columns)))
    return "\n".join(line.rstrip() for line in lines)


def machines_at_once(events: Iterable[TraceEvent], kinds: Collection[str]) -> dict[int, float]:
    """By number of machines, the share of the time in which exactly that many do one of ``kinds`` at once."""
    changes = []
    for event in events:
        if event.kind in kinds and event.end_nanoseconds > event.start_nanoseconds:
            changes += [(event.start_nanoseconds, event.machine, 1), (event.end_nanoseconds, event.machine, -1)]
    changes.sort(key=lambda change: (change[0], change[2]))
    busy: dict[str, int] = {}
    lasted: dict[int, int] = {}
    for (moment, machine, change), following in itertools.pairwise(changes):
        busy[machine] = busy.get(machine, 0) + change
        working = sum(count > 0 for count in busy.values())
        lasted[working] = lasted.get(working, 0) + following[0] - moment
    whole = sum(lasted.values())
    return {working: time / whole for working, time in sorted(lasted.items()) if time} if whole else {}


def _span(event: TraceEvent, origin: int, scale: float, columns: int) -> Span:
    start = min(int((event.start_nanoseconds - origin) / scale), columns - 1)
    end = min(max(int((event.end_nanoseconds - origin) / scale), start + 1), columns)
    return Span(start, end, event.sequence)
