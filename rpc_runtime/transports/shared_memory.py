"""The shared-memory transport, for two processes of one host: tensors in shared memory, headers over a unix socket.

The receiver makes the memory: a sealed memfd, which has no name and which the kernel frees however the processes end.
It has as many slots for each tensor as its queue is deep. The sender copies a tensor into a free slot and sends a
header; the receiver's kernels read the tensor in place. If a process dies, its socket closes.
"""

import contextlib
import errno
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

import numpy as np

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerUnavailableError
from rpc_runtime.hardware import boot_id, memory_domain
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import Bytes
from rpc_runtime.transports.carrier import ALIGNMENT_BYTES, Carrier, OnEnd, Pending, Slot, failure_of
from rpc_runtime.transports.link_end import HEARTBEAT, LinkEnd
from rpc_runtime.transports.transport import Opening, Transport, Unusable
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

    def joins(self, source: str, destination: str) -> bool:
        return source == destination != ""

    def offer(self, opening: Opening) -> bytes:
        proof = host_proof(opening.deployment)
        if not proof:
            raise Unusable("the caller cannot share memory")
        return proof

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        proof = host_proof(opening.deployment)
        if not proof or not hmac.compare_digest(offer, proof):
            raise Unusable("caller and worker are on different hosts")
        doorbell = Doorbell(opening)
        return doorbell.secret + doorbell.name.encode(), doorbell

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        memory_file = _own_memory(opening.link, "the caller")
        name = answer[SECRET_BYTES:].decode(errors="replace")
        connection = call(name, answer[:SECRET_BYTES], opening.link.timeouts.handshake_seconds)
        return SharedMemoryCarrier(connection, memory_file, opening)


def host_proof(deployment: str) -> bytes:
    """Return a proof that only processes of this host can compute (until reboot); empty if memory cannot be shared."""
    shares = sys.platform.startswith("linux") and memory_domain()
    return hashlib.sha256(f"{boot_id()} {deployment}".encode()).digest() if shares else b""


class Doorbell:
    """The abstract unix socket (not in a file system) that one caller connects to, and the secret that it must send.

    Raises:
        Unusable: the socket or the link's memory cannot be made.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._memory = _own_memory(opening.link, "the worker")
        self.name = f"tvm-split-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(SECRET_BYTES)
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(WAITING)
        except OSError as error:
            raise Unusable(f"the worker cannot make a socket for it: {error}") from error

    def accept(self) -> Carrier:
        """Return the carrier of the caller that connects.

        Raises:
            ProtocolError: no process of this user connected in time with the secret.
        """
        connection, (memory, self._memory) = self._accepted(), (self._memory, None)
        return SharedMemoryCarrier(connection, memory, self._opening)

    def close(self) -> None:
        self._listener.close()
        if self._memory is not None:
            self._memory.close()

    def _accepted(self) -> socket.socket:
        seconds = self._opening.link.timeouts.handshake_seconds
        deadline = time.monotonic() + seconds
        with contextlib.closing(self._listener), contextlib.suppress(OSError):
            self._listener.settimeout(seconds)
            while time.monotonic() < deadline:
                connection, _ = self._listener.accept()
                connection.settimeout(seconds)
                with contextlib.suppress(OSError):
                    if _is_same_user(connection) and hmac.compare_digest(connection.recv(SECRET_BYTES), self.secret):
                        return connection
                connection.close()
        raise ProtocolError("the caller chose shared memory, and did not connect to it")


def call(name: str, secret: bytes, seconds: float) -> socket.socket:
    """Return a connection to the socket of a `Doorbell`, made within ``seconds``.

    Raises:
        Unusable: the socket cannot be reached, or belongs to another user.
    """
    if not OFFERED.fullmatch(name):
        raise Unusable(f"it is offered at {name!r}, where no worker listens")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _set_timeout(connection, socket.SO_SNDTIMEO, seconds)  # which `connect` obeys while the socket's queue is full
        connection.connect(f"\0{name}")
        connection.settimeout(seconds)
        if not _is_same_user(connection):
            raise Unusable("it belongs to another user")
        connection.send(secret)
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise Unusable(f"its socket cannot be reached ({error}): is it in another network namespace?") from error
        raise


def _set_timeout(connection: socket.socket, option: int, seconds: float) -> None:
    """Set SO_RCVTIMEO or SO_SNDTIMEO, by the kernel's ``struct timeval``: seconds and microseconds."""
    timeval = _TIMEVAL.pack(*divmod(round(seconds * 1e6), 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, option, timeval)


def _is_same_user(connection: socket.socket) -> bool:
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(content)[1] == os.geteuid())


class SharedMemoryCarrier(Carrier):
    """Carries a link over a connection to the other process, whose messages it reads in a thread of its own.

    ``memory_file`` is the link's memory at the receiving end, and None at the sending end.
    """

    def __init__(self, connection: socket.socket, memory_file: IO[bytes] | None, opening: Opening) -> None:
        self._connection = connection
        self._own = memory_file
        self._link = opening.link
        # Sending includes copies from a GPU, which the computing thread should not wait for.
        self._is_served = self._link.owner.device is not None and not self._link.receives
        self._peer = opening.peer
        self._memory: dict[int, list[Bytes]] = {}
        self._failure: TvmSplitError | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def slots(self, route: Route) -> Sequence[Slot]:
        return [self._link.make_slot(route.tensor, memory) for memory in self._memory[route.index]]

    def start(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        try:
            self._memory = self._agreed_memory()
            timeouts = self._link.timeouts
            self._connection.settimeout(None)
            _set_timeout(self._connection, socket.SO_RCVTIMEO, timeouts.beat_seconds)
            _set_timeout(self._connection, socket.SO_SNDTIMEO, timeouts.silence_seconds)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, OSError):
                raise WorkerUnavailableError(f"memory could not be shared: {error}") from error
            raise
        self._link.open(self)
        self._memory = {}  # the link's slots keep the memory alive until the link is closed
        self._thread = self._begin(self._read, "shm")
        if self._is_served:
            self._begin(partial(self._send_by, self._send_all), "copies")

    def _begin(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"link-{self._peer}-{name}", daemon=True)
        thread.start()
        return thread

    def wake(self) -> None:
        if not self._is_served:
            self._send_by(self._link.drain)

    def close(self) -> None:
        self._closing = True
        if self._own is not None:
            self._own.close()
        if self._thread is None:
            self._connection.close()
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _agreed_memory(self) -> dict[int, list[Bytes]]:
        if self._own is None:
            return received_memory(self._connection, self._link.routes)
        with self._own as memory_file:
            memory = _slots(self._link.routes, memory_file.fileno())
            socket.send_fds(self._connection, [MESSAGE], [memory_file.fileno()])
        return memory

    def _send_by(self, send_messages: Callable[[Callable[[bytes], None]], None]) -> None:
        """Call ``send_messages`` with this end's sender. An error, as of a copy from a GPU, fails the link only."""
        try:
            send_messages(self._send)
        except Exception as error:
            self._fail(failure_of(error))

    def _send_all(self, send: Callable[[bytes], None]) -> None:
        for frame in self._link.frames():
            send(frame)

    def _send(self, header: bytes) -> None:
        try:
            self._connection.send(header)
        except OSError as error:
            why = f"its other end has read nothing for {self._link.timeouts.silence_seconds:g} seconds"
            self._fail(WorkerUnavailableError(why if isinstance(error, BlockingIOError) else str(error)))

    def _fail(self, error: TvmSplitError) -> None:
        self._failure = self._failure or error
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the reading thread, which reports the failure

    def _read(self) -> None:
        error: TvmSplitError | None = None
        try:
            self._receive_all()
        except Exception as raised:
            error = failure_of(raised)
        finally:
            self._connection.close()
        if not self._closing:
            self._on_end(self._failure or error)

    def _receive_all(self) -> None:
        last_beat = begin = time.monotonic()
        while True:
            try:
                message = self._connection.recv(HEADER.size + MAXIMUM_TEXT_BYTES)
                if not message:
                    return
                self._link.receive(decode(message))
            except BlockingIOError:
                self._link.require_life(begin)
            begin = time.monotonic()
            if begin - last_beat >= self._link.timeouts.beat_seconds:
                self._send(HEARTBEAT)
                last_beat = begin


def _own_memory(link: LinkEnd, machine: str) -> IO[bytes] | None:
    """Return the memory of a link's receiver; None at the sending end. It is made while the link can still use gRPC.

    Raises:
        Unusable: ``machine`` does not have enough memory, or is not allowed to make it.
    """
    try:
        return new_memory(link.routes) if link.receives else None
    except OSError as error:
        raise Unusable(f"{machine} cannot make it: {error}") from error


def new_memory(routes: Sequence[Route]) -> IO[bytes]:
    """Return new memory for the slots of ``routes``, as a sealed file without a name."""
    file = os.fdopen(os.memfd_create("tvm-split", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0)
    try:
        file.truncate(_size(routes))
        # Without the seal, one process could shorten the file; the other would die reading behind its end.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        file.close()
        raise
    return file


def received_memory(connection: socket.socket, routes: Sequence[Route]) -> dict[int, list[Bytes]]:
    """Return the slots of each route, by its index, in the memory whose descriptor the receiving end sends.

    Raises:
        ProtocolError: the message is not valid memory for these routes.
        WorkerUnavailableError: the receiver has disconnected.
    """
    message, descriptors, flags, _ = socket.recv_fds(connection, len(MESSAGE) + 1, 2)
    try:
        if flags & socket.MSG_CTRUNC and not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not message and not descriptors:
            raise WorkerUnavailableError("its other end disconnected before it sent its memory")
        if message != MESSAGE or len(descriptors) != 1:
            raise ProtocolError(f"the other end sent no valid memory, in {len(descriptors)} descriptors")
        _require_sealed(descriptors[0], _size(routes))
        return _slots(routes, descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _require_sealed(descriptor: int, expected: int) -> None:
    size = os.fstat(descriptor).st_size
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if size != expected or not sealed:
        kind = "sealed" if sealed else "unsealed"
        raise ProtocolError(f"shared memory should be sealed and have {expected} bytes, it is {kind} and has {size}")


def _slots(routes: Sequence[Route], descriptor: int) -> dict[int, list[Bytes]]:
    """Map memory; return the slots of each route, by its index. The mapping lives as long as one of its slots."""
    memory: Bytes = np.frombuffer(mmap.mmap(descriptor, _size(routes)), np.uint8)
    slots, begin = {}, 0
    for route in routes:
        stride, size = _stride(route), route.tensor.size_bytes
        end = begin + route.depth * stride
        slots[route.index] = [memory[start : start + size] for start in range(begin, end, stride)]
        begin = end
    return slots


def _stride(route: Route) -> int:
    return max(1, -(-route.tensor.size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _size(routes: Sequence[Route]) -> int:
    return max(ALIGNMENT_BYTES, sum(route.depth * _stride(route) for route in routes))
