"""Summarise a trace: how long each machine computed, waited and was blocked, how busy links were, and what limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpc_runtime.program.events import BLOCK, COMPUTE, RECEIVE, SEND, WAIT, Rows
from rpc_runtime.program.routes import CLIENT
from tvm_split.observing.trace import MachineTrace, Trace, transfers

BUSY_SHARE = 0.8
"""From that share of the time on, something that is busy is said to limit. Two equal stages are each busy for 0.85 to
0.95 of a stream, the rest is the runtime's own work between two micro-batches."""

Spans = np.ndarray[Any, np.dtype[np.int64]]
"""Begins and ends of times that do not overlap, in order, [spans, 2], in nanoseconds."""


@dataclass(frozen=True)
class MachineSummary:
    """Seconds of a machine between the first and the last computing of all machines, which are ``wall_seconds`` apart.

    ``transfer_seconds`` is the time in which a tensor was received or sent, ``overlap_seconds`` that of it in which the
    machine computed too.
    """

    machine: str
    micro_batches: int
    wall_seconds: float
    compute_seconds: float
    wait_seconds: float
    block_seconds: float
    transfer_seconds: float
    overlap_seconds: float

    @property
    def compute_share(self) -> float:
        return _share(self.compute_seconds, self.wall_seconds)

    @property
    def bubble(self) -> float:
        """The share of the time in which the machine did not compute."""
        return 1 - self.compute_share if self.wall_seconds else 0.0

    @property
    def overlap(self) -> float:
        """The share of the transfer time that computing hides."""
        return _share(self.overlap_seconds, self.transfer_seconds)


@dataclass(frozen=True)
class LinkSummary:
    """Transfers of one direction of a link; ``seconds`` is the time in which one was under way, at the slower end."""

    source: str
    destination: str
    transfers: int
    size_bytes: int
    seconds: float
    wall_seconds: float

    @property
    def share(self) -> float:
        """The share of the time in which a transfer was under way."""
        return _share(self.seconds, self.wall_seconds)


@dataclass(frozen=True)
class TraceSummary:
    """The summaries of the machines that compute, and of the links; ``limit`` is a sentence that says what limits."""

    machines: tuple[MachineSummary, ...]
    links: tuple[LinkSummary, ...]
    limit: str


def summary_of(trace: Trace) -> TraceSummary:
    """Return the summary of a trace."""
    computing = {name: spans_of(machine.of_kind(COMPUTE)) for name, machine in trace.machines.items()}
    first = min((int(spans[0, 0]) for spans in computing.values() if len(spans)), default=0)
    last = max((int(spans[-1, 1]) for spans in computing.values() if len(spans)), default=0)
    wall = (last - first) * 1e-9
    machines = tuple(
        _machine(name, machine, computing[name], wall) for name, machine in trace.machines.items() if name != CLIENT
    )
    links = tuple(_links(trace.machines, wall))
    return TraceSummary(machines, links, _limit(machines, links))


def _machine(name: str, machine: MachineTrace, computing: Spans, wall: float) -> MachineSummary:
    moving = spans_of(machine.of_kind(RECEIVE, SEND))
    numbers = [number for number, track in enumerate(machine.tracks) if track.kind == COMPUTE]
    counts = [int(np.count_nonzero(machine.rows["track"] == number)) for number in numbers]
    return MachineSummary(
        name,
        max(counts, default=0),
        wall,
        length(computing),
        length(spans_of(machine.of_kind(WAIT))),
        length(spans_of(machine.of_kind(BLOCK))),
        length(moving),
        length(common(moving, computing)),
    )


def _links(machines: Mapping[str, MachineTrace], wall: float) -> Iterable[LinkSummary]:
    ends: dict[tuple[str, str], list[tuple[Rows, Rows]]] = {}
    for moved in transfers(machines):
        ends.setdefault((moved.source, moved.destination), []).append((moved.sent, moved.received))
    for (source, destination), pairs in ends.items():
        sent, received = (np.concatenate(rows) for rows in zip(*pairs, strict=True))
        seconds = max(length(spans_of(sent)), length(spans_of(received)))
        yield LinkSummary(source, destination, len(sent), int(sent["size_bytes"].sum()), seconds, wall)


def _limit(machines: Iterable[MachineSummary], links: Iterable[LinkSummary]) -> str:
    shares = [(machine.compute_share, f"{machine.machine} computes", machine.machine) for machine in machines]
    for link in links:
        name = f"the link from {link.source} to {link.destination}"
        shares.append((link.share, f"{name} carries tensors", name))
    share, does, name = max(shares, default=(0.0, "", ""))
    if not share:
        return "Nothing was computed."
    if share >= BUSY_SHARE:
        return f"{name[0].upper()}{name[1:]} limits: {does.removeprefix(f'{name} ')} {share:.0%} of the time."
    return (
        f"Nothing is busy all the time: {does} most, {share:.0%} of it. The client feeds too few micro-batches at "
        "once, or processes share cores."
    )


def spans_of(rows: Rows) -> Spans:
    """Return the union of the events' times."""
    ordered = rows[np.argsort(rows["start"], kind="stable")]
    if not len(ordered):
        return np.zeros((0, 2), np.int64)
    starts, ends = ordered["start"], np.maximum.accumulate(ordered["start"] + ordered["duration"])
    is_first = np.concatenate([[True], starts[1:] > ends[:-1]])
    is_last = np.concatenate([is_first[1:], [True]])
    return np.stack([starts[is_first], ends[is_last]], axis=1)


def common(left: Spans, right: Spans) -> Spans:
    """Return the times in both."""
    spans, places = [], [0, 0]
    while places[0] < len(left) and places[1] < len(right):
        one, other = left[places[0]], right[places[1]]
        begin, end = max(one[0], other[0]), min(one[1], other[1])
        if begin < end:
            spans.append((begin, end))
        places[int(other[1] < one[1])] += 1
    return np.array(spans, np.int64).reshape(-1, 2)


def length(spans: Spans) -> float:
    """Return the seconds of all spans together."""
    return float((spans[:, 1] - spans[:, 0]).sum()) * 1e-9


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
