"""Summarise a trace: how long each machine computed, waited and was blocked, how busy links were, and what limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rpc_runtime.program.events import BLOCK, COMPUTE, FLIGHT, RECEIVE, ROWS, SEND, WAIT, Rows
from rpc_runtime.program.routes import CLIENT
from tvm_split.observing.trace import MachineTrace, Trace, transfers

BUSY_SHARE = 0.8
"""From that share of the time on, something that is busy is said to limit. Two equal stages are each busy for 0.85 to
0.95 of a stream, the rest is the runtime's own work between two micro-batches."""

STALLED_SHARE = 0.3
"""From that share of the time on, a link stalls both of its ends. Two equal stages do so for up to 0.13."""

Spans = np.ndarray[Any, np.dtype[np.int64]]
"""Begins and ends of times, [spans, 2], in nanoseconds; those of `spans_of` do not overlap, and are in order."""
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class MachineSummary:
    """Seconds of a machine from the first to the last computing of all machines, which are ``wall_seconds`` apart.

    ``transfer_seconds`` is the time in which a tensor was received or sent, ``overlap_seconds`` that of it in which the
    machine computed too.
    """

    machine: str
    micro_batches: int
    wall_seconds: float
    compute_seconds: float
    wait_seconds: float
    block_seconds: float
    receive_seconds: float
    send_seconds: float
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
    """Transfers of one direction of a link; ``seconds`` is the time in which one was under way, at the slower end.

    ``micro_batches`` are those of the stream meanwhile, also if only some of them use the link. ``stalled_seconds`` is
    the time in which the destination waits for the source, or in which it blocks the source, whichever is less. With a
    slow wire both are long, also if tensors wait in buffers that neither end observes.
    """

    source: str
    destination: str
    micro_batches: int
    transfers: int
    size_bytes: int
    seconds: float
    stalled_seconds: float
    wall_seconds: float

    @property
    def stalled_share(self) -> float:
        return _share(self.stalled_seconds, self.wall_seconds)

    @property
    def share(self) -> float:
        """The share of the time in which a transfer was under way."""
        return _share(self.seconds, self.wall_seconds)


@dataclass(frozen=True)
class TraceSummary:
    """The summaries of the machines that compute, and of the links; ``limit`` is a sentence that says what limits.

    ``limiting`` is the machine that limits, or the two ends of the link; empty if nothing is busy all the time.
    """

    machines: tuple[MachineSummary, ...]
    links: tuple[LinkSummary, ...]
    limit: str
    limiting: tuple[str, ...] = ()


def summary_of(trace: Trace) -> TraceSummary:
    computing = {name: spans_of(machine.of_kind(COMPUTE)) for name, machine in trace.machines.items()}
    first = min((int(spans[0, 0]) for spans in computing.values() if len(spans)), default=0)
    last = max((int(spans[-1, 1]) for spans in computing.values() if len(spans)), default=0)
    whole: Spans = np.array([[first, last]], np.int64)
    machines = tuple(
        _machine(name, machine, computing[name], whole) for name, machine in trace.machines.items() if name != CLIENT
    )
    links = tuple(_links(trace.machines, whole))
    return TraceSummary(machines, links, *_limit(machines, links))


def _machine(name: str, machine: MachineTrace, computing: Spans, whole: Spans) -> MachineSummary:
    def spans(*kinds: str) -> Spans:
        return common(spans_of(machine.of_kind(*kinds)), whole)

    moving = spans(RECEIVE, SEND)
    numbers = [number for number, track in enumerate(machine.tracks) if track.kind == COMPUTE]
    counts = [int(np.count_nonzero(machine.rows["track"] == number)) for number in numbers]
    return MachineSummary(
        name,
        max(counts, default=0),
        length(whole),
        length(computing),
        length(spans(WAIT)),
        length(spans(BLOCK)),
        length(spans(RECEIVE)),
        length(spans(SEND)),
        length(moving),
        length(common(moving, computing)),
    )


def _links(machines: Mapping[str, MachineTrace], whole: Spans) -> Iterable[LinkSummary]:
    ends: dict[tuple[str, str], list[tuple[Rows, Rows]]] = {}
    for moved in transfers(machines):
        ends.setdefault((moved.source, moved.destination), []).append((moved.sent, moved.received))
    for (source, destination), pairs in ends.items():
        sent, received = (np.concatenate(rows) for rows in zip(*pairs, strict=True))
        seconds = max(length(common(spans_of(rows), whole)) for rows in (sent, received))
        stalled = min(
            length(common(spans_of(machines[destination].of_kind(WAIT, peer=source)), whole)),
            length(common(spans_of(machines[source].of_kind(BLOCK, peer=destination)), whole)),
        )
        count, size_bytes = numbered(sent), int(sent["size_bytes"].sum())
        yield LinkSummary(source, destination, count, len(sent), size_bytes, seconds, stalled, length(whole))


def numbered(rows: Rows) -> int:
    """Return the number of micro-batches from the first to the last one of these events; 0 without events."""
    return int(rows["sequence"].max() - rows["sequence"].min()) + 1 if len(rows) else 0


class Results(NamedTuple):
    """Micro-batches that have results, in the order of their ends.

    ``sequences`` are their numbers, shape [results]; ``spans`` their begins and ends in nanoseconds, [results, 2].
    """

    sequences: np.ndarray[Any, np.dtype[np.int64]]
    spans: Spans


def results_of(trace: Trace) -> Results:
    """Return the micro-batches that have results.

    They last from input to result. If the client was not observed, they last from the first event on a machine to the
    last one.
    """
    client = trace.machines.get(CLIENT)
    flights = client.of_kind(FLIGHT) if client is not None else np.zeros(0, ROWS)
    if len(flights):
        sequences = flights["sequence"].astype(np.int64)
        spans = np.stack([flights["start"], flights["start"] + flights["duration"]], axis=1)
    else:
        sequences, spans = _of_machines([machine for name, machine in trace.machines.items() if name != CLIENT])
    order = np.argsort(spans[:, 1], kind="stable")
    return Results(sequences[order], spans[order])


def _of_machines(machines: Sequence[MachineTrace]) -> Results:
    rows = np.concatenate([np.zeros(0, ROWS), *(machine.of_kind(RECEIVE, COMPUTE, SEND) for machine in machines)])
    sequences, places = np.unique(rows["sequence"].astype(np.int64), return_inverse=True)
    spans = np.stack([np.full(len(sequences), NEVER), np.zeros(len(sequences), np.int64)], axis=1)
    np.minimum.at(spans[:, 0], places, rows["start"])
    np.maximum.at(spans[:, 1], places, rows["start"] + rows["duration"])
    to_client = (SEND, CLIENT)
    if any((track.kind, track.peer) == to_client for machine in machines for track in machine.tracks):
        sent = [machine.of_kind(SEND, peer=CLIENT)["sequence"] for machine in machines]
        has_ended = np.isin(sequences, np.concatenate(sent).astype(np.int64))
        sequences, spans = sequences[has_ended], spans[has_ended]
    return Results(sequences, spans)  # without a link to the client, all is computed in one process


def _limit(machines: Iterable[MachineSummary], links: Iterable[LinkSummary]) -> tuple[str, tuple[str, ...]]:
    """Return a sentence that names the bottleneck, and the machine or the two ends of the link (empty if none)."""
    busy = [(part.compute_share, part.machine, "computes", (part.machine,)) for part in machines]
    ends = [(link, f"the link {link.source} → {link.destination}") for link in links]
    moving = [(link.share, name, "carries tensors", (link.source, link.destination)) for link, name in ends]
    share, name, does, names = max((*busy, *moving), default=(0.0, "", "", ()), key=lambda part: part[0])
    stalled, slow = max(((link.stalled_share, link) for link in links), default=(0.0, None), key=lambda part: part[0])
    if not share:
        return "Nothing was computed.", ()
    if share >= BUSY_SHARE:
        return f"Limited by {name}: it {does} {share:.0%} of the time.", names
    if slow is not None and stalled >= STALLED_SHARE:
        why = f"{slow.destination} waits for it and {slow.source} is blocked {stalled:.0%} of the time"
        names = (slow.source, slow.destination)
        return f"Limited by the link {slow.source} → {slow.destination}: {why}.", names
    # Where a machine is often blocked by the next one, the client submits enough micro-batches.
    is_blocked = any(_share(part.block_seconds, part.wall_seconds) >= STALLED_SHARE / 2 for part in machines)
    feeds = "P" if is_blocked else "The client feeds too few micro-batches at once, p"
    return (
        f"Nothing is busy all the time: {name} is most, it {does} {share:.0%} of it. {feeds}rocesses share cores, or "
        "stages are so short that the runtime's own work counts."
    ), ()


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
    """Return the times in both; the spans of each are in order and do not overlap."""
    first = np.searchsorted(right[:, 1], left[:, 0], "right")
    counts = np.maximum(np.searchsorted(right[:, 0], left[:, 1], "left") - first, 0)
    one = np.repeat(np.arange(len(left)), counts)
    other = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
    both = np.maximum(left[one, 0], right[other, 0]), np.minimum(left[one, 1], right[other, 1])
    return np.stack(both, axis=1)


def length(spans: Spans) -> float:
    """Return the seconds of all spans together."""
    return float((spans[:, 1] - spans[:, 0]).sum()) * 1e-9


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
