"""What both ends of a link share: closing, what is said next, and knowing whether the other end lives.

A connection whose cable is cut, or whose other end stands still, stays open for minutes. gRPC's own pings would tell,
but they wait behind the data in the socket's buffer, so that a slow link would seem dead. Here each end says something
at least once in a beat, and whatever arrives counts as life. Only a worker does not ask that of a client, where a
single call in C may keep Python's lock for longer, and nothing but gRPC can answer meanwhile.

A link is carried in one of two ways. A stream (gRPC) has a thread of its own that waits for what `frames` says next,
also where tensors go another way beside it (`nccl`). A
`Carrier` (shared memory, one process) takes a message at once, in the thread of whoever had something to say: that one
calls `flush` after it has let go of the station's lock, which spares waking another thread. What leaves a GPU has a
thread of its own there, too (`hand_over`), since the computing thread should not wait for copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from rpc_runtime.program.routes import Route
from rpc_runtime.program.runner import Bytes
from rpc_runtime.transports.nccl_device import MakeNccl
from rpc_runtime.transports.slots import Slot
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame

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

    def transferred(self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int) -> None:
        """A whole tensor has (``kind`` is SEND or RECEIVE), from ``start`` to ``end`` in nanoseconds, in some bytes."""

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Gets each tensor that has come, in order; calls ``release`` once, with the lock held, when it is consumed."""

    def room_locked(self) -> None:
        """An outgoing link has room for one more micro-batch of a tensor."""

    def starves_locked(self, route: Route, sequence: int) -> bool:
        """Whether a micro-batch that has just come is one of those for want of which nothing is done here."""


Place = Callable[[Route, int], Bytes | Slot]
"""Where a tensor of a route may lie; it has as many places, numbered from 0, as its queue is deep. Of a GPU it is the
slot itself, else the host's memory for one."""


class Carrier(Protocol):
    """Carries the headers of a link whose tensors lie in memory that both ends see."""

    def send(self, header: bytes) -> None:
        """Hands a frame without payload to the other end. Does not raise: what breaks the link ends it elsewhere."""

    def fail(self, why: str) -> None:
        """Ends the link for what has failed at this end."""


class Message(Protocol):
    """Something that an end of a link says: to a stream as frames, or to a carrier."""

    def frames(self) -> Iterator[bytes]: ...

    def hand_to(self, carrier: Carrier) -> None: ...


class LinkEnd:
    """One end of a link. ``_wake_locked`` is called when there may be something to say.

    If it is ``patient``, the other end may be silent as long as its connection lives. ``nccl`` is with the station's
    GPU; None: its stages are on no GPU.
    """

    def __init__(self, station: Station, routes: Sequence[Route], nccl: MakeNccl | None, *, patient: bool) -> None:
        self.nccl = nccl
        self.station = station
        self.routes = tuple(routes)
        self._lock = station.lock
        self._wake = threading.Condition(station.lock)
        self._closed = False
        self._end = threading.Event()
        self._patient = patient
        self._heard: float | None = None  # nobody is late before the first word
        self._carrier: Carrier | None = None
        self._has_places = False
        self._handing = False
        self.apart = False
        """Whether what a carrier takes is handed to it by `hand_over`, and not by `flush`."""

    def receive(self, frame: Frame) -> None:
        """Takes what the other end says. For one thread.

        Raises:
            ProtocolError: it is not what may come next.
        """
        raise NotImplementedError

    def _begin_locked(self) -> Message | None:
        """What is to be said next."""
        raise NotImplementedError

    def _said_locked(self, message: Message) -> None:
        """A message has left."""

    def frames(self) -> Iterator[bytes]:
        """What this end says in a stream, until it is closed. For one thread.

        Raises:
            WorkerUnavailableError: the other end has been silent for too long.
        """
        while True:
            with self._lock:
                while (message := self._begin_locked()) is None and not self._closed:
                    begin = time.monotonic()
                    if not self._wake.wait(BEAT_SECONDS):
                        self.require_life(begin)
                        break
                if self._closed:
                    return
            if message is None:
                yield HEARTBEAT
                continue
            yield from message.frames()
            with self._lock:
                if self._closed:
                    return
                self._said_locked(message)

    def carry(self, carrier: Carrier | None, place: Place) -> None:
        """From now on messages go to a carrier, or None: to a stream, and tensors to their places. Before the first
        one."""
        with self._lock:
            self._carrier, self._has_places = carrier, True
        self.flush()

    def hand_over(self, carrier: Carrier) -> None:
        """Hands to the carrier what there is to say, in the place of `flush`, until the link is closed. For one
        thread."""
        message: Message | None = None
        while True:
            with self._lock:
                if message is not None and not self._closed:
                    self._said_locked(message)
                while (message := self._begin_locked()) is None and not self._closed:
                    self._wake.wait(BEAT_SECONDS)
                if self._closed or message is None:
                    return
            if not self._handed(message, carrier):
                return

    def _handed(self, message: Message, carrier: Carrier) -> bool:
        """Whether it could be: what a GPU copies may fail."""
        try:
            message.hand_to(carrier)
        except Exception as error:
            carrier.fail(str(error))
            return False
        return True

    def flush(self) -> None:
        """Hands to the carrier what there is to say. For any thread, without the lock; for streams it does nothing."""
        carrier = self._carrier
        if carrier is None or self.apart:
            return
        with self._lock:
            if self._handing or self._closed:
                return  # whoever hands something over looks again before ending
            message = self._begin_locked()
            self._handing = message is not None
        while message is not None:
            if not self._handed(message, carrier):
                return
            with self._lock:
                if self._closed:
                    return
                self._said_locked(message)
                message = self._begin_locked()
                self._handing = message is not None

    def require_life(self, begin: float) -> None:
        """Called after waiting in vain for a beat, since ``begin`` of the monotonic clock.

        Raises:
            WorkerUnavailableError: nothing has arrived for ``SILENCE_SECONDS``.
        """
        here = time.monotonic()
        if self._heard is None or self._patient:
            return
        if here - begin > 2 * BEAT_SECONDS:  # this process itself stood still: be fair to the other one
            self._heard = here
        if here - self._heard > SILENCE_SECONDS:
            raise WorkerUnavailableError(
                f"nothing has arrived for {SILENCE_SECONDS:g} seconds: the connection is dead, or its other end "
                "stands still"
            )

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

    def _wake_locked(self) -> None:
        if self._carrier is None or self.apart:  # else nobody waits: `flush` says it
            self._wake.notify()

    @property
    def closed(self) -> bool:
        return self._closed

    def wait_closed(self) -> None:
        self._end.wait()

    def close_locked(self) -> None:
        self._closed = True
        self._end.set()
        self._wake.notify_all()

    def close(self) -> None:
        with self._lock:
            self.close_locked()
