"""Draw the trace of a run, as text or as a picture: which machine received, computed and sent which micro-batch when.

Time runs from left to right. A span begins with the number of its micro-batch:

               ms  0.00      0.10
    machine-a  in  0<<1<<2<<
               run    0####1####2####
               out          0>1>   2>

A machine has three lanes because receiving, computing and sending overlap.
"""

import importlib.util
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, TraceEvent
from tvm_split.outputs import written

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""The palette of Okabe and Ito, which people with any kind of colour vision can tell apart."""
TEXT_COLOURS = ("#ffffff", *["#000000"] * 7)
"""What is easier to read on each of these colours, by the contrast of WCAG 2.1."""


LEAST_COLUMNS, MOST_COLUMNS = 40, 150
LANES = {RECEIVE: ("receive", "◂", " "), COMPUTE: ("compute", "█", "·"), SEND: ("send", "▸", " ")}
"""The kinds of events that have a lane, in the order of a micro-batch, with the name, the character of a span, and that
of an idle column: a dot is the bubble of the pipeline, where a machine could have computed."""
LONGEST = len(" receive ")
TICK_COLUMNS = 14
"""Least number of columns between two numbers of the axis."""
TERMINAL_COLOURS = ("bright_blue", "yellow", "green", "magenta", "cyan", "red", "bright_green", "bright_black")


def columns_in(width: int, machines: Sequence[str]) -> int:
    """Return the number of columns of the lanes next to their headings, on a page of ``width`` characters."""
    return min(max(width - len(max(machines, key=len)) - LONGEST - 2, LEAST_COLUMNS), MOST_COLUMNS)


def drawn_timeline(events: Iterable[TraceEvent], machines: Sequence[str], columns: int = 96) -> Text:
    """Return an axis and one line per lane, with a colour for each micro-batch.

    The columns reach from the first event's start to the last event's end. A span is at least one column wide. If
    rounding puts two spans of a lane on the same column, the later one is shown.
    """
    shown = [event for event in events if event.kind in LANES and event.machine in machines]
    shown.sort(key=lambda event: (event.start_nanoseconds, event.sequence))
    if not shown:
        return Text("nothing was recorded")
    origin = shown[0].start_nanoseconds
    scale = max(max(event.end_nanoseconds for event in shown) - origin, 1) / columns
    lanes: dict[tuple[str, str], list[TraceEvent | None]] = {
        (machine, kind): [None] * columns for machine in machines for kind in LANES
    }
    for event in shown:
        start = min(int((event.start_nanoseconds - origin) / scale), columns - 1)
        end = min(max(int((event.end_nanoseconds - origin) / scale), start + 1), columns)
        lanes[event.machine, event.kind][start:end] = [event] * (end - start)
    heading = len(max(machines, key=len))
    lines = [Text(f"{'ms':>{heading + LONGEST}} {_axis(scale, columns)}", "dim")]
    for (machine, kind), owners in lanes.items():
        name = machine if kind == RECEIVE else ""
        lines.append(_lane(f"{name:<{heading}}  {LANES[kind][0]:<{LONGEST - 2}} ", kind, owners))
    return Text("\n").join(lines)


def _lane(name: str, kind: str, owners: Sequence[TraceEvent | None]) -> Text:
    line = Text(name)
    for _, same in itertools.groupby(owners, key=id):
        event, *rest = same
        length = 1 + len(rest)
        if event is None:
            line.append(LANES[kind][2] * length, "dim")
        else:
            # A number that does not fit is shown by its last digits, which differ between neighbours.
            number = str(event.sequence)[-length:]
            line.append(number.ljust(length, LANES[kind][1]), TERMINAL_COLOURS[event.sequence % len(TERMINAL_COLOURS)])
    line.rstrip()
    return line


def _axis(scale: float, columns: int) -> str:
    """Return the axis line, with ticks at round times in milliseconds; ``scale`` is in nanoseconds per column."""
    step = _round_step(TICK_COLUMNS * scale)
    digits = max(0, 6 - int(math.log10(step)))
    line, tick = "", 0
    while (column := int(tick * step / scale)) < columns:
        line = line.ljust(column) + f"╷{tick * step / 1e6:.{digits}f}"
        tick += 1
    return line


def _round_step(least_nanoseconds: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50, … nanoseconds that is not less than ``least_nanoseconds``."""
    power = 10.0 ** math.floor(math.log10(max(least_nanoseconds, 1.0)))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least_nanoseconds), 10 * power)


def machines_computing(events: Iterable[TraceEvent]) -> dict[int, float]:
    """Return, by number of machines, the share of the time in which exactly that many compute at once."""
    changes = []
    for event in events:
        if event.kind == COMPUTE and event.end_nanoseconds > event.start_nanoseconds:
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


LANE_HEIGHT = 0.8
INCHES_PER_LANE = 0.32
TALLEST_INCHES = 48.0

SUFFIXES = (".png", ".svg", ".pdf")


def require_matplotlib() -> None:
    """Raise a `TvmSplitError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise TvmSplitError("drawing a picture needs matplotlib: pip install 'tvm-split[demo]'")


def draw_picture(events: Sequence[TraceEvent], machines: Sequence[str], title: str, paths: Sequence[Path]) -> None:
    """Write a timeline to every path, in the format of its suffix, which is one of `SUFFIXES`.

    A micro-batch has one colour. ``machines`` are the rows from top to bottom. The times of ``events`` are in
    nanoseconds of one clock, those of the picture in milliseconds.

    Raises:
        TvmSplitError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shown = [event for event in events if event.kind in LANES]
    origin = min((event.start_nanoseconds for event in shown), default=0)
    rows = [(machine, kind) for machine in machines for kind in LANES]
    place = {row: number for number, row in enumerate(rows)}
    height = min(INCHES_PER_LANE * len(rows), TALLEST_INCHES)
    figure = Figure(figsize=(11, 1.2 + height), layout="constrained")
    axes = figure.add_subplot()
    lanes: dict[tuple[str, str], list[TraceEvent]] = {}
    for event in shown:
        lanes.setdefault((event.machine, event.kind), []).append(event)
    for lane, lane_events in lanes.items():
        row, computes = place[lane], lane[1] == COMPUTE
        bars = [
            ((event.start_nanoseconds - origin) / 1e6, (event.end_nanoseconds - event.start_nanoseconds) / 1e6)
            for event in lane_events
        ]
        axes.broken_barh(
            bars,
            (row - LANE_HEIGHT / 2, LANE_HEIGHT),
            facecolors=[COLOURS[event.sequence % len(COLOURS)] for event in lane_events],
            edgecolor="white",
            linewidth=0.5,
            alpha=1.0 if computes else 0.55,
        )
        for (start, length), event in zip(bars, lane_events, strict=True) if computes else ():
            axes.text(start + length / 2, row, str(event.sequence), ha="center", va="center", fontsize=7, clip_on=True)
    for row in range(len(LANES), len(rows), len(LANES)):
        axes.axhline(row - 0.5, color="black", linewidth=0.6)
    labels = [f"{machine}  {LANES[kind][0]}" if kind == RECEIVE else LANES[kind][0] for machine, kind in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("milliseconds; a number is a micro-batch, and so is a colour")
    axes.set_title(title)
    for path in paths:
        with written(path) as beside:
            figure.savefig(beside, dpi=150)
