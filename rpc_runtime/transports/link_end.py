"""Base class of both ends of a link: closing, the next message to send, and liveness of the other end.

A carrier (`carrier`) takes messages in one of two ways. Most carriers iterate over `LinkEnd.frames` in a thread of
their own. The carrier of shared memory calls `LinkEnd.drain` in the thread that has queued a message: when it calls
`flush`, after it has released the owner's lock. This avoids waking another thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from rpc_runtime.program.codecs import CODECS, Codec
from rpc_runtime.program.routes import CLIENT, Route, require_available
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.sleeper import Due, Sleeper, do_due
from rpc_runtime.transports.carrier import Carrier, MakeSlot, Slot
from rpc_runtime.transports.credits import ReceiveWindow, SendWindow
from rpc_runtime.transports.liveness import LinkTimeouts, Liveness
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame, joined

Window = TypeVar("Window", SendWindow, ReceiveWindow)

HEARTBEAT = control_frame(FrameKind.HEARTBEAT)


class Device(Protocol):
    """A machine's GPU, for transports that send from its memory and receive into it."""

    @property
    def calls(self) -> Any:
        """CUDA's calls, `rpc_runtime.execution.cuda_calls.CudaCalls`; transports do not import that package."""

    def library(self, name: str, file: str) -> ctypes.CDLL:
        """Return a library of the system or of pip's ``nvidia-NAME``; raise `WorkerError` if it is not found."""

    def memory(self, tensor: TensorSpec) -> tuple[int, Any]:
        """Allocate memory for a tensor, or raise `WorkerError`; return its address and the value to deliver."""

    def address(self, value: Any) -> int:
        """Return the address of the memory of a value that the owner sends."""


class LinkOwner(Protocol):
    """The object to which a machine's links deliver tensors and report transfers; they share its ``lock``."""

    @property
    def lock(self) -> threading.Lock: ...

    @property
    def device(self) -> Device | None:
        """The GPU that makes the sent tensors and reads the received ones; None if they are in host memory."""

    def moved(self) -> None:
        """Record that a tensor or a part of one was sent or received."""

    def transferred(
        self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int, under_way: int
    ) -> None:
        """Record the transfer of a whole tensor: ``kind`` is SEND or RECEIVE, ``start`` and ``end`` are nanoseconds.

        ``under_way`` is how many of the tensor's micro-batches are then sent and not yet consumed, as far as this end
        knows. Called with or without the lock.
        """

    def widened(self, route: Route, sequence: int, depth: int) -> None:
        """Record that from now on ``depth`` micro-batches of a received tensor may be under way."""

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Take each received tensor in order; call ``release`` once, with the lock held, when it is consumed."""

    def room_locked(self) -> None:
        """Use the room for one more micro-batch of a tensor that a sending link now has."""

    def wake(self) -> None:
        """Wake the threads that can go on after `room_locked`: the caller's last step, without the lock."""

    def starves_locked(self, route: Route, sequence: int) -> bool:
        """Return whether this machine was idle because it lacked the micro-batch that has just arrived."""


class Message(NamedTuple):
    """Frames to send, each requested after the one before it was sent, and a function to call after the last one."""

    frames: Iterable[bytes]
    sent_locked: Callable[[], None] = lambda: None


@dataclass(slots=True)
class LinkTensor(Generic[Window]):
    """A tensor of a link. ``slots`` are those that both ends share, if any; ``free`` the indices of unused ones."""

    route: Route
    window: Window
    codec: Codec = field(init=False)
    slots: list[Slot] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.codec = CODECS[self.route.codec](self.route.tensor)


class LinkEnd(ABC):
    """One end of a link between two machines, or between a machine and the client.

    Each end sends at least one frame per heartbeat interval, and an end that is silent for long counts as dead. A
    worker does not expect heartbeats of the client, in which one call into C may hold the GIL for longer. For
    the client, it relies on gRPC's keepalive pings, which need no GIL to be answered.

    Raises:
        WorkerError: a package that the codec of a route needs is missing in this process.
    """

    receives: ClassVar[bool]
    """Whether this end receives tensors."""
    _tensors: Mapping[int, LinkTensor[Any]]
    """By the index of their route."""

    def __init__(self, owner: LinkOwner, routes: Sequence[Route], make_slot: MakeSlot, timeouts: LinkTimeouts) -> None:
        require_available(routes)
        self.routes = tuple(routes)
        self.timeouts = timeouts
        self.owner = owner
        self.make_slot = make_slot
        self._lock = owner.lock
        self._due: Due = Due()
        self._sender = Sleeper(self._due)
        """The thread that iterates over `frames`."""
        self._closed = False
        self._has_closed = threading.Event()
        ends = {route.source if self.receives else route.destination for route in routes}
        self._liveness = None if CLIENT in ends else Liveness(timeouts)
        self._carrier: Carrier | None = None
        self._has_slots = False
        self._is_draining = False
        self._may_send = True
        """Whether there may be a message that `drain` has not looked for."""
        self._carrier_frames: list[bytes] = []

    def send_now(self, frame: bytes) -> None:
        """Send a frame of the carrier itself, before all other messages."""
        with self._lock:
            self._carrier_frames.append(frame)
            self._wake_locked()
        self.flush()

    @abstractmethod
    def receive(self, frame: Frame) -> None:
        """Handle a received frame. Only one thread may call this.

        Raises:
            ProtocolError: the protocol does not allow this frame now.
        """

    @abstractmethod
    def _next_locked(self) -> Message | None:
        """Return the next message to send, or None."""

    def open(self, carrier: Carrier) -> None:
        """Start sending through a carrier; tensors use its slots if it has some."""
        for tensor in self._tensors.values():
            if slots := carrier.slots(tensor.route):
                tensor.window.largest = tensor.window.depth
                tensor.slots, tensor.free = list(slots), list(range(len(slots)))
                self._has_slots = True
        self._carrier = carrier
        carrier.wake()

    def frames(self) -> Iterator[bytes]:
        """Yield the frames to send, heartbeats included, until the link is closed. Blocks; only one thread may call it.

        Raises:
            WorkerUnavailableError: nothing was received from the other end for too long.
            Exception: a tensor cannot be copied, for example because the GPU failed.
        """
        while True:
            with self._lock:
                message = self._begin_locked()
                if message is None:
                    if self._closed:
                        return
                    self._sender.rest_locked()
            if message is None:
                begin = time.monotonic()
                if self._sender.sleep(self.timeouts.beat_seconds):
                    continue
                self.require_life(begin)
                message = Message((HEARTBEAT,))
            joins = self._carrier is not None and self._carrier.joins_frames
            yield from joined(message.frames) if joins else message.frames
            with self._lock:
                if self._closed:
                    return
                message.sent_locked()
            self.owner.wake()

    def drain(self, send: Callable[[bytes], None]) -> None:
        """Send the queued messages by ``send``; if another thread is draining, leave them to that thread.

        Raises:
            Exception: a tensor cannot be copied; the link then sends nothing more.
        """
        with self._lock:
            self._may_send = False
            if self._is_draining:
                return
            message = self._begin_locked()
            self._is_draining = message is not None
        while message is not None:
            for frame in message.frames:
                send(frame)
            with self._lock:
                if self._closed:
                    return
                message.sent_locked()
                message = self._begin_locked()
                self._is_draining = message is not None
        self.owner.wake()

    def flush(self) -> None:
        """Notify the carrier or the sending thread that there may be a message. For any thread, without the lock."""
        do_due(self._due)
        if self._may_send and self._carrier is not None:
            self._carrier.wake()

    def _wake_locked(self) -> None:
        """Note that there may be a message. The caller then calls `flush`."""
        self._may_send = True
        self._sender.rouse_locked()

    def _begin_locked(self) -> Message | None:
        if self._closed:
            return None
        if self._carrier_frames:
            frames, self._carrier_frames = self._carrier_frames, []
            return Message(frames)
        return self._next_locked()

    def require_life(self, since: float) -> None:
        """Raise if the other end is silent. Call it one heartbeat interval or more after ``since`` (monotonic seconds).

        Raises:
            WorkerUnavailableError: nothing was received from the other end for too long.
        """
        if self._liveness is not None and self._liveness.is_silent(since):
            raise WorkerUnavailableError(
                f"nothing has arrived for {self.timeouts.silence_seconds:g} seconds: the connection is dead, or the "
                "other end is frozen"
            )

    def _accepts(self, frame: Frame, kind: FrameKind) -> bool:
        """Record that the other end is alive; return whether its frame is not just a heartbeat.

        Raises:
            ProtocolError: the frame is neither a heartbeat nor of ``kind``.
        """
        if self._liveness is not None:
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
        self._has_closed.wait()

    def close_locked(self) -> None:
        self._closed = True
        for tensor in self._tensors.values():
            tensor.slots.clear()
        self._has_closed.set()
        self._sender.wake()

    def close(self) -> None:
        with self._lock:
            self.close_locked()
