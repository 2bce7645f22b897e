"""The memory of a link between two processes of one host: a sealed memfd of its receiver's, or places on its GPU.

The receiver makes both before anybody chooses, the second one where the sender asks for it (`device_memory`), and sends
them over a unix socket; the sender says what both take.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tvm_split.rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from tvm_split.rpc_runtime.program.interface import Bytes
from tvm_split.rpc_runtime.program.link_setting import Transport
from tvm_split.rpc_runtime.program.machine_plan import PlannedRoute
from tvm_split.rpc_runtime.transports.device_memory import (
    DEVICE,
    DeviceExchange,
    OwnDeviceMemory,
    longest_message,
    open_places,
    require_device,
    text_message,
    text_of,
)
from tvm_split.rpc_runtime.transports.link_end import LinkEnd, Place
from tvm_split.rpc_runtime.transports.links import IncomingLink
from tvm_split.rpc_runtime.transports.slots import ALIGNMENT_BYTES
from tvm_split.rpc_runtime.wire.framing import MAXIMUM_TEXT_BYTES

MOST_DESCRIPTORS = 2
"""Of the host's memory, and of the pipe beside a GPU's."""
GONE = "its other end went before both had agreed on memory"


class SharedMemory:
    """Places for the tensors of ``routes``, in a mapping that lives as long as somebody uses a place."""

    def __init__(self, routes: Sequence[PlannedRoute], mapping: mmap.mmap) -> None:
        self._bytes: Bytes = np.frombuffer(mapping, np.uint8)
        self._begins: dict[int, int] = {}
        begin = 0
        for route in routes:
            self._begins[route.tensor_index] = begin
            begin += route.queue_depth * _stride(route)

    @classmethod
    def create(cls, routes: Sequence[PlannedRoute]) -> tuple[SharedMemory, int]:
        """New memory, and its descriptor, which is the caller's to close.

        Raises:
            OSError: there is not enough of it.
        """
        descriptor = os.memfd_create("tvm-split", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _size(routes))
            # Whoever shortened it would kill the other process, which reads behind its end.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(routes, mmap.mmap(descriptor, _size(routes))), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, routes: Sequence[PlannedRoute], descriptor: int) -> SharedMemory:
        """What the other end has made.

        Raises:
            ProtocolError: it is something else.
        """
        expected, size = _size(routes), os.fstat(descriptor).st_size
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if size != expected or not sealed:
            kind = "sealed" if sealed else "unsealed"
            raise ProtocolError(
                f"shared memory should be sealed and have {expected} bytes, it is {kind} and has {size}"
            )
        return cls(routes, mmap.mmap(descriptor, expected))

    def place(self, route: PlannedRoute, number: int) -> Bytes:
        begin = self._begins[route.tensor_index] + number * _stride(route)
        return self._bytes[begin : begin + route.tensor.size_bytes]


def _stride(route: PlannedRoute) -> int:
    return max(1, -(-route.tensor.size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _size(routes: Sequence[PlannedRoute]) -> int:
    return max(ALIGNMENT_BYTES, sum(route.queue_depth * _stride(route) for route in routes))


class OwnMemory:
    """What a link's receiver makes before anybody chooses, so that who cannot make it leaves the link to gRPC.

    With ``on_device``, the sender asks for places on this machine's GPU. If there can be none, it is told why.

    Raises:
        OSError: there is not enough of it.
    """

    def __init__(self, link: IncomingLink, on_device: bool) -> None:
        self.memory, self._descriptor = SharedMemory.create(link.routes)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._device: OwnDeviceMemory | None = None
        self._message = text_message("")
        if on_device:
            try:
                self._device = OwnDeviceMemory(link.routes, require_device(link.device))
                self._message = self._device.message
            except (TvmSplitError, OSError) as error:
                self._message = text_message(f"the receiver has none on a GPU: {error}")

    def agreed(self, connection: socket.socket) -> AgreedMemory:
        """Sends it to the other end, once, which says what of it both take.

        Raises:
            ProtocolError: it says something else.
        WorkerUnavailableError: it is gone.
        """
        device, self._device = self._device, None
        with contextlib.closing(self):
            if device is None:
                socket.send_fds(connection, [self._message], [self._descriptor])
                return AgreedMemory(self.memory.place)
            socket.send_fds(connection, [self._message], [self._descriptor, device.others_end])
        device.sent()
        answer = connection.recv(MAXIMUM_TEXT_BYTES)
        if not answer:
            raise WorkerUnavailableError(GONE)
        if answer == DEVICE:
            return AgreedMemory(device.place, Transport.CUDA_IPC)
        return AgreedMemory(self.memory.place, reason=text_of(answer))


class AgreedMemory(NamedTuple):
    """Where a link's tensors lie; ``reason`` says why not on a GPU, if that was asked for."""

    place: Place
    transport: Transport = Transport.SHARED_MEMORY
    reason: str = ""


def others_memory(
    connection: socket.socket, routes: Sequence[PlannedRoute], device: DeviceExchange | None
) -> AgreedMemory:
    """What the receiver sends, of which the sender says what both take; without ``device`` it has asked for no GPU's.

    Raises:
        ProtocolError: it sends something else.
        WorkerUnavailableError: it is gone.
    """
    message, descriptors, _, _ = socket.recv_fds(connection, longest_message(routes), MOST_DESCRIPTORS + 1)
    try:
        if not message and not descriptors:
            raise WorkerUnavailableError(GONE)
        is_device = message.startswith(DEVICE)
        if len(descriptors) != 1 + is_device or (is_device and device is None):
            raise ProtocolError(f"the other end has sent no memory that fits, in {len(descriptors)} descriptors")
        host = SharedMemory.open(routes, descriptors[0])
        if not is_device or device is None:
            return AgreedMemory(host.place, reason=text_of(message))
        shut = partial(os.close, descriptors.pop())
        try:
            opened = open_places(routes, device, message[len(DEVICE) :], shut)
        except WorkerError as error:
            reason = f"the sender cannot open the receiver's memory on a GPU: {error}"
            connection.send(text_message(reason))
            return AgreedMemory(host.place, reason=reason)
        try:
            connection.send(DEVICE)
        except BaseException:
            opened.clear()
            raise
        return AgreedMemory(opened.place, Transport.CUDA_IPC)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def own_memory(link: LinkEnd, on_device: bool = False) -> OwnMemory | None:
    """None at the sending end."""
    return OwnMemory(link, on_device) if isinstance(link, IncomingLink) else None
