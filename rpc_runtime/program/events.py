"""Events: what the machines of a deployment and its client record while they run, kept in a ring and summed.

A *track* is a series of events of one kind: a stage that computes, a tensor that is sent to one machine. An event is a
fixed-size row of numbers, and the number of its track says the rest. Statistics, reports, metrics and traces are all
computed from rows, and from the totals of tracks, which are sums over rows.
"""

import math
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.clocks import MachineClock

RECEIVE, SEND, COMPUTE, WAIT, BLOCK = "receive", "send", "compute", "wait", "block"
KERNEL, FLIGHT, WINDOW, DEPLOYMENT = "kernel", "flight", "window", "deployment"
PAUSE, REPLAY = "pause", "replay"
KINDS = (RECEIVE, SEND, COMPUTE, WAIT, BLOCK, KERNEL, FLIGHT, WINDOW, DEPLOYMENT, PAUSE, REPLAY)
"""receive, send: a tensor over a link. compute: a stage. wait: idle until an input arrived. block: idle until an output
had room. kernel, if asked for: a compiled function of a stage. flight, of the client: a micro-batch from its input to
its result. window: a moment at which a link's receiver allowed more micro-batches under way. deployment: a moment at
which it opened, failed or closed. pause, of the client: from the failure of a machine, the peer, until inputs were fed
to others. replay, of the client: a moment at which a micro-batch was fed again."""
HAPPENINGS = (DEPLOYMENT, PAUSE)
"""Kinds of the rare events of a deployment as a whole; their tracks have a detail for people."""
OPENED = "opened"
"""The detail of the first event of kind `DEPLOYMENT`."""
FAILURE, LINK_ENDED = "failed: ", "its link ended: "
"""Beginnings of the details of later ones, before the reason. Closing a deployment also ends its links."""

RING_ROWS = 65_536
"""Rows kept per machine (3 MB); older ones are overwritten."""
CHUNK_ROWS = 4096
"""The number of rows that are added to the totals at a time."""
SHOWN_LETTERS = 8
"""Letters of a deployment's random name that others see, and by which they may observe it."""
MOST_TRACKS = 4096
"""From so many tracks on, kernels with new names share a track of their stage."""
OTHER_KERNELS = "other kernels"
MOST_KERNEL_RUNS = 1000
"""The most micro-batches whose kernels are recorded at a time: each adds an event per kernel to the ring."""
RATE_SECONDS = 10
"""Seconds that the current rate of micro-batches looks back."""
MEDIAN_ROWS, MEDIAN_WINDOW = 1001, 8192
"""The most rows of a track in its median, and how many latest rows of all tracks are searched for them. Searching the
whole ring would take a millisecond of each reading."""

_ROW = struct.Struct("<QqqQQHI")
ROWS = np.dtype(
    [
        ("number", "<u8"), ("start", "<i8"), ("duration", "<i8"), ("sequence", "<u8"), ("size_bytes", "<u8"),
        ("track", "<u2"), ("value", "<u4"),
    ]
)  # fmt: skip
"""A row: its number, counted from 1; start and duration in nanoseconds; the micro-batch; the encoded size of its
tensor; the number of its track; and a value: the micro-batches under way after a transfer, a window's new size, or how
often a stage has called a kernel's function before in this micro-batch."""
Rows = np.ndarray[Any, Any]
Totals = np.ndarray[Any, np.dtype[np.int64]]


def now() -> int:
    """Return the nanoseconds of this host's monotonic clock."""
    return time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Track:
    """A series of events of one ``kind`` on one machine, and its totals since the program was loaded.

    ``stage`` is the producer of a sent tensor, and the first consumer of a received one. ``peer`` is the other end of a
    link: a machine or the client; for wait and block, the machine that was waited for. ``detail`` is the name of a
    kernel's function, or what happened to a deployment. ``median_nanoseconds`` is the median of the latest durations,
    and ``value`` that of the latest row.
    """

    kind: str
    stage: str = ""
    peer: str = ""
    tensor: str = ""
    detail: str = ""
    events: int = 0
    nanoseconds: int = 0
    size_bytes: int = 0
    median_nanoseconds: float = 0.0
    value: int = 0

    @property
    def seconds(self) -> float:
        return self.nanoseconds * 1e-9


@dataclass(frozen=True, slots=True)
class Observation:
    """One reading of a machine's events: ``tracks``, the ``rows`` not read before, and how many rows are ``lost``.

    The next reading begins after row ``newest``. ``clock_nanoseconds`` is the machine's monotonic clock.
    ``processor_seconds`` is the processor time of its process so far.
    """

    tracks: tuple[Track, ...]
    rows: bytes
    newest: int
    lost: int
    clock_nanoseconds: int
    processor_seconds: float = 0.0

    def table(self) -> Rows:
        """Return the rows as an array of `ROWS`, [rows]."""
        return np.frombuffer(self.rows, ROWS)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event on one machine; ``kind`` is one of `KINDS`, times are in nanoseconds of one clock.

    ``size_bytes`` is the encoded size of a tensor that was received or sent. For ``peer`` and ``detail``, see `Track`;
    for ``value``, `ROWS`.
    """

    machine: str
    stage: str
    sequence: int
    kind: str
    start_nanoseconds: int
    end_nanoseconds: int
    size_bytes: int = 0
    peer: str = ""
    tensor: str = ""
    value: int = 0
    detail: str = ""


class Recorder:
    """Records the events of one machine. Thread-safe, with bounded memory."""

    def __init__(self) -> None:
        self._memory = bytearray(RING_ROWS * ROWS.itemsize)
        self._bytes = np.frombuffer(self._memory, np.uint8).reshape(RING_ROWS, ROWS.itemsize)
        # A row and its number belong together: two threads would overwrite each other's row.
        self._writing = threading.Lock()
        self._newest = 0
        self._counting = threading.Lock()
        self._counted = 0
        self._totals = np.zeros((3, 0), np.int64)
        self._tracks: dict[tuple[str, str, str, str, str], int] = {}
        """By kind, stage, peer, tensor and detail: looking up a `Track` takes ten times as long."""
        self._values: list[int] = []
        self.activity = 0
        """Counter of tensors, parts of tensors and micro-batches. Written without a lock, since only changes matter."""

    def track(self, kind: str, stage: str = "", peer: str = "", tensor: str = "", detail: str = "") -> int:
        """Return the number of the track with these names, for `record`; add the track if it is missing."""
        names = (kind, stage, peer, tensor, detail)
        number = self._tracks.get(names)
        if number is None:
            with self._writing:
                number = self._tracks.get(names, len(self._tracks))
                if number == len(self._values):
                    self._values.append(0)  # first, since readers take no lock
                    self._tracks[names] = number
        return number

    def kernel_track(self, stage: str, function: str) -> int:
        """Return the number of a kernel's track; once there are `MOST_TRACKS`, new kernels of a stage share one."""
        is_known = (KERNEL, stage, "", "", function) in self._tracks
        has_room = is_known or len(self._tracks) < MOST_TRACKS
        return self.track(KERNEL, stage, detail=function if has_room else OTHER_KERNELS)

    def record(self, track: int, sequence: int, start: int, end: int, size_bytes: int = 0, value: int = 0) -> None:
        """Record one event; ``start`` and ``end`` are times of `now`. A momentary event has both equal."""
        self.activity += 1
        # This runs between two kernels: 1 µs.
        with self._writing:
            place = self._newest % RING_ROWS * _ROW.size
            _ROW.pack_into(
                self._memory, place, self._newest + 1, start, end - start, sequence, size_bytes, track, value
            )
            self._newest += 1
            self._values[track] = value
            is_full = self._newest % CHUNK_ROWS == 0
        if is_full:
            self._count()

    def happened(self, what: str) -> None:
        """Record an event of kind `DEPLOYMENT`: ``what`` says that the deployment opened, failed or closed."""
        moment = now()
        self.record(self.track(DEPLOYMENT, detail=what), 0, moment, moment)

    def observe(self, since: int | None = None) -> Observation:
        """Return the totals of all rows, and the kept rows after number ``since`` (None: no rows)."""
        newest = self._newest
        read = min(newest if since is None else since, newest)
        rows = self._rows(max(read, newest - RING_ROWS), newest)
        totals = self._count()  # after the rows, so that it has the tracks of all of them
        medians = dict(_medians(self._rows(newest - MEDIAN_WINDOW, newest), self._of_kind(COMPUTE)))
        tracks = []
        for names, number in tuple(self._tracks.items())[: totals.shape[1]]:
            events, nanoseconds, size_bytes = totals[:, number].tolist()
            more = medians.get(number, 0.0), self._values[number]
            tracks.append(Track(*names, events, nanoseconds, size_bytes, *more))
        lost = newest - read - len(rows)
        return Observation(tuple(tracks), rows.tobytes(), newest, lost, now(), time.process_time())

    def micro_batches_per_second(self) -> float:
        """Return the rate of the busiest stage since the oldest event that ended in the last `RATE_SECONDS`."""
        end, newest = now(), self._newest
        rows = self._rows(newest - RING_ROWS, newest)
        rows = rows[np.isin(rows["track"], self._of_kind(COMPUTE))]
        recent = rows[end - rows["start"] - rows["duration"] < RATE_SECONDS * 1e9]
        most = int(np.bincount(recent["track"]).max(initial=0))
        return most * 1e9 / max(end - int(recent["start"].min()), 1) if most else 0.0

    def _of_kind(self, kind: str) -> list[int]:
        return [number for names, number in tuple(self._tracks.items()) if names[0] == kind]

    def _rows(self, first: int, newest: int) -> Rows:
        """Return a copy of the rows after ``first`` up to ``newest``, without those overwritten meanwhile."""
        first = max(first, 0)
        begin, end = first % RING_ROWS, first % RING_ROWS + newest - first
        # Whole slices of bytes: numpy takes milliseconds to copy rows, in which no other thread of this process runs.
        rows: Rows = np.concatenate([self._bytes[begin:end], self._bytes[: max(end - RING_ROWS, 0)]]).view(ROWS)[:, 0]
        is_whole = rows["number"] == np.arange(first + 1, newest + 1, dtype=np.uint64)
        return rows if is_whole.all() else rows[is_whole]

    def _count(self) -> Totals:
        """Add new rows to the totals; return events, nanoseconds and bytes by track, [3, tracks]."""
        with self._counting:
            newest = self._newest
            rows = self._rows(self._counted, newest)
            self._counted = newest
            self._totals = _summed(self._totals, rows, len(self._tracks))
            return self._totals


def _summed(totals: Totals, rows: Rows, tracks: int) -> Totals:
    """Return the totals, [3, at least the number of tracks], with these rows added."""
    sums = np.zeros((3, max(tracks, totals.shape[1])), np.int64)
    sums[:, : totals.shape[1]] = totals
    np.add.at(sums[0], rows["track"], 1)
    np.add.at(sums[1], rows["track"], rows["duration"])
    np.add.at(sums[2], rows["track"], rows["size_bytes"].astype(np.int64))
    return sums


def _medians(rows: Rows, tracks: Iterable[int]) -> Iterator[tuple[int, float]]:
    """Yield (track, median of its latest durations in nanoseconds) for each track that has rows."""
    for track in tracks:
        durations = rows["duration"][rows["track"] == track][-MEDIAN_ROWS:]
        if len(durations):
            yield track, float(np.median(durations))


def aligned(rows: Rows, clock: MachineClock) -> Rows:
    """Return a machine's rows with times in the reader's clock."""
    rows = rows.copy()
    rows["start"] = clock.of_reader(rows["start"])
    return rows


def events_of(machine: str, tracks: Sequence[Track], rows: Rows) -> list[TraceEvent]:
    return [
        TraceEvent(
            machine,
            track.stage,
            sequence,
            track.kind,
            start,
            start + duration,
            size_bytes,
            track.peer,
            track.tensor,
            value,
            track.detail,
        )
        for _, start, duration, sequence, size_bytes, number, value in rows.tolist()
        for track in (tracks[number],)
    ]


def checked(seen: Observation, since: int | None) -> Observation:
    """Return an untrusted observation after validation; raise `ProtocolError` if no recorder would return it."""
    if unknown := {track.kind for track in seen.tracks}.difference(KINDS):
        raise ProtocolError(f"events of the unknown kind {min(unknown)[:80]!r}: install the same version on both sides")
    if len(seen.rows) % ROWS.itemsize or len(seen.rows) > RING_ROWS * ROWS.itemsize:
        raise ProtocolError(f"{len(seen.rows)} bytes of events are not up to {RING_ROWS} rows of {ROWS.itemsize}")
    if not 0 <= seen.processor_seconds < math.inf or seen.newest < (since or 0):
        raise ProtocolError(f"{seen.processor_seconds} s of processor time, or {seen.newest} events, are impossible")
    rows = seen.table()
    numbers = rows["number"]
    is_ordered = bool((numbers[1:] > numbers[:-1]).all())
    first = seen.newest if since is None else since
    if len(rows) and not (is_ordered and int(numbers[0]) > first and int(numbers[-1]) <= seen.newest):
        raise ProtocolError(f"events are not numbered from {first + 1} up to {seen.newest}")
    if len(rows) and not (int(rows["track"].max()) < len(seen.tracks)):
        raise ProtocolError(f"an event belongs to track {rows['track'].max()}, and there are {len(seen.tracks)}")
    times = (rows["start"], rows["duration"])
    is_possible = all(
        int(time.min(initial=0)) >= 0 and int(time.max(initial=0)) <= seen.clock_nanoseconds for time in times
    )
    if not is_possible or bool((rows["start"] > seen.clock_nanoseconds - rows["duration"]).any()):
        raise ProtocolError("an event ends before it starts, or after the machine's own clock")
    return seen


@dataclass(frozen=True, slots=True)
class Measured:
    """The tracks of one deployment on one machine; ``model`` and ``deployment`` are names."""

    model: str
    deployment: str
    machine: str
    tracks: tuple[Track, ...]
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Totals of a stage since it was loaded.

    ``wait_seconds`` is how long its machine was idle until an input of the stage arrived, ``block_seconds`` until its
    outputs had room. ``receive_seconds`` and ``send_seconds`` are the duration of transfers over links, including
    decoding and encoding; they overlap with computing. ``bytes_received`` and ``bytes_sent`` are encoded sizes.
    """

    name: str
    machine: str
    micro_batches: int = 0
    compute_seconds: float = 0.0
    median_compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    block_seconds: float = 0.0
    receive_seconds: float = 0.0
    send_seconds: float = 0.0
    bytes_received: int = 0
    bytes_sent: int = 0


def statistics_of(machine: str, stages: Sequence[str], tracks: Iterable[Track]) -> dict[str, StageStatistics]:
    """Return the statistics of a machine's stages, by name, from the totals of its tracks."""
    by_stage: Mapping[str, list[Track]] = {name: [] for name in stages}
    for track in tracks:
        if track.stage in by_stage:
            by_stage[track.stage].append(track)
    return {name: _stage_statistics(machine, name, own) for name, own in by_stage.items()}


def _stage_statistics(machine: str, stage: str, tracks: Sequence[Track]) -> StageStatistics:
    def seconds(kind: str) -> float:
        return sum(track.seconds for track in tracks if track.kind == kind)

    def size_bytes(kind: str) -> int:
        return sum(track.size_bytes for track in tracks if track.kind == kind)

    computed = next((track for track in tracks if track.kind == COMPUTE), Track(COMPUTE))
    return StageStatistics(
        name=stage,
        machine=machine,
        micro_batches=computed.events,
        compute_seconds=computed.seconds,
        median_compute_seconds=computed.median_nanoseconds * 1e-9,
        wait_seconds=seconds(WAIT),
        block_seconds=seconds(BLOCK),
        receive_seconds=seconds(RECEIVE),
        send_seconds=seconds(SEND),
        bytes_received=size_bytes(RECEIVE),
        bytes_sent=size_bytes(SEND),
    )
