"""What both ends of a link share: closing, what is said next, and knowing whether the other end lives.

Each end says something at least once in a beat (`liveness`). Only a worker does not ask that of a client, where a
single call in C may keep Python's lock for longer, and nothing but gRPC can answer meanwhile.

A carrier (`transport`) takes what is to be said in one of two ways. One with a thread of its own waits there for what
`frames` says next. Shared memory takes a message at once by `drain`, in the thread that had something to say: it calls
`flush` after it has let go of the station's lock, which spares waking another thread. What leaves a GPU has a thread of
its own there, too (`serve`), since the computing thread should not wait for copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.program.runner import Bytes
from rpc_runtime.transports.liveness import LinkTimeouts, Liveness
from rpc_runtime.transports.nccl_device import MakeNccl
from rpc_runtime.transports.slots import MakeSlot, Slot
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame

if TYPE_CHECKING:
    from rpc_runtime.transports.transport import Carrier

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


class Message(Protocol):
    """Something that an end of a link says."""

    def frames(self) -> Iterator[bytes]:
        """Its frames, the next one when the one before has left."""
        ...

    def left(self) -> None:
        """Its last frame has left."""
        ...


@dataclass(slots=True)
class Frames:
    """Frames that are made already."""

    ready: list[bytes]

    def frames(self) -> Iterator[bytes]:
        return iter(self.ready)

    def left(self) -> None: ...


class LinkEnd:
    """One end of a link.

    If it is ``patient``, the other end may be silent as long as its connection lives. ``nccl`` is with the station's
    GPU; None: its stages are on no GPU.
    """

    receives: ClassVar[bool]
    """Whether tensors come here."""

    def __init__(
        self,
        station: Station,
        routes: Sequence[Route],
        make_slot: MakeSlot,
        nccl: MakeNccl | None,
        timeouts: LinkTimeouts,
        *,
        patient: bool,
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
        self._patient = patient
        self._liveness = Liveness(timeouts)
        self._carrier: Carrier | None = None
        self._has_slots = False
        self._draining = False
        self._waits = False
        self._also: list[bytes] = []

    @property
    def copies_apart(self) -> bool:
        """Whether what is said waits for copies from a GPU, for which the thread that computes should not wait."""
        return self.nccl is not None and not self.receives

    def slot_over(self, tensor: TensorSpec, memory: Bytes) -> Slot:
        """Memory that both ends see, as a slot of this end."""
        return self._make_slot(tensor, memory)

    def say(self, frame: bytes) -> None:
        """Says a frame of the carrier's own before all else."""
        with self._lock:
            self._also.append(frame)
            self._wake_locked()
        self.flush()

    def receive(self, frame: Frame) -> None:
        """Takes what the other end says. For one thread.

        Raises:
            ProtocolError: it is not what may come next.
        """
        raise NotImplementedError

    def _next_locked(self) -> Message | None:
        """What is to be said next."""
        raise NotImplementedError

    def _said_locked(self, message: Message) -> None:
        """A message has left."""

    def _use_slots(self, route: Route, slots: Sequence[Slot]) -> None:
        """Tensors of a route lie in these slots, which both ends see."""
        raise NotImplementedError

    def open(self, carrier: Carrier) -> None:
        """Says from now on what there is by a carrier, with tensors in its slots, if it has such."""
        for route in self.routes:
            if slots := carrier.slots(route):
                self._use_slots(route, slots)
                self._has_slots = True
        self._carrier = carrier
        carrier.wake()

    def frames(self) -> Iterator[bytes]:
        """What this end says until it is closed, with heartbeats. For one thread, which waits here.

        Raises:
            WorkerUnavailableError: the other end has been silent for too long.
        """
        for message in self._messages():
            if message is None:
                yield HEARTBEAT
            else:
                yield from message.frames()
                message.left()

    def serve(self, send: Callable[[bytes], None]) -> None:
        """Says by ``send`` what there is, until the link is closed. For one thread, which waits here.

        Raises:
            Exception: a tensor cannot be copied, as by a GPU that fails.
        """
        for message in self._messages():
            if message is not None:
                _say(message, send)

    def _messages(self) -> Iterator[Message | None]:
        """What there is to say, until the link is closed; None when there was nothing for a beat."""
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
        """Says by ``send`` what there is now, unless another thread does, which then looks again before it ends.

        Raises:
            Exception: a tensor cannot be copied; the link says no more.
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
        """Tells the carrier that there may be something to say. For any thread, without the lock."""
        if self._carrier is not None:
            self._carrier.wake()

    def _wake_locked(self) -> None:
        """There may be something to say; `flush` comes after."""
        if self._waits:
            self._wake.notify()

    def _begin_locked(self) -> Message | None:
        if self._also:
            frames, self._also = self._also, []
            return Frames(frames)
        return self._next_locked()

    def require_life(self, begin: float) -> None:
        """Called after waiting in vain for a beat, since ``begin`` of the monotonic clock.

        Raises:
            WorkerUnavailableError: nothing has arrived for too long.
        """
        if not self._patient and self._liveness.is_silent(begin):
            raise WorkerUnavailableError(
                f"nothing has arrived for {self.timeouts.silence_seconds:g} seconds: the connection is dead, or its "
                "other end stands still"
            )

    def _takes(self, frame: Frame, kind: FrameKind) -> bool:
        """Notes that the other end lives; whether its frame is more than a heartbeat.

        Raises:
            ProtocolError: it is neither that nor of ``kind``.
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
