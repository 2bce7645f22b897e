"""What a run is measured by: statistics per stage, and a trace of what happened when."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

TRACE_EVENTS = 50_000
"""Events kept per machine; older ones are forgotten."""
UNCOUNTED_EVENTS = 1000
"""Events that wait to be added up."""
COMPUTE_SAMPLES = 1001
"""Computing times kept per stage for the median."""

RECEIVE, COMPUTE, WAIT, SEND = "receive", "compute", "wait", "send"


def now() -> int:
    """Nanoseconds of this host's monotonic clock."""
    return time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """What a stage did since it was loaded.

    ``wait_seconds``: its machine was idle until this stage's inputs came. ``receive_seconds`` and ``send_seconds``:
    time on the wire, which overlaps computing, and what codecs take. Tensors handed over inside a machine count as
    neither. ``bytes_received`` and ``bytes_sent`` are those that codecs made of them.
    """

    name: str
    machine: str
    micro_batches: int = 0
    compute_seconds: float = 0.0
    median_compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    receive_seconds: float = 0.0
    send_seconds: float = 0.0
    bytes_received: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """What carries a link, ``"grpc"`` or ``"shm"``; ``reason`` says why no memory is shared."""

    source: str
    destination: str
    transport: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something a stage did for one micro-batch. ``kind`` is receive, compute, wait or send; times in nanoseconds.

    ``size_bytes`` is what was received or sent of a tensor, as its codec wrote it.
    """

    machine: str
    stage: str
    sequence: int
    kind: str
    start_nanoseconds: int
    end_nanoseconds: int
    size_bytes: int = 0


class Recorder:
    """Takes down what happens on one machine. Thread-safe; memory is bounded."""

    def __init__(self, machine: str, stages: Sequence[str], trace_events: int = TRACE_EVENTS) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._totals = {name: _Totals() for name in stages}
        self._new: deque[tuple[Any, ...]] = deque()
        self._events: deque[tuple[Any, ...]] = deque(maxlen=trace_events)
        self.activity = 0
        """Grows with every tensor, part of a tensor and micro-batch. Written without a lock: only change matters."""

    def record(self, kind: str, stage: str, sequence: int, start: int, end: int, size_bytes: int = 0) -> None:
        """One event of a stage; ``start`` and ``end`` as ``now()`` gave them."""
        self.activity += 1
        # Between two kernels there is time for no more: what it adds up to is found out when somebody asks.
        self._new.append((self._machine, stage, sequence, kind, start, end, size_bytes))
        if len(self._new) > UNCOUNTED_EVENTS:
            with self._lock:
                self._count_locked()

    def statistics(self) -> tuple[StageStatistics, ...]:
        with self._lock:
            self._count_locked()
            return tuple(totals.statistics(name, self._machine) for name, totals in self._totals.items())

    def trace(self) -> tuple[TraceEvent, ...]:
        with self._lock:
            self._count_locked()
            events = tuple(self._events)
        return tuple(TraceEvent(*event) for event in events)

    def _count_locked(self) -> None:
        while self._new:
            event = self._new.popleft()
            _, stage, _, kind, start, end, size_bytes = event
            self._totals[stage].add(kind, (end - start) * 1e-9, size_bytes)
            self._events.append(event)


class _Totals:
    def __init__(self) -> None:
        self.micro_batches = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.seconds = dict.fromkeys((RECEIVE, COMPUTE, WAIT, SEND), 0.0)
        self.samples: deque[float] = deque(maxlen=COMPUTE_SAMPLES)

    def add(self, kind: str, seconds: float, size_bytes: int) -> None:
        self.seconds[kind] += seconds
        if kind == COMPUTE:
            self.micro_batches += 1
            self.samples.append(seconds)
        elif kind == RECEIVE:
            self.bytes_received += size_bytes
        elif kind == SEND:
            self.bytes_sent += size_bytes

    def statistics(self, name: str, machine: str) -> StageStatistics:
        return StageStatistics(
            name=name,
            machine=machine,
            micro_batches=self.micro_batches,
            compute_seconds=self.seconds[COMPUTE],
            median_compute_seconds=statistics.median(self.samples) if self.samples else 0.0,
            wait_seconds=self.seconds[WAIT],
            receive_seconds=self.seconds[RECEIVE],
            send_seconds=self.seconds[SEND],
            bytes_received=self.bytes_received,
            bytes_sent=self.bytes_sent,
        )


def shift_clock(event: TraceEvent, offset_nanoseconds: int) -> TraceEvent:
    """The event in another clock, ``offset_nanoseconds`` behind the clock it was taken with."""
    return replace(
        event,
        start_nanoseconds=event.start_nanoseconds - offset_nanoseconds,
        end_nanoseconds=event.end_nanoseconds - offset_nanoseconds,
    )
