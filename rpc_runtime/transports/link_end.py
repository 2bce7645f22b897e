"""What both ends of a link share: closing, and knowing whether the other end lives.

A connection whose cable is cut, or whose other end stands still, stays open for minutes. gRPC's own pings would tell,
but they wait behind the data in the socket's buffer, so that a slow link would seem dead. Here each end says something
at least once in a beat, and whatever arrives counts as life. Only a worker does not ask that of a client, where a
single call in C may keep Python's lock for longer, and nothing but gRPC can answer meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tvm_split.rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from tvm_split.rpc_runtime.program.machine_plan import PlannedRoute
from tvm_split.rpc_runtime.wire.framing import Frame, FrameKind, control_frame

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 4.0
"""So long takes the longest frame, 1 MiB, over the slowest link that is meant to work, 256 KiB/s."""
HEARTBEAT = control_frame(FrameKind.HEARTBEAT)


class Station(Protocol):
    """What a machine's links end at: it shares one ``lock`` with them, and they tell it what moves."""

    @property
    def lock(self) -> threading.Lock: ...

    def moved(self) -> None:
        """A tensor, or a part of one, has come or gone."""

    def transferred(self, kind: str, route: PlannedRoute, sequence: int, start: int, end: int) -> None:
        """A whole tensor has (``kind`` is SEND or RECEIVE), from ``start`` to ``end`` in nanoseconds."""

    def deliver(self, route: PlannedRoute, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Gets each tensor that has come, in order; calls ``release`` once, with the lock held, when it is consumed."""

    def room_locked(self) -> None:
        """An outgoing link has room for one more micro-batch of a tensor."""


class LinkEnd:
    """One end of a link. ``_wake`` is notified, with the lock held, when there may be something to say.

    If it is ``patient``, the other end may be silent as long as its connection lives.
    """

    def __init__(self, station: Station, *, patient: bool) -> None:
        self._station = station
        self._lock = station.lock
        self._wake = threading.Condition(station.lock)
        self._closed = False
        self._patient = patient
        self._heard: float | None = None  # nobody is late before the first word

    def frames(self) -> Iterator[bytes]:
        """What this end says, until it is closed. For one thread.

        Raises:
            WorkerUnavailableError: the other end has been silent for too long.
        """
        raise NotImplementedError

    def receive(self, frame: Frame) -> None:
        """Takes what the other end says. For one thread.

        Raises:
            ProtocolError: it is not what may come next.
        """
        raise NotImplementedError

    def _takes(self, frame: Frame, kind: FrameKind) -> bool:
        """Notes that the other end lives; whether its frame is more than a heartbeat.

        Raises:
            ProtocolError: it is neither that nor of ``kind``.
        """
        self._heard = time.monotonic()
        if frame.kind is FrameKind.HEARTBEAT:
            return False
        if frame.kind is not kind:
            raise ProtocolError(f"expected a {kind.name}, got a frame of kind {frame.kind.name}")
        return True

    def _rest_locked(self) -> bool:
        """Waits until there may be something to say; whether a beat has passed instead, so that a heartbeat is due.

        Raises:
            WorkerUnavailableError: nothing has arrived for ``SILENCE_SECONDS``.
        """
        begin = time.monotonic()
        if self._wake.wait(BEAT_SECONDS):
            return False
        here = time.monotonic()
        if self._heard is not None and not self._patient:
            if here - begin > 2 * BEAT_SECONDS:  # this process itself stood still: be fair to the other one
                self._heard = here
            if here - self._heard > SILENCE_SECONDS:
                raise WorkerUnavailableError(
                    f"nothing has arrived for {SILENCE_SECONDS:g} seconds: the connection is dead, or its other end "
                    "stands still"
                )
        return True

    def close_locked(self) -> None:
        self._closed = True
        self._wake.notify_all()

    def close(self) -> None:
        with self._lock:
            self.close_locked()
