"""The two ends of a link, without any network: queues, credits, and the frames that go out and come in.

A link carries all tensors that go from one machine to another. Each tensor has its own queue and its own credits: the
receiver grants one per micro-batch it has consumed, and the sender starts a tensor only if the receiver has room for
it. So a receiver never blocks, and a tensor that must wait never holds up another one on the same link. How many may be
under way grows where a link's latency makes both ends wait: `credit_window`.

Locks: everything of one deployment on one machine shares one lock; methods named ``*_locked`` expect it to be held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tvm_split.rpc_runtime.errors import ProtocolError
from tvm_split.rpc_runtime.program.interface import Bytes
from tvm_split.rpc_runtime.program.machine_plan import PlannedRoute
from tvm_split.rpc_runtime.program.measurements import RECEIVE, SEND, now
from tvm_split.rpc_runtime.program.program import CLIENT, TensorSpec
from tvm_split.rpc_runtime.transports.credit_window import ReceiveWindow, SendWindow, most_more
from tvm_split.rpc_runtime.transports.link_end import HEARTBEAT, LinkEnd, Station
from tvm_split.rpc_runtime.wire.framing import (
    Frame,
    FrameFlag,
    FrameKind,
    credit_depth,
    credit_frame,
    tensor_frames,
)

OUTBOX = 2
"""Micro-batches of a tensor that wait at the sender: one on its way to the wire, one behind it."""


@dataclass
class _Sending:
    route: PlannedRoute
    window: SendWindow
    queue: deque[tuple[int, Any]] = field(default_factory=deque)


def _depths(route: PlannedRoute) -> tuple[int, int]:
    """How many micro-batches may be under way at first, and at most."""
    return route.queue_depth, route.queue_depth + most_more(route.tensor.size_bytes)


class OutgoingLink(LinkEnd):
    """The sending end. ``as_bytes`` gives a value's content as a flat array of bytes."""

    def __init__(self, station: Station, routes: Sequence[PlannedRoute], as_bytes: Callable[[Any], Bytes]) -> None:
        super().__init__(station, patient=any(route.destination == CLIENT for route in routes))
        self._by_name = {route.tensor.name: _Sending(route, SendWindow(*_depths(route))) for route in routes}
        self._by_index = {sending.route.tensor_index: sending for sending in self._by_name.values()}
        self._as_bytes = as_bytes

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def room_locked(self, tensor: str) -> int:
        """For how many more micro-batches of a tensor ``put_locked`` has a place."""
        return max(0, OUTBOX - len(self._by_name[tensor].queue))

    def put_locked(self, tensor: str, sequence: int, value: Any) -> None:
        """Queues a tensor, whose content must not change any more. There must be room."""
        self._by_name[tensor].queue.append((sequence, value))
        self._wake.notify()

    def frames(self) -> Iterator[bytes]:
        """Tensors, as queues and credits allow."""
        while True:
            with self._lock:
                while (sending := self._next_locked()) is None and not self._closed:
                    if self._rest_locked():
                        break
                if self._closed:
                    return
                if sending is not None:
                    sequence, value = sending.queue[0]
                    start = now()
                    flags = FrameFlag.WAITED if sending.window.start(start) else FrameFlag.NONE
            if sending is None:
                yield HEARTBEAT
                continue
            data = self._as_bytes(value)
            for frame in tensor_frames(sending.route.tensor_index, sequence, data, flags):
                yield frame  # gRPC asks for the next frame when the network has taken this one
                self._station.moved()
            self._station.transferred(SEND, sending.route, sequence, start, now())
            del value, data
            with self._lock:
                if self._closed:
                    return
                sending.queue.popleft()
                self._station.room_locked()

    def _next_locked(self) -> _Sending | None:
        """The oldest micro-batch that may go: what lags behind is what somebody waits for. Notes who lacks a credit."""
        ready = []
        for sending in filter(lambda each: each.queue, self._by_name.values()):
            if sending.window.may_start:
                ready.append(sending)
            else:
                sending.window.wait()
        return min(ready, key=lambda sending: sending.queue[0][0], default=None)

    def receive(self, frame: Frame) -> None:
        """Takes a credit, which a receiver could grant, or a heartbeat."""
        if not self._takes(frame, FrameKind.CREDIT):
            return
        with self._lock:
            sending = self._by_index.get(frame.tensor)
            if sending is None:
                raise ProtocolError(f"a credit for tensor number {frame.tensor}, which this link does not carry")
            window, depth = sending.window, credit_depth(frame)
            if not window.is_possible(frame.sequence, depth):
                raise ProtocolError(
                    f"a credit for {frame.sequence} micro-batches of tensor {sending.route.tensor.name!r} and {depth} "
                    f"under way, when {window.started} were sent, {window.credited} were credited before, and "
                    f"{window.depth} to {window.largest} may be under way"
                )
            window.credit(frame.sequence, depth, now())
            self._wake.notify()

    def close_locked(self) -> None:
        for sending in self._by_name.values():
            sending.queue.clear()
        super().close_locked()


class Slot(Protocol):
    """Memory for one tensor: ``data`` to write it to, ``value`` to hand on."""

    @property
    def data(self) -> Bytes: ...

    @property
    def value(self) -> Any: ...


@dataclass
class _Receiving:
    route: PlannedRoute
    window: ReceiveWindow
    free: list[Slot] = field(default_factory=list)


class IncomingLink(LinkEnd):
    """The receiving end, which hands each complete tensor to its station.

    When that releases it, a credit is granted; with ``reuse``, the memory from ``allocate`` is then taken again.
    """

    def __init__(
        self, station: Station, routes: Sequence[PlannedRoute], allocate: Callable[[TensorSpec], Slot], *, reuse: bool
    ) -> None:
        super().__init__(station, patient=any(route.source == CLIENT for route in routes))
        self._receiving = {route.tensor_index: _Receiving(route, ReceiveWindow(*_depths(route))) for route in routes}
        self._allocate = allocate
        self._reuse = reuse
        self._current: tuple[_Receiving, Slot, int] | None = None
        self._position = 0

    def receive(self, frame: Frame) -> None:
        """Takes a frame with a tensor or a part of one, or a heartbeat."""
        if not self._takes(frame, FrameKind.TENSOR):
            return
        if self._current is None:
            self._current = self._begin(frame)
            self._position = 0
        receiving, slot, start = self._current
        name, total = receiving.route.tensor.name, receiving.route.tensor.size_bytes
        sequence = receiving.route.when.nth(receiving.window.arrived)
        expected = (receiving.route.tensor_index, sequence, self._position, total)
        got = (frame.tensor, frame.sequence, frame.offset, frame.total)
        if got != expected:
            raise ProtocolError(
                f"tensor {name!r}: (index, sequence, offset, size in bytes) should be {expected}, they are {got}"
            )
        end = self._position + len(frame.payload)
        slot.data[self._position : end] = memoryview(frame.payload)
        self._position = end
        self._station.moved()
        if end < total:
            return
        self._current = None
        receiving.window.arrived += 1
        self._station.transferred(RECEIVE, receiving.route, sequence, start, now())
        self._station.deliver(receiving.route, sequence, slot.value, partial(self._release_locked, receiving, slot))

    def _begin(self, frame: Frame) -> tuple[_Receiving, Slot, int]:
        start = now()
        receiving = self._receiving.get(frame.tensor)
        if receiving is None:
            raise ProtocolError(f"tensor number {frame.tensor} does not travel on this link")
        with self._lock:
            window = receiving.window
            if not window.may_arrive:
                raise ProtocolError(
                    f"micro-batch {frame.sequence} of tensor {receiving.route.tensor.name!r} came without a credit: "
                    f"{window.arrived - window.consumed} are waiting already"
                )
            if window.begin(waited=FrameFlag.WAITED in frame.flags):
                self._wake.notify()
            free = receiving.free.pop() if receiving.free else None
        return receiving, self._allocate(receiving.route.tensor) if free is None else free, start

    def _release_locked(self, receiving: _Receiving, slot: Slot) -> None:
        receiving.window.consumed += 1
        if self._reuse and not self._closed:
            receiving.free.append(slot)
        self._wake.notify()

    def frames(self) -> Iterator[bytes]:
        """Credits, as tensors are consumed."""
        while True:
            with self._lock:
                while not (changed := self._uncredited_locked()) and not self._closed:
                    if self._rest_locked():
                        break
                if self._closed:
                    return
                frames = [credit_frame(each.route.tensor_index, *each.window.announce()) for each in changed]
            yield from frames or [HEARTBEAT]

    def _uncredited_locked(self) -> list[_Receiving]:
        return [each for each in self._receiving.values() if each.window.announced < each.window.granted]

    def close_locked(self) -> None:
        for receiving in self._receiving.values():
            receiving.free.clear()
        super().close_locked()
