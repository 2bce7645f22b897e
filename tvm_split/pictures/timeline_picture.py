"""The timeline as a picture, for papers and for people who were not at the terminal."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tvm_split.deployment.timeline import LANE_NAMES
from tvm_split.pictures.colours import COLOURS
from tvm_split.rpc_runtime.errors import TvmSplitError
from tvm_split.rpc_runtime.program.measurements import TraceEvent

LANE_HEIGHT = 0.8
INCHES_PER_LANE = 0.32


SUFFIXES = (".png", ".svg", ".pdf")


def require_matplotlib() -> None:
    """Raises a `TvmSplitError` if it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise TvmSplitError("drawing a picture needs matplotlib: pip install 'tvm-split[demo]'")


def draw_picture(events: Sequence[TraceEvent], machines: Sequence[str], title: str, paths: Sequence[Path]) -> None:
    """Write the timeline to every path; the suffix, one of `SUFFIXES`, says in which format.

    Raises:
        TvmSplitError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shown = [event for event in events if event.kind in LANE_NAMES]
    origin = min((event.start_nanoseconds for event in shown), default=0)
    rows = [(machine, kind) for machine in machines for kind in LANE_NAMES]
    figure = Figure(figsize=(11, 1.2 + INCHES_PER_LANE * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for event in shown:
        row = rows.index((event.machine, event.kind))
        start = (event.start_nanoseconds - origin) / 1e6
        length = (event.end_nanoseconds - event.start_nanoseconds) / 1e6
        colour = COLOURS[event.sequence % len(COLOURS)]
        computes = LANE_NAMES[event.kind] == "compute"
        axes.broken_barh(
            [(start, length)],
            (row - LANE_HEIGHT / 2, LANE_HEIGHT),
            facecolors=colour,
            edgecolor="white",
            linewidth=0.5,
            alpha=1.0 if computes else 0.55,
        )
        if computes:
            axes.text(start + length / 2, row, str(event.sequence), ha="center", va="center", fontsize=7, clip_on=True)
    for row in range(len(LANE_NAMES), len(rows), len(LANE_NAMES)):
        axes.axhline(row - 0.5, color="black", linewidth=0.6)
    labels = [f"{machine}  {LANE_NAMES[kind]}" if kind == "receive" else LANE_NAMES[kind] for machine, kind in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("milliseconds; a number is a micro-batch, and so is a colour")
    axes.set_title(title)
    for path in paths:
        figure.savefig(path, dpi=150)
