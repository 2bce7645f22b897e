"""Places of a link in the memory of its receiver's GPU, into which the sender's GPU writes: CUDA IPC, on one host.

They take the place of shared memory where a link asks for it, over the same socket and with the same credits. The
receiver makes memory of its GPU for each place, and sends a handle of each beside the memory of the host; the sender
opens them, or says why it cannot, and then the link has the memory of the host.

    receiver ── a sealed memfd, the handles, and the end of a pipe ──▶ sender
    sender ── "device", or why not ──▶ receiver

Memory that another process has open must not be freed (CUDA Runtime API 13.0, ``cudaIpcOpenMemHandle``). So the sender
keeps the end of the pipe until it has closed all handles, or is dead, and the receiver keeps the memory that long.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tvm_split.rpc_runtime.errors import ProtocolError, WorkerError
from tvm_split.rpc_runtime.program.machine_plan import PlannedRoute
from tvm_split.rpc_runtime.program.program import TensorSpec
from tvm_split.rpc_runtime.transports.nccl_device import Nccl
from tvm_split.rpc_runtime.transports.slots import Slot
from tvm_split.rpc_runtime.wire.foreign_text import MAXIMUM_LETTERS, cleaned
from tvm_split.rpc_runtime.wire.framing import MAXIMUM_TEXT_BYTES

HANDLE_BYTES = 64
"""``CUDA_IPC_HANDLE_SIZE``."""
MOST_PLACES = 1024
"""A message of a unix socket takes some three times as many handles."""
ONLY_HOST, DEVICE = b"memory", b"device"
NO_DEVICE = "its stages are on no GPU"


class DeviceExchange(Protocol):
    """What a station's GPU can do for a link, each raising a `WorkerError` where it cannot."""

    def own_slot(self, tensor: TensorSpec) -> tuple[bytes, Slot]:
        """Memory of this GPU that another process may open by the bytes: `HANDLE_BYTES`."""

    def open_slots(self, opened: Sequence[tuple[TensorSpec, bytes]], shut: Callable[[], object]) -> list[Slot]:
        """Slots to be filled in another process's memory; ``shut`` is called once, when that was closed, or none of it
        could be opened. It is closed when nobody has any of the slots."""

    def nccl(self) -> Nccl:
        """Its library is loaded by the first who asks."""


class OwnDeviceMemory:
    """What a link's receiver makes in its GPU's memory, for a sender that asks for it.

    Raises:
        WorkerError: it cannot.
        OSError: there can be no pipe.
    """

    def __init__(self, routes: Sequence[PlannedRoute], device: DeviceExchange) -> None:
        count = _count(routes)
        if count > MOST_PLACES:
            raise WorkerError(f"the link has {count} places, and {MOST_PLACES} at most may lie on a GPU")
        made = [[device.own_slot(route.tensor) for _ in range(route.queue_depth)] for route in routes]
        self.message = DEVICE + b"".join(handle for places in made for handle, _ in places)
        self._slots = {
            route.tensor_index: [slot for _, slot in places] for route, places in zip(routes, made, strict=True)
        }
        self._end, self.others_end = os.pipe2(os.O_CLOEXEC)
        self._close = [weakref.finalize(self, os.close, end) for end in (self._end, self.others_end)]

    def place(self, route: PlannedRoute, number: int) -> Slot:
        return self._slots[route.tensor_index][number]

    def sent(self) -> None:
        """The other process has the handles, and its end of the pipe: from now on this stays until it lets go of them.

        That has no deadline, since to free the memory before would be wrong.
        """
        self._close[1]()
        threading.Thread(target=self._wait_unused, name="device-memory", daemon=True).start()

    def _wait_unused(self) -> None:
        while os.read(self._end, 1):  # nothing but its end counts
            pass


class OpenPlaces:
    """Slots in the other end's memory, each to be had once."""

    def __init__(self, slots: Mapping[tuple[int, int], Slot]) -> None:
        self._slots = dict(slots)
        self.clear = self._slots.clear

    def place(self, route: PlannedRoute, number: int) -> Slot:
        return self._slots.pop((route.tensor_index, number))


def require_device(device: DeviceExchange | None) -> DeviceExchange:
    """A link's, where it has one.

    Raises:
        WorkerError: it has none.
    """
    if device is None:
        raise WorkerError(NO_DEVICE)
    return device


def open_places(
    routes: Sequence[PlannedRoute], device: DeviceExchange, content: bytes, shut: Callable[[], object]
) -> OpenPlaces:
    """The slots of the other end's handles. ``shut`` as in `DeviceExchange.open_slots`.

    Raises:
        WorkerError: they cannot be opened; nothing stays open.
        ProtocolError: they are not as many as the link has places, or memory is too small; nothing stays open.
    """
    places = [(route, number) for route in routes for number in range(route.queue_depth)]
    if len(content) != HANDLE_BYTES * len(places):
        shut()
        raise ProtocolError(
            f"the other end has sent {len(content)} bytes of handles; {len(places)} places have "
            f"{HANDLE_BYTES * len(places)}"
        )
    handles = [content[begin : begin + HANDLE_BYTES] for begin in range(0, len(content), HANDLE_BYTES)]
    tensors = [route.tensor for route, _ in places]
    slots = device.open_slots(list(zip(tensors, handles, strict=True)), shut)
    return OpenPlaces({(route.tensor_index, number): slot for (route, number), slot in zip(places, slots, strict=True)})


def longest_message(routes: Sequence[PlannedRoute]) -> int:
    """Of what a receiver sends first; one byte more, so that a longer one is not taken for it."""
    return len(DEVICE) + max(HANDLE_BYTES * _count(routes), MAXIMUM_TEXT_BYTES) + 1


def text_message(why: str) -> bytes:
    """What is sent instead of handles, or in answer to them."""
    return ONLY_HOST + why[: MAXIMUM_LETTERS // 4].encode()


def text_of(message: bytes) -> str:
    """The other end's words.

    Raises:
        ProtocolError: they are no words.
    """
    if not message.startswith(ONLY_HOST):
        raise ProtocolError(f"the other end should say what memory it has, and says {cleaned(repr(message[:100]))}")
    return cleaned(message[len(ONLY_HOST) :].decode(errors="replace"))


def _count(routes: Sequence[PlannedRoute]) -> int:
    return sum(route.queue_depth for route in routes)
