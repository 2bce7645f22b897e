"""Draw the timeline as a picture file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.measurements import COMPUTE, RECEIVE, TraceEvent
from tvm_split.outputs import written
from tvm_split.pictures.colours import COLOURS
from tvm_split.pictures.timeline_text import LANES

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
