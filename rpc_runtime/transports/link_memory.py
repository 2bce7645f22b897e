"""The memory of a link between two processes of one host: a sealed memfd of its receiver's.

The receiver makes it before anybody chooses a transport, and sends it over a unix socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import weakref
from collections.abc import Sequence

import numpy as np

from rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from rpc_runtime.program.routes import Route
from rpc_runtime.program.runner import Bytes
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.links import IncomingLink
from rpc_runtime.transports.slots import ALIGNMENT_BYTES

MESSAGE = b"memory"
"""What the descriptor is sent with."""


class SharedMemory:
    """Places for the tensors of ``routes``, in a mapping that lives as long as somebody uses a place."""

    def __init__(self, routes: Sequence[Route], mapping: mmap.mmap) -> None:
        self._bytes: Bytes = np.frombuffer(mapping, np.uint8)
        self._begins: dict[int, int] = {}
        begin = 0
        for route in routes:
            self._begins[route.index] = begin
            begin += route.depth * _stride(route)

    @classmethod
    def create(cls, routes: Sequence[Route]) -> tuple[SharedMemory, int]:
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
    def open(cls, routes: Sequence[Route], descriptor: int) -> SharedMemory:
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

    def place(self, route: Route, number: int) -> Bytes:
        begin = self._begins[route.index] + number * _stride(route)
        return self._bytes[begin : begin + route.tensor.size_bytes]


def _stride(route: Route) -> int:
    return max(1, -(-route.tensor.size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _size(routes: Sequence[Route]) -> int:
    return max(ALIGNMENT_BYTES, sum(route.depth * _stride(route) for route in routes))


class OwnMemory:
    """What a link's receiver makes before anybody chooses, so that who cannot make it leaves the link to gRPC.

    Raises:
        OSError: there is not enough of it.
    """

    def __init__(self, link: IncomingLink) -> None:
        self.memory, self._descriptor = SharedMemory.create(link.routes)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def send(self, connection: socket.socket) -> None:
        """To the other end, once."""
        with contextlib.closing(self):
            socket.send_fds(connection, [MESSAGE], [self._descriptor])


def others_memory(connection: socket.socket, routes: Sequence[Route]) -> SharedMemory:
    """What the receiver sends.

    Raises:
        ProtocolError: it sends something else.
        WorkerUnavailableError: it is gone.
    """
    message, descriptors, _, _ = socket.recv_fds(connection, len(MESSAGE) + 1, 2)
    try:
        if not message and not descriptors:
            raise WorkerUnavailableError("its other end went before it had sent memory")
        if message != MESSAGE or len(descriptors) != 1:
            raise ProtocolError(f"the other end has sent no memory that fits, in {len(descriptors)} descriptors")
        return SharedMemory.open(routes, descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def own_memory(link: LinkEnd) -> OwnMemory | None:
    """None at the sending end."""
    return OwnMemory(link) if isinstance(link, IncomingLink) else None
