"""The two ends of a link, without any network: queues, credits, and the frames sent and received.

A link carries all tensors from one machine to another. Each tensor has its own queue and credits: the receiver grants
one credit per micro-batch it has consumed, and the sender starts a tensor only if the receiver has room for it. So a
receiver never blocks, and a waiting tensor never blocks another one on the same link. The number of micro-batches in
flight grows if the latency of the link makes both ends wait (`credits`).

Tensors in frames are encoded by the route's codec in the sending thread and decoded in the receiving thread, while the
owner computes. Tensors in shared slots are not encoded, because memory is not the bottleneck.

Locks: all objects of one deployment on one machine share one lock; methods named ``*_locked`` require it to be held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.events import RECEIVE, SEND, now
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import Bytes
from rpc_runtime.transports.carrier import MakeSlot, Slot
from rpc_runtime.transports.credits import Grants, Outbox, ReceiveWindow, SendItem, SendWindow
from rpc_runtime.transports.link_end import LinkEnd, LinkOwner, LinkTensor, Message
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts
from rpc_runtime.wire.framing import (
    JOINED_BYTES,
    Frame,
    FrameFlag,
    FrameKind,
    credit_frame,
    credit_of,
    shared_tensor_frame,
    tensor_frames,
)

_Sending = LinkTensor[SendWindow]
"""An outgoing tensor."""


class OutgoingLink(LinkEnd):
    """The sending end of a link. ``as_bytes`` returns a value's content as a flat array of bytes."""

    receives = False

    def __init__(
        self,
        owner: LinkOwner,
        routes: Sequence[Route],
        as_bytes: Callable[[Any], Bytes],
        make_slot: MakeSlot,
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
    ) -> None:
        super().__init__(owner, routes, make_slot, timeouts)
        self._outbox = Outbox(routes)
        self._tensors: dict[int, _Sending] = {
            route.index: _Sending(route, self._outbox.window(route.index)) for route in routes
        }
        self._as_bytes = as_bytes

    def has_room_locked(self, tensor: str) -> bool:
        """Return whether ``put_locked`` may queue one more micro-batch of a tensor."""
        return self._outbox.has_room(tensor)

    def put_locked(self, tensor: str, sequence: int, value: Any) -> None:
        """Queue a tensor, which must not change until it is sent. Requires room; the caller then calls ``flush``."""
        self._outbox.put(tensor, sequence, value)
        self._wake_locked()

    def _next_locked(self) -> Message | None:
        if not self._outbox.queued:
            return None
        start = now()
        items: list[SendItem] = []
        size = 0
        while size < JOINED_BYTES and (item := self._outbox.next(start)) is not None:
            items.append(item)
            size += JOINED_BYTES if self._has_slots else self._tensors[item.tensor_index].route.tensor.size_bytes
        if not items:
            return None
        sizes: list[int] = []
        frames = chain.from_iterable([self._frames_of(item, sizes) for item in items])
        return Message(frames, partial(self._sent_locked, items, sizes, start))

    def _frames_of(self, item: SendItem, sizes: list[int]) -> Iterator[bytes]:
        """Return the frames of a tensor, which append its size on the wire: smaller if a codec compressed it."""
        sending = self._tensors[item.tensor_index]
        if not sending.slots:
            return self._tensor_frames(sending, item, sizes)
        index, size_bytes = sending.free.pop(0), sending.route.tensor.size_bytes
        sizes.append(size_bytes)
        header = shared_tensor_frame(item.tensor_index, item.sequence, index, size_bytes)
        return sending.slots[index].send(item.value, header)

    def _tensor_frames(self, sending: _Sending, item: SendItem, sizes: list[int]) -> Iterator[bytes]:
        data = sending.codec.to_wire(self._as_bytes(item.value))
        sizes.append(data.size)
        flags = FrameFlag.WAITED if item.waited else FrameFlag.NONE
        for frame in tensor_frames(item.tensor_index, item.sequence, data, flags):
            yield frame  # the next frame is requested after the network has taken this one
            self.owner.moved()

    def _sent_locked(self, items: Sequence[SendItem], sizes: Sequence[int], start: int) -> None:
        for item, size_bytes in zip(items, sizes, strict=True):
            sending = self._tensors[item.tensor_index]
            under_way = sending.window.started - sending.window.credited
            self.owner.transferred(SEND, sending.route, item.sequence, start, now(), size_bytes, under_way)
            self._outbox.sent(item.tensor_index)
        self.owner.room_locked()

    def receive(self, frame: Frame) -> None:
        """Handle a credit, after validating it, or a heartbeat."""
        if not self._accepts(frame, FrameKind.CREDIT):
            return
        with self._lock:
            sending = self._tensors.get(frame.tensor)
            if sending is None:
                raise ProtocolError(f"a credit for tensor number {frame.tensor}, which this link does not carry")
            window, (depth, freed) = sending.window, credit_of(frame)
            free = sorted((*sending.free, *freed))
            held = window.started - frame.sequence
            fits = (
                len(free) == len({*free}) == (depth - held if self._has_slots else 0) and max(free, default=0) < depth
            )
            if not (window.is_possible(frame.sequence, depth) and fits):
                raise ProtocolError(
                    f"a credit for {frame.sequence} micro-batches of tensor {sending.route.tensor.name!r} and {depth} "
                    f"under way, with the slots {free} free, does not fit to {window.started} sent, {window.credited} "
                    f"credited before, and {window.depth} to {window.largest} that may be under way"
                )
            sending.free.extend(freed)
            window.credit(frame.sequence, depth, now())
            self._wake_locked()
        self.flush()
        self.owner.wake()

    def close_locked(self) -> None:
        self._outbox.clear()
        super().close_locked()


@dataclass(slots=True)
class _Receiving(LinkTensor[ReceiveWindow]):
    """An incoming tensor.

    ``freed`` are the indices of slots that the next credit reports: not in the order in which they were filled, if
    micro-batches go to different stages. ``buffers`` are slots in this end's own memory.
    """

    freed: list[int] = field(default_factory=list)
    buffers: list[Slot] = field(default_factory=list)


@dataclass(slots=True)
class _Arriving:
    """A tensor of which ``position`` of ``total`` bytes arrived in ``memory``: its slot, or a buffer to decode from."""

    receiving: _Receiving
    slot: Slot
    start: int
    total: int
    memory: Bytes
    position: int = 0


class IncomingLink(LinkEnd):
    """The receiving end of a link, which delivers each complete tensor to its owner.

    A credit is granted when the owner releases the tensor; with ``reuse``, its memory is then reused. Else values are
    arrays.
    """

    receives = True

    def __init__(
        self,
        owner: LinkOwner,
        routes: Sequence[Route],
        make_slot: MakeSlot,
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
        *,
        reuse: bool,
    ) -> None:
        super().__init__(owner, routes, make_slot, timeouts)
        self._grants = Grants(routes)
        self._tensors: dict[int, _Receiving] = {
            route.index: _Receiving(route, self._grants.window(route.index)) for route in routes
        }
        self._reuse = reuse
        self._current: _Arriving | None = None

    def receive(self, frame: Frame) -> None:
        """Handle a frame: a tensor, a part of one, the header of one in a shared slot, or a heartbeat."""
        if not self._accepts(frame, FrameKind.TENSOR):
            return
        if frame.is_shared != self._has_slots:
            raise ProtocolError("a tensor came in memory that is not shared, or in a frame although it is")
        if frame.is_shared:
            self._take_shared(frame)
        else:
            self._take_part(frame)

    def _take_shared(self, frame: Frame) -> None:
        start, index = now(), frame.offset
        with self._lock:
            if self._closed:
                return
            receiving = self._count_in_locked(frame)
            if index not in receiving.free:
                name = receiving.route.tensor.name
                raise ProtocolError(f"tensor {name!r} came in slot {index}, which is not free")
            receiving.free.remove(index)
            slot = receiving.slots[index]
        sequence = self._sequence_of(receiving, frame, index, receiving.route.tensor.size_bytes)
        slot.wait()
        if not self._reuse:
            slot = Slot(slot.data, slot.value.copy())
        self.owner.moved()
        self._complete(receiving, frame, sequence, slot, index, start)

    def _take_part(self, frame: Frame) -> None:
        if self._current is None:
            self._current = self._begin(frame)
        current = self._current
        if current is None:
            return
        receiving, slot = current.receiving, current.slot
        sequence = self._sequence_of(receiving, frame, current.position, current.total)
        end = current.position + len(frame.payload)
        current.memory[current.position : end] = frame.payload
        current.position = end
        self.owner.moved()
        if current.position < current.total:
            return
        self._current = None
        if current.memory is not slot.data:
            receiving.codec.from_wire(current.memory, slot.data)
        self._complete(receiving, frame, sequence, slot, None, current.start)

    def _begin(self, frame: Frame) -> _Arriving | None:
        """Return the tensor that a frame begins, or None if the link is closed."""
        start = now()
        with self._lock:
            if self._closed:
                return None
            receiving = self._count_in_locked(frame)
            slot = receiving.buffers.pop() if receiving.buffers else None
        slot = slot or self.make_slot(receiving.route.tensor)
        whole = receiving.route.tensor.size_bytes
        if 0 < frame.total < whole:  # encoded
            return _Arriving(receiving, slot, start, frame.total, np.empty(frame.total, np.uint8))
        return _Arriving(receiving, slot, start, whole, slot.data)

    def _count_in_locked(self, frame: Frame) -> _Receiving:
        receiving = self._tensors.get(frame.tensor)
        if receiving is None:
            raise ProtocolError(f"tensor number {frame.tensor} is not one of this link")
        window = receiving.window
        if not window.may_arrive:
            raise ProtocolError(
                f"micro-batch {frame.sequence} of tensor {receiving.route.tensor.name!r} came without a credit: "
                f"{window.arrived - window.consumed} are waiting already"
            )
        return receiving

    def _sequence_of(self, receiving: _Receiving, frame: Frame, offset: int, total: int) -> int:
        """Return the sequence number of the next micro-batch, after checking that the frame belongs to it."""
        route = receiving.route
        sequence = route.when.nth(receiving.window.arrived)
        expected = (route.index, sequence, offset, total)
        got = (frame.tensor, frame.sequence, frame.offset, frame.total)
        if got != expected:
            raise ProtocolError(
                f"tensor {route.tensor.name!r}: (index, sequence, offset, size in bytes) should be {expected}, they "
                f"are {got}"
            )
        return sequence

    def _complete(
        self, receiving: _Receiving, last: Frame, sequence: int, slot: Slot, index: int | None, start: int
    ) -> None:
        route, waited = receiving.route, last.flags == FrameFlag.WAITED
        with self._lock:
            starves = waited and receiving.window.may_widen and self.owner.starves_locked(route, sequence)
            window, end = receiving.window, now()
            if self._grants.arrive(route.index, waited, starves):
                self.owner.widened(route, sequence, window.depth)
                self._wake_locked()
            under_way = window.arrived - window.consumed
        release = partial(self._release_locked, receiving, slot, index)
        self.owner.transferred(RECEIVE, route, sequence, start, end, last.total, under_way)
        self.owner.deliver(route, sequence, slot.value, release)
        self.flush()  # a wider window

    def _release_locked(self, receiving: _Receiving, slot: Slot, index: int | None) -> None:
        self._grants.consume(receiving.route.index)
        if index is not None:
            receiving.free.append(index)
            receiving.freed.append(index)
        elif self._reuse and not self._closed:
            receiving.buffers.append(slot)
        self._wake_locked()

    def _next_locked(self) -> Message | None:
        frames = []
        for index, consumed, depth in self._grants.due():
            freed, self._tensors[index].freed = self._tensors[index].freed, []
            frames.append(credit_frame(index, consumed, depth, freed))
        return Message(frames) if frames else None

    def close_locked(self) -> None:
        for receiving in self._tensors.values():
            receiving.buffers.clear()
        super().close_locked()
