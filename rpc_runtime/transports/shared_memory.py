"""The shared-memory transport, for two processes of one host: tensors in shared memory, headers over a unix socket.

The receiver makes the memory: a sealed memfd, which has no name and which the kernel frees however the processes end.
It has as many slots for each tensor as its queue is deep. The sender copies a tensor into a free slot and sends a
header; the receiver's kernels read the tensor in place. If a process dies, its socket closes.
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

import numpy as np

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.hardware import boot_id, memory_domain
from rpc_runtime.program.routes import Route
from rpc_runtime.program.runner import Bytes
from rpc_runtime.transports.link_end import HEARTBEAT, LinkEnd
from rpc_runtime.transports.liveness import LinkTimeouts
from rpc_runtime.transports.slots import ALIGNMENT_BYTES, Slot
from rpc_runtime.transports.transport import Carrier, Host, OnEnd, Opening, Pending, Transport, Unusable
from rpc_runtime.wire.framing import HEADER, MAXIMUM_TEXT_BYTES, decode

SECRET_BYTES = 32
WAITING = 128
"""Length of the socket's queue. Unauthorized callers wait there too; a short queue would shut out the right one."""
JOIN_SECONDS = 5.0
OFFERED = re.compile("tvm-split-[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")
MESSAGE = b"memory"
"""The content of the message that carries the descriptor."""


class SharedMemory(Transport):
    """Connects processes of one user on one host. An answer holds a secret and the name of a socket."""

    name = "shm"
    title = "shared memory"
    rank = 10
    memory = "host"
    uses_codecs = False

    def joins(self, source: Host, destination: Host) -> bool:
        return bool(source.memory_domain) and source.memory_domain == destination.memory_domain

    def offer(self, opening: Opening) -> bytes:
        proof = host_proof(opening.deployment)
        if not proof:
            raise Unusable("the caller cannot share memory")
        return proof

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        proof = host_proof(opening.deployment)
        if not proof or not hmac.compare_digest(offer, proof):
            raise Unusable("caller and worker are on different hosts")
        door = Door(opening)
        return door.secret + door.name.encode(), door

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        own = own_memory(opening.link, "the caller")
        name = answer[SECRET_BYTES:].decode(errors="replace")
        connection = call(name, answer[:SECRET_BYTES], opening.link.timeouts)
        return SharedMemoryCarrier(connection, own, opening.link, opening.peer)


def host_proof(deployment: str) -> bytes:
    """Return a proof that only processes of this host can compute (until reboot); empty if memory cannot be shared."""
    shares = sys.platform.startswith("linux") and memory_domain()
    return hashlib.sha256(f"{boot_id()} {deployment}".encode()).digest() if shares else b""


class Door:
    """The abstract unix socket (not in a file system) that one caller connects to, and the secret that it must send.

    Raises:
        Unusable: the socket or the link's memory cannot be made.
    """

    def __init__(self, opening: Opening) -> None:
        self._link, self._peer = opening.link, opening.peer
        self._memory = own_memory(opening.link, "the worker")
        self.name = f"tvm-split-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._seconds = opening.link.timeouts.handshake_seconds
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(WAITING)
        except OSError as error:
            raise Unusable(f"the worker cannot make a socket for it: {error}") from error
        self._listener.settimeout(self._seconds)

    def accept(self) -> Carrier:
        """Return the carrier of the caller that connects.

        Raises:
            ProtocolError: no process of this user connected in time with the secret.
        """
        connection, (memory, self._memory) = self._accepted(), (self._memory, None)
        return SharedMemoryCarrier(connection, memory, self._link, self._peer)

    def close(self) -> None:
        self._listener.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _accepted(self) -> socket.socket:
        deadline = time.monotonic() + self._seconds
        with contextlib.closing(self._listener), contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                connection, _ = self._listener.accept()
                connection.settimeout(self._seconds)
                with contextlib.suppress(OSError):
                    if _is_same_user(connection) and hmac.compare_digest(connection.recv(SECRET_BYTES), self.secret):
                        return connection
                connection.close()
        raise ProtocolError("the caller chose shared memory, and did not come for it")


def call(name: str, secret: bytes, timeouts: LinkTimeouts) -> socket.socket:
    """Connect to the socket of a `Door`.

    Raises:
        Unusable: the socket cannot be reached, or belongs to another user.
    """
    if not OFFERED.fullmatch(name):
        raise Unusable(f"it is offered at {name!r}, where no worker listens")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeouts.handshake_seconds)
        _connect(connection, f"\0{name}", timeouts.handshake_seconds)
        if not _is_same_user(connection):
            raise Unusable("it belongs to another user")
        connection.send(secret)
        return connection
    except (OSError, ValueError) as error:
        connection.close()
        raise Unusable(f"its socket cannot be reached ({error}): is it in another network namespace?") from error
    except BaseException:
        connection.close()
        raise


def _connect(connection: socket.socket, address: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:  # the socket's queue is full
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _timeval(seconds: float) -> bytes:
    """Pack seconds as the kernel's ``struct timeval``: seconds and microseconds."""
    return _TIMEVAL.pack(*divmod(round(seconds * 1e6), 1_000_000))


def _is_same_user(connection: socket.socket) -> bool:
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(content)[1] == os.geteuid())


class SharedMemoryCarrier(Carrier):
    """Carries ``link`` over a connection to the other process, whose messages it reads in a thread of its own.

    ``own`` is the link's memory at the receiving end, and None at the sending end.
    """

    def __init__(self, connection: socket.socket, own: OwnMemory | None, link: LinkEnd, peer: str) -> None:
        self._connection = connection
        self._own = own
        self._link = link
        self._is_served = link.copies_apart
        self._peer = peer
        self._memory: Memory | None = None
        self._failure: TvmSplitError | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def slots(self, route: Route) -> Sequence[Slot]:
        memory = self._memory.slots(route) if self._memory is not None else ()
        return [self._link.slot_over(route.tensor, each) for each in memory]

    def start(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        try:
            self._memory = self._agreed_memory()
            timeouts = self._link.timeouts
            self._connection.settimeout(None)
            for option, seconds in (
                (socket.SO_RCVTIMEO, timeouts.beat_seconds),
                (socket.SO_SNDTIMEO, timeouts.silence_seconds),
            ):
                self._connection.setsockopt(socket.SOL_SOCKET, option, _timeval(seconds))
        except OSError as error:
            self._connection.close()
            raise WorkerUnavailableError(f"memory could not be shared: {error}") from error
        except BaseException:
            self._connection.close()
            raise
        self._link.open(self)
        self._memory = None  # the link's slots keep the memory alive until the link is closed
        self._thread = threading.Thread(target=self._read, name=f"link-{self._peer}-shm", daemon=True)
        self._thread.start()
        if self._is_served:
            name = f"link-{self._peer}-copies"
            threading.Thread(target=self._say, args=(self._link.serve,), name=name, daemon=True).start()

    def wake(self) -> None:
        if not self._is_served:
            self._say(self._link.drain)

    def close(self) -> None:
        self._closing = True
        if self._own is not None:
            self._own.close()
            self._own = None
        if self._thread is None:
            self._connection.close()
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _agreed_memory(self) -> Memory:
        own, self._own = self._own, None
        if own is None:
            return others_memory(self._connection, self._link.routes)
        own.send(self._connection)
        return own.memory

    def _say(self, what: Callable[[Callable[[bytes], None]], None]) -> None:
        """Run ``what``; an error, for example of a copy from a GPU, fails the link and not the computing thread."""
        try:
            what(self._send)
        except Exception as error:
            self._fail(error if isinstance(error, TvmSplitError) else WorkerError(f"{error!r}"))

    def _send(self, header: bytes) -> None:
        try:
            self._connection.send(header)
        except OSError as error:
            why = f"its other end has taken nothing for {self._link.timeouts.silence_seconds:g} seconds"
            self._fail(WorkerUnavailableError(why if isinstance(error, BlockingIOError) else str(error)))

    def _fail(self, error: TvmSplitError) -> None:
        self._failure = self._failure or error
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the reading thread, which reports the failure

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
            if begin - said >= self._link.timeouts.beat_seconds:
                self._send(HEARTBEAT)
                said = begin


class Memory:
    """Slots for the tensors of ``routes``, in a mapping that lives as long as one of its slots is referenced."""

    def __init__(self, routes: Sequence[Route], mapping: mmap.mmap) -> None:
        self._bytes: Bytes = np.frombuffer(mapping, np.uint8)
        self._begins: dict[int, int] = {}
        begin = 0
        for route in routes:
            self._begins[route.index] = begin
            begin += route.depth * _stride(route)

    @classmethod
    def create(cls, routes: Sequence[Route]) -> tuple[Memory, int]:
        """Make new memory; return it and its descriptor, which the caller must close.

        Raises:
            OSError: there is not enough memory.
        """
        descriptor = os.memfd_create("tvm-split", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _size(routes))
            # Without the seal, one process could shorten the file; the other would die reading behind its end.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(routes, mmap.mmap(descriptor, _size(routes))), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, routes: Sequence[Route], descriptor: int) -> Memory:
        """Map the memory that the other end has made.

        Raises:
            ProtocolError: the file has another size, or is not sealed.
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

    def slots(self, route: Route) -> list[Bytes]:
        """Return the slots of a route, ordered by index."""
        begin, stride = self._begins[route.index], _stride(route)
        starts = range(begin, begin + route.depth * stride, stride)
        return [self._bytes[start : start + route.tensor.size_bytes] for start in starts]


def _stride(route: Route) -> int:
    return max(1, -(-route.tensor.size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _size(routes: Sequence[Route]) -> int:
    return max(ALIGNMENT_BYTES, sum(route.depth * _stride(route) for route in routes))


class OwnMemory:
    """The memory of a link's receiver, made before a transport is chosen so that the link can fall back to gRPC.

    Raises:
        Unusable: ``machine`` does not have enough memory, or is not allowed to make it.
    """

    def __init__(self, routes: Sequence[Route], machine: str) -> None:
        try:
            self.memory, self._descriptor = Memory.create(routes)
        except OSError as error:
            raise Unusable(f"{machine} cannot make it: {error}") from error
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def send(self, connection: socket.socket) -> None:
        """Send the descriptor to the other end and close it. Call once."""
        with contextlib.closing(self):
            socket.send_fds(connection, [MESSAGE], [self._descriptor])


def others_memory(connection: socket.socket, routes: Sequence[Route]) -> Memory:
    """Return the memory that the receiver sends.

    Raises:
        ProtocolError: the message is not valid memory for these routes.
        WorkerUnavailableError: the receiver has disconnected.
    """
    message, descriptors, _, _ = socket.recv_fds(connection, len(MESSAGE) + 1, 2)
    try:
        if not message and not descriptors:
            raise WorkerUnavailableError("its other end went before it had sent memory")
        if message != MESSAGE or len(descriptors) != 1:
            raise ProtocolError(f"the other end has sent no memory that fits, in {len(descriptors)} descriptors")
        return Memory.open(routes, descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def own_memory(link: LinkEnd, machine: str) -> OwnMemory | None:
    """Return the memory that a link's receiver makes, or None at the sending end. Raises as `OwnMemory`."""
    return OwnMemory(link.routes, machine) if link.receives else None
