"""Draw the trace of a run, as text or as a picture: which machine received, computed and sent which micro-batch when.

Time runs from left to right. A span begins with the number of its micro-batch:

               ms  0.00      0.10
    machine-a  in  0<<1<<2<<
               run    0####1####2####
               out          0>1>   2>

A machine has three lanes because receiving, computing and sending overlap.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement

from rich.text import Text

from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, TraceEvent
from rpc_runtime.program.routes import CLIENT
from tvm_split.observing.trace import Trace
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
NOT_IN_XML = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
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


SHOWN_MICRO_BATCHES = 24
"""Micro-batches in the picture of a trace: its latest ones."""
WIDTH, MARGIN, LANE_HEIGHT, MACHINE_GAP = 1100, 12, 24, 10
"""Pixels."""
CHARACTER_WIDTH = 7.6
FONT_SIZE = 12


def write(trace: Trace, path: Path) -> None:
    """Write a picture of the latest micro-batches of a trace."""
    machines = [machine for machine in trace.machines if machine != CLIENT]
    events = [event for event in trace if event.machine != CLIENT]
    last = max((event.sequence for event in events), default=0)
    latest = [event for event in events if event.sequence > last - SHOWN_MICRO_BATCHES]
    _write(latest, machines, f"{trace.model}: micro-batches up to {last}", path)


def draw_picture(events: Sequence[TraceEvent], machines: Sequence[str], title: str, path: Path) -> None:
    """Write a timeline as SVG, with selectable text; each micro-batch has one colour.

    ``machines`` are the rows from top to bottom. The times of ``events`` are in nanoseconds of one clock, those of the
    picture in milliseconds. Raises `OutputError` if it cannot be written.
    """
    with written(path) as beside:
        _write(events, machines, title, beside)


def _write(events: Sequence[TraceEvent], machines: Sequence[str], title: str, path: Path) -> None:
    shown = [event for event in events if event.kind in LANES and event.machine in machines]
    origin = min((event.start_nanoseconds for event in shown), default=0)
    span = max(max((event.end_nanoseconds for event in shown), default=0) - origin, 1)
    lanes = list(itertools.product(machines, LANES))
    names = {lane: f"{lane[0] if lane[1] == RECEIVE else ''}  {LANES[lane[1]][0]}" for lane in lanes}
    left = MARGIN + CHARACTER_WIDTH * max(map(len, names.values()), default=0)
    scale = (WIDTH - left - MARGIN) / span
    top = 2 * MARGIN + 2 * FONT_SIZE
    tops = {lane: top + row * LANE_HEIGHT + row // len(LANES) * MACHINE_GAP for row, lane in enumerate(lanes)}
    bottom = max(tops.values(), default=top) + LANE_HEIGHT
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", width=f"{WIDTH}", height=f"{bottom + 3 * MARGIN:.0f}")
    root.set("style", f"font: {FONT_SIZE}px sans-serif; background: white")
    _text(root, title, MARGIN, MARGIN + FONT_SIZE, {"font-weight": "bold"})
    for lane, name in names.items():
        _text(root, name, left - 6, tops[lane] + LANE_HEIGHT * 0.7, {"text-anchor": "end"})
    step = _round_step(span / 8)
    for tick in range(int(span / step) + 1):
        across = left + tick * step * scale
        x = {"x1": f"{across:.1f}", "x2": f"{across:.1f}"}
        SubElement(root, "line", {**x, "y1": f"{top}", "y2": f"{bottom}", "stroke": "#dddddd"})
        _text(root, f"{tick * step / 1e6:g} ms", across, bottom + 1.5 * FONT_SIZE, {"text-anchor": "middle"})
    for event in shown:
        _bar(root, event, left + (event.start_nanoseconds - origin) * scale, tops[event.machine, event.kind], scale)
    ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _bar(root: Element, event: TraceEvent, left: float, top: float, scale: float) -> None:
    width = max((event.end_nanoseconds - event.start_nanoseconds) * scale, 0.5)
    colour, computes = event.sequence % len(COLOURS), event.kind == COMPUTE
    size = {"width": f"{width:.2f}", "height": f"{LANE_HEIGHT - 4}"}
    bar = SubElement(root, "rect", {"x": f"{left:.2f}", "y": f"{top + 2:.1f}", **size})
    bar.set("fill", COLOURS[colour])
    bar.set("opacity", "1" if computes else "0.55")
    SubElement(bar, "title").text = f"{event.kind} {event.stage} {event.sequence}"
    number = str(event.sequence)
    if computes and width > CHARACTER_WIDTH * len(number):
        middle = {"text-anchor": "middle", "fill": TEXT_COLOURS[colour]}
        _text(root, number, left + width / 2, top + LANE_HEIGHT * 0.7, middle)


def _text(parent: Element, text: str, x: float, y: float, attributes: Mapping[str, str]) -> None:
    SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **attributes}).text = NOT_IN_XML.sub("?", text)
