"""A transport over plain TCP on loopback: what a package needs to add one."""

import contextlib
import secrets
import socket
import struct
import threading

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerUnavailableError
from rpc_runtime.transports.carrier import Carrier, OnEnd, Pending, failure_of
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.transport import Opening, Transport, Unusable
from rpc_runtime.wire.framing import CHUNK_BYTES, HEADER, decode

LENGTH = struct.Struct("<I")
SECRET_BYTES = 16
JOIN_SECONDS = 5.0


class ToySocket(Transport):
    name = "toy-socket"
    title = "toy sockets"

    def offer(self, opening: Opening) -> bytes:
        return b""

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        listening = Listening(opening)
        return listening.secret + listening.port.to_bytes(2, "little"), listening

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        port, timeouts = int.from_bytes(answer[SECRET_BYTES:], "little"), opening.link.timeouts
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeouts.handshake_seconds)
            connection.sendall(answer[:SECRET_BYTES])
        except OSError as error:
            raise Unusable(f"its port cannot be reached: {error}") from error
        return SocketCarrier(connection, opening.link)


class Listening:
    """What the called end has made ready."""

    def __init__(self, opening: Opening) -> None:
        self._link = opening.link
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(opening.link.timeouts.handshake_seconds)
        self.port = int(self._listener.getsockname()[1])

    def accept(self) -> Carrier:
        try:
            connection, _ = self._listener.accept()
            connection.settimeout(self._link.timeouts.handshake_seconds)
            said = connection.recv(SECRET_BYTES, socket.MSG_WAITALL)
        except OSError as error:
            raise ProtocolError(f"the caller does not come: {error}") from error
        finally:
            self.close()
        if not secrets.compare_digest(said, self.secret):
            connection.close()
            raise ProtocolError("somebody else than the caller came")
        return SocketCarrier(connection, self._link)

    def close(self) -> None:
        self._listener.close()


class SocketCarrier(Carrier):
    """Two threads: one says what there is to say, one reads."""

    def __init__(self, connection: socket.socket, link: LinkEnd) -> None:
        self._connection, self._link = connection, link
        self._closing = False
        self._failure: TvmSplitError | None = None
        self._threads = [
            threading.Thread(target=run, name=f"link-toy-{run.__name__}", daemon=True)
            for run in (self._say, self._read)
        ]

    def start(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._connection.settimeout(None)
        self._link.open(self)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing = True
        self._shut()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)
        self._connection.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _say(self) -> None:
        try:
            for frame in self._link.frames():
                self._connection.sendall(LENGTH.pack(len(frame)) + frame)
        except Exception as error:
            self._failure = failure_of(error)
        self._shut()

    def _read(self) -> None:
        error: TvmSplitError | None = None
        try:
            while head := self._connection.recv(LENGTH.size, socket.MSG_WAITALL):
                self._link.receive(decode(self._received(*LENGTH.unpack(head))))
        except Exception as raised:
            error = failure_of(raised)
        self._shut()
        if not self._closing:
            self._on_end(self._failure or error)

    def _received(self, size: int) -> bytes:
        if size > HEADER.size + CHUNK_BYTES:
            raise ProtocolError(f"a frame of {size} bytes is too long")
        content = self._connection.recv(size, socket.MSG_WAITALL)
        if len(content) < size:
            raise WorkerUnavailableError("the connection ended within a frame")
        return content
