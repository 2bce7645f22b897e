"""Measurements: statistics per stage and a trace of the events of a run, and the times of single kernels."""

import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpc_runtime.program.program import BlobSpec, TensorSpec

TRACE_EVENTS = 50_000
"""Maximum events kept per machine; older ones are dropped."""
UNCOUNTED_EVENTS = 1000
"""Maximum events that are not yet added to the statistics."""
RATE_SECONDS = 10
"""Seconds that the current rate of micro-batches looks back."""
COMPUTE_SAMPLES = 1001
"""Compute times kept per stage for the median."""

RECEIVE, COMPUTE, WAIT, SEND = "receive", "compute", "wait", "send"


def now() -> int:
    """Return the nanoseconds of this host's monotonic clock."""
    return time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Totals of a stage since it was loaded.

    ``wait_seconds`` is the time that its machine was idle until this stage's inputs arrived. ``receive_seconds`` and
    ``send_seconds`` are the transfer time, which overlaps computing, and the time of codecs. Transfers inside a machine
    count as neither. ``bytes_received`` and ``bytes_sent`` are encoded sizes.
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
    """The transport of a link, such as ``"grpc"`` or ``"shm"``; ``reason`` says why a faster one is not used."""

    source: str
    destination: str
    transport: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event of a stage for one micro-batch. ``kind`` is receive, compute, wait or send; times in nanoseconds.

    ``size_bytes`` is the encoded size of the tensor that was received or sent, ``peer`` the machine, or the client, at
    the other end of the link.
    """

    machine: str
    stage: str
    sequence: int
    kind: str
    start_nanoseconds: int
    end_nanoseconds: int
    size_bytes: int = 0
    peer: str = ""


class Recorder:
    """Records the events of one machine. Thread-safe, with bounded memory."""

    def __init__(self, machine: str, stages: Sequence[str]) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._samples: dict[str, deque[float]] = {name: deque(maxlen=COMPUTE_SAMPLES) for name in stages}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._new: deque[tuple[Any, ...]] = deque()
        self._events: deque[tuple[Any, ...]] = deque(maxlen=TRACE_EVENTS)
        self.activity = 0
        """Counter of tensors, parts of tensors and micro-batches. Written without a lock, since only changes matter."""

    def record(
        self, kind: str, stage: str, sequence: int, start: int, end: int, size_bytes: int = 0, peer: str = ""
    ) -> None:
        """Record one event of a stage; ``start`` and ``end`` are times of ``now()``."""
        self.activity += 1
        # This runs between two kernels, so it only appends; totals are computed when they are read.
        self._new.append((self._machine, stage, sequence, kind, start, end, size_bytes, peer))
        if len(self._new) > UNCOUNTED_EVENTS:
            with self._lock:
                self._count_locked()

    def statistics(self) -> tuple[StageStatistics, ...]:
        with self._lock:
            self._count_locked()
            return tuple(map(self._statistics_locked, self._samples))

    def _statistics_locked(self, stage: str) -> StageStatistics:
        samples = self._samples[stage]
        return StageStatistics(
            name=stage,
            machine=self._machine,
            micro_batches=self._counts[stage, COMPUTE],
            compute_seconds=self._seconds[stage, COMPUTE],
            median_compute_seconds=statistics.median(samples) if samples else 0.0,
            wait_seconds=self._seconds[stage, WAIT],
            receive_seconds=self._seconds[stage, RECEIVE],
            send_seconds=self._seconds[stage, SEND],
            bytes_received=self._bytes[stage, RECEIVE],
            bytes_sent=self._bytes[stage, SEND],
        )

    def micro_batches_per_second(self) -> float:
        """Return the rate of the busiest stage since the oldest event that ended in the last `RATE_SECONDS`."""
        with self._lock:
            self._count_locked()
            end = now()
            recent = [event for event in self._events if end - event[5] < RATE_SECONDS * 1e9]
        computed = Counter(event[1] for event in recent if event[3] == COMPUTE)
        return max(computed.values()) * 1e9 / max(end - recent[0][4], 1) if computed else 0.0

    def trace(self) -> tuple[TraceEvent, ...]:
        with self._lock:
            self._count_locked()
            events = tuple(self._events)
        return tuple(TraceEvent(*event) for event in events)

    def _count_locked(self) -> None:
        while self._new:
            event = self._new.popleft()
            _, stage, _, kind, start, end, size_bytes, _ = event
            self._counts[stage, kind] += 1
            self._seconds[stage, kind] += (end - start) * 1e-9
            self._bytes[stage, kind] += size_bytes
            if kind == COMPUTE:
                self._samples[stage].append((end - start) * 1e-9)
            self._events.append(event)


MAXIMUM_LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class TimedKernel:
    """A function of a library, which takes tensors and writes the last ``results`` of them.

    ``weights`` are the positions of the arguments that are weights. Each call gets other memory for them, as in a
    network, which reads all other weights before a kernel reads its own again.
    """

    function: str
    arguments: tuple[TensorSpec, ...]
    weights: frozenset[int]
    results: int

    @property
    def size_bytes(self) -> int:
        return sum(argument.size_bytes for argument in self.arguments)


@dataclass(frozen=True)
class KernelSet:
    """Kernels of one library for ``device`` (``"cpu"`` or ``"cuda"``), timed in turn in this order.

    ``weight_bytes`` is the weight memory that is read before the same weights are used again. It is that of the whole
    model, so that caches are as cold or warm as when the model runs. ``target`` is the library's target, for messages.
    """

    machine: str
    device: str
    library: BlobSpec
    kernels: tuple[TimedKernel, ...]
    weight_bytes: int
    target: str = ""


@dataclass(frozen=True)
class TimingEffort:
    """How long kernels are timed: at least the minimum rounds over all kernels and seconds, at most the limit."""

    minimum_rounds: int = 7
    minimum_seconds: float = 0.5
    limit_seconds: float = 60.0


@dataclass(frozen=True)
class KernelTime:
    """Seconds of one call while nothing else runs, from ``rounds`` calls; after an ``error`` both numbers are 0."""

    function: str
    seconds: float
    rounds: int
    error: str = ""
