"""Carries a link between two processes of one host: tensors in memory that both see, headers over a unix socket.

The receiver makes the memory: a sealed memfd, which is nobody's file and is freed by the kernel however its owners die,
with as many places for each tensor as its queue is deep. The sender copies a tensor into its next place and says so;
the receiver's kernels read it where it lies. The socket's end is the other process's death.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.hardware import boot_id, memory_domain
from rpc_runtime.transports.link_end import HEARTBEAT, LinkEnd
from rpc_runtime.transports.link_memory import OwnMemory, others_memory, own_memory
from rpc_runtime.transports.liveness import LinkTimeouts
from rpc_runtime.wire.framing import HEADER, MAXIMUM_TEXT_BYTES, decode

SECRET_BYTES = 32
WAITING = 128
"""Whoever may not come in can wait before the door, and should not fill the place before it."""
JOIN_SECONDS = 5.0
OFFERED = re.compile("tvm-split-[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")


def host_proof(deployment: str) -> bytes:
    """What only processes of this host, since it was started, can know; empty where no memory can be shared."""
    shares = sys.platform.startswith("linux") and memory_domain()
    return hashlib.sha256(f"{boot_id()} {deployment}".encode()).digest() if shares else b""


class Offer:
    """A door for one caller: an abstract socket, which no file system holds, and a secret to be said there.

    Raises:
        OSError: there can be no socket, or no memory for ``link``.
    """

    def __init__(self, link: LinkEnd) -> None:
        self.memory = own_memory(link)
        self.name = f"tvm-split-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(WAITING)
        self._seconds = link.timeouts.handshake_seconds
        self._listener.settimeout(self._seconds)

    def accept(self) -> socket.socket:
        """The caller's connection, once.

        Raises:
            ProtocolError: nobody came who is this user and knows the secret.
        """
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

    def close(self) -> None:
        """Also lets go of the memory, unless somebody uses a place in it. May be called again."""
        self._listener.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None


def call(name: str, secret: bytes, timeouts: LinkTimeouts) -> socket.socket:
    """Connects to what an `Offer` names.

    Raises:
        WorkerError: it cannot be reached, or is another user's; says why.
    """
    if not OFFERED.fullmatch(name):
        raise WorkerError(f"it is offered at {name!r}, where no worker listens")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeouts.handshake_seconds)
        _connect(connection, f"\0{name}", timeouts.handshake_seconds)
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


def _connect(connection: socket.socket, address: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:  # others wait there
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _timeval(seconds: float) -> bytes:
    """As the kernel takes it: seconds and microseconds."""
    return _TIMEVAL.pack(*divmod(round(seconds * 1e6), 1_000_000))


def _is_same_user(connection: socket.socket) -> bool:
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(content)[1] == os.geteuid())


class SharedMemoryCarrier:
    """Carries ``link`` over a connection to the other process, and reads what that one says, in a thread of its own.

    ``memory`` is the link's `own_memory`. ``on_end(error)`` is called once, from that thread, when the link ends
    otherwise than by ``close``; None: the other end has closed it.

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
    ) -> None:
        self._connection = connection
        self._link = link
        self._on_end = on_end
        self._failure: TvmSplitError | None = None
        self._closing = False
        try:
            if memory is not None:
                memory.send(connection)
                shared = memory.memory
            else:
                shared = others_memory(connection, link.routes)
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(link.timeouts.beat_seconds))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(link.timeouts.silence_seconds))
        except OSError as error:
            connection.close()
            raise WorkerUnavailableError(f"memory could not be shared: {error}") from error
        except BaseException:
            connection.close()
            raise
        link.carry(self, shared.place)  # which the link's slots keep, until it is closed
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()
        if link.apart:
            threading.Thread(target=link.hand_over, args=(self,), name=f"{name}-copies", daemon=True).start()

    def send(self, header: bytes) -> None:
        try:
            self._connection.send(header)
        except OSError as error:
            why = f"its other end has taken nothing for {self._link.timeouts.silence_seconds:g} seconds"
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
            self._thread.join(JOIN_SECONDS)

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
                self.send(HEARTBEAT)
                said = begin
