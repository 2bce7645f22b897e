"""Carries a link between two processes of one host: tensors in memory that both see, headers over a unix socket.

The receiver makes the memory: a sealed memfd, which is nobody's file and is freed by the kernel however its owners die,
with as many places for each tensor as its queue is deep. The sender copies a tensor into its next place and says so;
the receiver's kernels read it where it lies. The socket's end is the other process's death.

A link from GPU to GPU has its places there, if it can: `device_memory`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import mmap
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tvm_split.rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from tvm_split.rpc_runtime.hardware import boot_id, memory_domain
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
from tvm_split.rpc_runtime.transports.link_end import BEAT_SECONDS, HEARTBEAT, SILENCE_SECONDS, LinkEnd, Place
from tvm_split.rpc_runtime.transports.links import IncomingLink
from tvm_split.rpc_runtime.transports.slots import ALIGNMENT_BYTES
from tvm_split.rpc_runtime.wire.framing import HEADER, MAXIMUM_TEXT_BYTES, decode

SECRET_BYTES = 32
WAITING = 128
"""Whoever may not come in can wait before the door, and should not fill the place before it."""
OFFERED = re.compile("tvm-split-[0-9a-f]{32}")
HANDSHAKE_SECONDS = 5.0
CONNECT_SECONDS = 1.0
MOST_DESCRIPTORS = 2
"""Of the host's memory, and of the pipe beside a GPU's."""
GONE = "its other end went before both had agreed on memory"
_CREDENTIALS = struct.Struct("3i")
_SECONDS = struct.Struct("ll")


def host_proof(deployment: str) -> bytes:
    """What only processes of this host, since it was started, can know; empty where no memory can be shared."""
    shares = sys.platform.startswith("linux") and memory_domain()
    return hashlib.sha256(f"{boot_id()} {deployment}".encode()).digest() if shares else b""


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


class Offer:
    """A door for one caller: an abstract socket, which no file system holds, and a secret to be said there.

    Raises:
        OSError: there can be no socket, or no memory for ``link``.
    """

    def __init__(self, link: LinkEnd, on_device: bool) -> None:
        self.memory = own_memory(link, on_device)
        self.name = f"tvm-split-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(WAITING)
        self._listener.settimeout(HANDSHAKE_SECONDS)

    def accept(self) -> socket.socket:
        """The caller's connection, once.

        Raises:
            ProtocolError: nobody came who is this user and knows the secret.
        """
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        with contextlib.closing(self._listener), contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                connection, _ = self._listener.accept()
                connection.settimeout(HANDSHAKE_SECONDS)
                with contextlib.suppress(OSError):
                    if _is_same_user(connection) and hmac.compare_digest(connection.recv(SECRET_BYTES), self.secret):
                        return connection
                connection.close()
        raise ProtocolError("the caller chose shared memory, and did not come for it")

    def close(self) -> None:
        """Also lets go of the memory, unless somebody uses a place in it. May be called again."""
        self._listener.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None


def call(name: str, secret: bytes) -> socket.socket:
    """Connects to what an `Offer` names.

    Raises:
        WorkerError: it cannot be reached, or is another user's; says why.
    """
    if not OFFERED.fullmatch(name):
        raise WorkerError(f"it is offered at {name!r}, where no worker listens")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        _connect(connection, f"\0{name}")
        if not _is_same_user(connection):
            raise WorkerError("it belongs to another user")
        connection.send(secret)
        return connection
    except (OSError, ValueError) as error:
        connection.close()
        raise WorkerError(f"its socket cannot be reached ({error}): is it in another network namespace?") from error
    except BaseException:
        connection.close()
        raise


def _connect(connection: socket.socket, address: str) -> None:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:  # others wait there
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _is_same_user(connection: socket.socket) -> bool:
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(content)[1] == os.geteuid())


class SharedMemoryCarrier:
    """Carries ``link`` over a connection to the other process, and reads what that one says, in a thread of its own.

    ``memory`` is the link's `own_memory`; the sender asks for places ``on_device``, or does not. ``on_end(error)`` is
    called once, from that thread, when the link ends otherwise than by ``close``; None: the other end has closed it.

    Raises:
        TvmSplitError: the other end gives no memory that fits; the connection is then closed.
    """

    def __init__(
        self,
        connection: socket.socket,
        memory: OwnMemory | None,
        link: LinkEnd,
        on_end: Callable[[TvmSplitError | None], None],
        name: str,
        on_device: bool = False,
    ) -> None:
        self._connection = connection
        self._link = link
        self._on_end = on_end
        self._failure: TvmSplitError | None = None
        self._closing = False
        try:
            if memory is not None:
                agreed = memory.agreed(connection)
            else:
                agreed = others_memory(connection, link.routes, link.device if on_device else None)
            timeout = _SECONDS.pack(int(BEAT_SECONDS), 0), _SECONDS.pack(int(SILENCE_SECONDS), 0)
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout[0])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout[1])
        except OSError as error:
            connection.close()
            raise WorkerUnavailableError(f"memory could not be shared: {error}") from error
        except BaseException:
            connection.close()
            raise
        self.transport, self.reason = agreed.transport, agreed.reason
        link.carry(self, agreed.place)  # which the link's slots keep, until it is closed
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()
        if link.apart:
            threading.Thread(target=link.hand_over, args=(self,), name=f"{name}-copies", daemon=True).start()

    def send(self, header: bytes) -> None:
        try:
            self._connection.send(header)
        except OSError as error:
            why = f"its other end has taken nothing for {SILENCE_SECONDS:g} seconds"
            self._fail(WorkerUnavailableError(why if isinstance(error, BlockingIOError) else str(error)))

    def fail(self, why: str) -> None:
        self._fail(WorkerError(why))

    def _fail(self, error: TvmSplitError) -> None:
        self._failure = self._failure or error
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the reading thread, which tells

    def close(self) -> None:
        """Ends the link. May be called again."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(HANDSHAKE_SECONDS)

    def _read(self) -> None:
        error: TvmSplitError | None = None
        try:
            self._receive_all()
        except TvmSplitError as wrong:
            error = wrong
        except OSError as broken:
            error = WorkerUnavailableError(f"the connection broke: {broken}")
        except Exception as unexpected:
            error = WorkerError(f"{unexpected!r}")
        finally:
            self._connection.close()
        if not self._closing:
            self._on_end(self._failure or error)

    def _receive_all(self) -> None:
        said = begin = time.monotonic()
        while True:
            try:
                message = self._connection.recv(HEADER.size + MAXIMUM_TEXT_BYTES)
                if not message:
                    return
                self._link.receive(decode(message))
            except BlockingIOError:
                self._link.require_life(begin)
            begin = time.monotonic()
            if begin - said >= BEAT_SECONDS:
                self.send(HEARTBEAT)
                said = begin
