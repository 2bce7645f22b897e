"""What the page shows, as values: of a running deployment, or of a saved trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.program.events import BLOCK, COMPUTE, HAPPENINGS, RECEIVE, ROWS, SEND, WAIT
from tvm_split.observing.about import About
from tvm_split.observing.summary import (
    LinkSummary,
    Spans,
    TraceSummary,
    numbered,
    results_of,
    summary_of,
)
from tvm_split.observing.trace import MachineTrace, Trace, machine_order
from tvm_split.values import adapter_of

SHOWN_MICRO_BATCHES = 20
"""Micro-batches in the page's timeline: the latest ones that all machines have computed. Hundreds look like stripes."""
MOST_BARS = 1000
"""Bars of a machine in the timeline."""
MOST_POINTS = 120
"""Points of the chart of rates."""
LEAST_RESULTS = 16
"""Results in the part of the time that a point of the chart of rates stands for, on average."""
LANES = {RECEIVE: "receive", COMPUTE: "compute", WAIT: "compute", BLOCK: "compute", SEND: "send"}
"""The lane of each kind of event in the timeline."""
RECORDED, WAITING, RUNNING, IDLE = "recorded", "waiting", "running", "idle"
RECOVERING, LOST, FAILED, ENDED = "recovering", "lost", "failed", "ended"
"""States of a page: of a saved trace; before there is a deployment; with and without micro-batches; while stages go to
other machines; while no machine answers; after a deployment has failed, or ended."""


@dataclass(frozen=True)
class Live:
    """What is known of a deployment besides its events: its state, the reason for it, and its workers' descriptions.

    ``gone`` are machines that do not answer. ``processor_cores`` has the number of cores that each machine's worker
    process keeps busy.
    """

    state: str = RECORDED
    reason: str = ""
    gone: Collection[str] = ()
    workers: Mapping[str, WorkerDescription] = field(default_factory=dict)
    processor_cores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownMachine:
    """A machine: its stages with their layers, shares of the time by kind of event, and what its worker reports.

    ``predicted_seconds`` and ``measured_seconds`` are computing per micro-batch of the stream.
    """

    machine: str
    stages: tuple[tuple[str, tuple[str, ...]], ...] = ()
    answers: bool = True
    shares: Mapping[str, float] = field(default_factory=dict)
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    clock_error_seconds: float = 0.0
    processor_cores: float | None = None
    cores: int | None = None
    memory_free_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True)
class ShownLink:
    """One direction of a link: the share of the time in which it is busy, and bytes and seconds per micro-batch."""

    source: str
    destination: str
    share: float
    size_bytes: float
    measured_seconds: float
    predicted_seconds: float | None


@dataclass(frozen=True)
class Page:
    """All that the page shows. Times are in seconds; those of rates, bars and events are since the first event.

    ``limit`` and ``limiting`` are those of `TraceSummary`. ``period_seconds`` and ``latency_seconds`` have what was
    predicted and measured. ``rates`` has pairs of a time and the results per second since the time before. A row of
    ``bars`` is an event: the number of its lane, kind, begin, duration, micro-batch, stage and peer. The page changes
    every ``refresh_seconds``; never if this is 0.
    """

    model: str
    state: str = RECORDED
    reason: str = ""
    limit: str = ""
    limiting: tuple[str, ...] = ()
    results: int = 0
    period_seconds: Mapping[str, float | None] = field(default_factory=dict)
    latency_seconds: Mapping[str, float | None] = field(default_factory=dict)
    machines: tuple[ShownMachine, ...] = ()
    links: tuple[ShownLink, ...] = ()
    rates: tuple[tuple[float, float], ...] = ()
    lanes: tuple[str, ...] = ()
    bars: tuple[tuple[Any, ...], ...] = ()
    events: tuple[tuple[float, str], ...] = ()
    refresh_seconds: float = 0.0

    def as_values(self) -> dict[str, Any]:
        """Return the page as values for JSON."""
        return cast(dict[str, Any], adapter_of(Page).dump_python(self, mode="json"))


def page_of(
    trace: Trace,
    live: Live,
    history: Spans | None = None,
    noted: Collection[tuple[int, str]] = (),
    begin: int | None = None,
    refresh_seconds: float = 0.0,
) -> Page:
    """Return the page of a trace.

    Args:
        history: begins and ends of results, nanoseconds, shape [results, 2]; None for those in the trace.
        noted: events that no machine recorded: nanoseconds in the trace's clock, and what happened.
        begin: the moment from which times are counted, in nanoseconds of the trace's clock; the first event's if None.
    """
    summary, about = summary_of(trace), trace.about
    results = results_of(trace).spans
    history = results if history is None else history
    begin = trace.begin if begin is None else begin
    names = dict.fromkeys([*(part.machine for part in summary.machines), *sorted(live.gone)])
    lanes, bars = _timeline(trace, begin)
    happened = [
        # The first sentence of a message; the others say what to do.
        (event.start_nanoseconds, f"{event.machine}: {event.detail.partition('. ')[0]}")
        for event in trace.of_kind(*HAPPENINGS)
    ]
    seconds = (results[:, 1] - results[:, 0]) * 1e-9
    percentiles = {f"p{n}": float(np.percentile(seconds, n)) if len(results) else None for n in (50, 90, 99)}
    return Page(
        model=trace.model,
        state=live.state,
        reason=live.reason,
        limit=summary.limit,
        limiting=summary.limiting,
        results=len(history),
        period_seconds={"predicted": about.period_seconds, "measured": _period(results)},
        latency_seconds={"predicted": about.latency_seconds, **percentiles},
        machines=tuple(_machine(name, trace, summary, live) for name in names),
        links=tuple(_link(link, about) for link in summary.links),
        rates=_rates(history, begin),
        lanes=lanes,
        bars=bars,
        events=tuple(((at - begin) * 1e-9, text) for at, text in sorted([*happened, *noted])),
        refresh_seconds=refresh_seconds,
    )


def _machine(name: str, trace: Trace, summary: TraceSummary, live: Live) -> ShownMachine:
    about, machine = trace.about, trace.machines.get(name, MachineTrace((), np.zeros(0, ROWS)))
    part = next((part for part in summary.machines if part.machine == name), None)
    computed = numbered(machine.of_kind(COMPUTE))
    return ShownMachine(
        name,
        tuple((stage.name, stage.layers) for stage in about.stages if stage.machine == name),
        name not in live.gone,
        {kind: getattr(part, f"{kind}_seconds") / (part.wall_seconds or 1.0) for kind in LANES} if part else {},
        about.compute_seconds.get(name),
        part.compute_seconds / computed if part and computed else None,
        machine.clock_error_nanoseconds * 1e-9,
        live.processor_cores.get(name),
        **reported(live.workers.get(name)),
    )


def reported(worker: WorkerDescription | None) -> dict[str, Any]:
    """Return the fields of a `ShownMachine` that its worker reports."""
    names = ("cores", "memory_free_bytes", "memory_total_bytes")
    return {} if worker is None else {name: getattr(worker, name) for name in names}


def _link(link: LinkSummary, about: About) -> ShownLink:
    ends = (link.source, link.destination)
    predicted = next((own.seconds for own in about.links if (own.source, own.destination) == ends), None)
    size_bytes, seconds = link.size_bytes / link.micro_batches, link.seconds / link.micro_batches
    return ShownLink(link.source, link.destination, link.share, size_bytes, seconds, predicted)


def _period(results: Spans) -> float | None:
    """Return the seconds between two results; None for fewer than two, or if all came at once."""
    seconds = float(results[-1, 1] - results[0, 1]) * 1e-9 if len(results) > 1 else 0.0
    return seconds / (len(results) - 1) or None if len(results) > 1 else None


def _rates(results: Spans, begin: int) -> tuple[tuple[float, float], ...]:
    """Return points of time in seconds after ``begin``, and the results per second since the point before."""
    count = min(len(results) // LEAST_RESULTS, MOST_POINTS)
    if count < 1 or results[0, 1] == results[-1, 1]:
        return ()
    ends = (results[:, 1] - begin) * 1e-9
    counts, edges = np.histogram(ends[1:], count, (float(ends[0]), float(ends[-1])))
    rates = counts / np.diff(edges)
    return tuple(zip(edges[1:].tolist(), rates.tolist(), strict=True))


def _timeline(trace: Trace, begin: int) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Return the names of the lanes, and the bars of the latest micro-batches that all machines have computed."""
    computed = [machine.of_kind(COMPUTE)["sequence"] for machine in trace.machines.values()]
    last = min((int(numbers.max()) for numbers in computed if len(numbers)), default=0)
    lanes: dict[str, int] = {}
    bars = []
    for name in machine_order(trace):
        machine = trace.machines[name]
        rows = machine.of_kind(*LANES)
        sequences = rows["sequence"].astype(np.int64)
        shown = rows[(sequences > last - SHOWN_MICRO_BATCHES) & (sequences <= last)][-MOST_BARS:]
        of_lane: dict[str, list[Sequence[int]]] = {lane: [] for lane in LANES.values()}
        for row in shown.tolist():
            of_lane[LANES[machine.tracks[row[5]].kind]].append(row)
        for lane, own in of_lane.items():
            if own:
                number = lanes.setdefault(f"{name} {lane}", len(lanes))
                bars += [_bar(number, row, machine, begin) for row in own]
    return tuple(lanes), tuple(bars)


def _bar(lane: int, row: Sequence[int], machine: MachineTrace, begin: int) -> tuple[Any, ...]:
    _, start, duration, sequence, _, track, _ = row
    own = machine.tracks[track]
    return lane, own.kind, (start - begin) * 1e-9, duration * 1e-9, sequence, own.stage, own.peer
