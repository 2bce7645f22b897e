"""Base class of both ends of a link: closing, the next message to send, and liveness of the other end.

Each end sends at least one frame per heartbeat interval (`liveness`). A worker does not require this of a client:
there, one call into C may hold the GIL for longer, and only gRPC can answer meanwhile.

A carrier (`transport`) takes messages in one of two ways. A carrier with its own thread iterates over `frames` there.
Shared memory takes them by `drain` in the thread that produced them, which calls `flush` after it released the
station's lock; this avoids waking another thread. Tensors on a GPU have their own thread there as well (`serve`), so
that the computing thread does not wait for copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import CLIENT, Route
from rpc_runtime.program.runner import Bytes
from rpc_runtime.transports.liveness import LinkTimeouts, Liveness
from rpc_runtime.transports.nccl_device import MakeNccl
from rpc_runtime.transports.slots import MakeSlot, Slot
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame

if TYPE_CHECKING:
    from rpc_runtime.transports.transport import Carrier

HEARTBEAT = control_frame(FrameKind.HEARTBEAT)


class Station(Protocol):
    """The machine's side of its links: shares one ``lock`` with them and is notified of transfers."""

    @property
    def lock(self) -> threading.Lock: ...

    def moved(self) -> None:
        """Note that a tensor or a part of one was sent or received."""

    def transferred(self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int) -> None:
        """Record the transfer of a whole tensor: ``kind`` is SEND or RECEIVE, ``start`` and ``end`` are nanoseconds."""

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Take each received tensor in order; call ``release`` once, with the lock held, when it is consumed."""

    def room_locked(self) -> None:
        """Note that an outgoing link has room for one more micro-batch of a tensor."""

    def starves_locked(self, route: Route, sequence: int) -> bool:
        """Return whether this machine was idle because it lacked the micro-batch that has just arrived."""


class Message(Protocol):
    """A message of one end of a link."""

    def frames(self) -> Iterator[bytes]:
        """Yield the frames; the next one is requested after the previous one was sent."""
        ...

    def left(self) -> None:
        """Note that the last frame was sent."""
        ...


@dataclass(slots=True)
class Frames:
    """A message of finished frames."""

    ready: list[bytes]

    def frames(self) -> Iterator[bytes]:
        return iter(self.ready)

    def left(self) -> None: ...


class LinkEnd:
    """One end of a link.

    If the other end is the client, it may send nothing as long as the connection is open. ``nccl`` makes the NCCL
    device of the station's GPU; it is None if the stages run on no GPU.
    """

    receives: ClassVar[bool]
    """Whether this end receives tensors."""

    def __init__(
        self,
        station: Station,
        routes: Sequence[Route],
        make_slot: MakeSlot,
        nccl: MakeNccl | None,
        timeouts: LinkTimeouts,
    ) -> None:
        self.nccl = nccl
        self.station = station
        self.routes = tuple(routes)
        self.timeouts = timeouts
        self._make_slot = make_slot
        self._lock = station.lock
        self._wake = threading.Condition(station.lock)
        self._closed = False
        self._end = threading.Event()
        self._patient = any((route.source if self.receives else route.destination) == CLIENT for route in self.routes)
        self._liveness = Liveness(timeouts)
        self._carrier: Carrier | None = None
        self._has_slots = False
        self._draining = False
        self._waits = False
        self._also: list[bytes] = []

    @property
    def copies_apart(self) -> bool:
        """Whether sending includes copies from a GPU, which the computing thread should not wait for."""
        return self.nccl is not None and not self.receives

    def slot_over(self, tensor: TensorSpec, memory: Bytes) -> Slot:
        """Return a slot of this end over memory that both ends share."""
        return self._make_slot(tensor, memory)

    def say(self, frame: bytes) -> None:
        """Send a frame of the carrier itself, before all other messages."""
        with self._lock:
            self._also.append(frame)
            self._wake_locked()
        self.flush()

    def receive(self, frame: Frame) -> None:
        """Handle a received frame. For one thread.

        Raises:
            ProtocolError: the protocol does not allow this frame now.
        """
        raise NotImplementedError

    def _next_locked(self) -> Message | None:
        """Return the next message to send, or None."""
        raise NotImplementedError

    def _said_locked(self, message: Message) -> None:
        """Note that a message was sent."""

    def _use_slots(self, route: Route, slots: Sequence[Slot]) -> None:
        """Use these slots, which both ends share, for the tensors of a route."""
        raise NotImplementedError

    def open(self, carrier: Carrier) -> None:
        """Start sending through a carrier; tensors use its slots if it has some."""
        for route in self.routes:
            if slots := carrier.slots(route):
                self._use_slots(route, slots)
                self._has_slots = True
        self._carrier = carrier
        carrier.wake()

    def frames(self) -> Iterator[bytes]:
        """Yield the frames to send, heartbeats included, until the link is closed. For one thread; blocks.

        Raises:
            WorkerUnavailableError: nothing was received from the other end for too long.
        """
        for message in self._messages():
            if message is None:
                yield HEARTBEAT
            else:
                yield from message.frames()
                message.left()

    def serve(self, send: Callable[[bytes], None]) -> None:
        """Send all messages by ``send`` until the link is closed. For one thread; blocks.

        Raises:
            Exception: a tensor cannot be copied, for example because the GPU failed.
        """
        for message in self._messages():
            if message is not None:
                _say(message, send)

    def _messages(self) -> Iterator[Message | None]:
        """Yield messages until the link is closed; None after a heartbeat interval without one."""
        while True:
            with self._lock:
                while (message := self._begin_locked()) is None and not self._closed:
                    begin = self._liveness.clock()
                    self._waits = True
                    has_come = self._wake.wait(self.timeouts.beat_seconds)
                    self._waits = False
                    if not has_come:
                        self.require_life(begin)
                        break
                if self._closed:
                    return
            yield message
            if message is not None:
                with self._lock:
                    if self._closed:
                        return
                    self._said_locked(message)

    def drain(self, send: Callable[[bytes], None]) -> None:
        """Send the queued messages by ``send``; if another thread is draining, leave them to that thread.

        Raises:
            Exception: a tensor cannot be copied; the link then sends nothing more.
        """
        with self._lock:
            if self._draining or self._closed:
                return
            message = self._begin_locked()
            self._draining = message is not None
        while message is not None:
            _say(message, send)
            with self._lock:
                if self._closed:
                    return
                self._said_locked(message)
                message = self._begin_locked()
                self._draining = message is not None

    def flush(self) -> None:
        """Notify the carrier that there may be a message. For any thread, without the lock."""
        if self._carrier is not None:
            self._carrier.wake()

    def _wake_locked(self) -> None:
        """Wake the sending thread, because there may be a message. The caller then calls `flush`."""
        if self._waits:
            self._wake.notify()

    def _begin_locked(self) -> Message | None:
        if self._also:
            frames, self._also = self._also, []
            return Frames(frames)
        return self._next_locked()

    def require_life(self, begin: float) -> None:
        """Check liveness after a heartbeat interval without a frame, which began at ``begin`` (monotonic seconds).

        Raises:
            WorkerUnavailableError: nothing was received from the other end for too long.
        """
        if not self._patient and self._liveness.is_silent(begin):
            raise WorkerUnavailableError(
                f"nothing has arrived for {self.timeouts.silence_seconds:g} seconds: the connection is dead, or its "
                "other end stands still"
            )

    def _takes(self, frame: Frame, kind: FrameKind) -> bool:
        """Note that the other end is alive; return whether its frame is not just a heartbeat.

        Raises:
            ProtocolError: the frame is neither a heartbeat nor of ``kind``.
        """
        self._liveness.hear()
        if frame.kind is FrameKind.HEARTBEAT:
            return False
        if frame.kind is not kind:
            raise ProtocolError(f"expected a {kind.name}, got a frame of kind {frame.kind.name}")
        return True

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


def _say(message: Message, send: Callable[[bytes], None]) -> None:
    for frame in message.frames():
        send(frame)
    message.left()
