"""Client of TVM's RPC tracker, and the registration of workers there.

The protocol is that of TVM 0.27 (``tvm/rpc/tracker.py``, ``tvm/rpc/base.py``). Each side sends the magic number once,
then messages: a length (int32, little endian) and that many bytes of JSON. A server is listed while the connection over
which it sent its information is open. The same holds for its offers to clients: a key, a port, and a random
``matchkey`` that admits the one client that gets it.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

from rpc_runtime.errors import DeadlineError, InputError, ProtocolError, TvmSplitError, WorkerUnavailableError
from rpc_runtime.processes import Closing
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.text import cleaned

logger = logging.getLogger(__name__)

RPC_MAGIC = 0xFF271
"""Begins a connection to an RPC server."""
RPC_MISMATCH = RPC_MAGIC + 2
TRACKER_MAGIC = 0x2F271
SUCCESS = 0
MAXIMUM_REPLY_BYTES = 16 << 20
"""Maximum size of a tracker's answer; enough for some ten thousand servers."""
MAXIMUM_KEY_LETTERS = 128
DEFAULT_SECONDS = 5.0
INFORMATION = "tvm_split"
"""The key of a worker's `Registration` in the information that a server sends to the tracker."""
_LENGTH = struct.Struct("<i")


class Code(IntEnum):
    PING = 1
    PUT = 3
    UPDATE_INFO = 5
    SUMMARY = 6
    GET_PENDING_MATCHKEYS = 7


@dataclass(frozen=True)
class TrackerEntry:
    """A worker's entry at a tracker: the tracker's address, the worker's key, and the host by which clients reach it.

    If ``host`` is None, the tracker tells clients the address from which the worker has connected to the tracker.
    """

    tracker: Address
    key: str
    host: str | None = None


State = Literal["ready", "deployed", "tuning"]


@dataclass(frozen=True)
class Registration:
    """The information that a worker registers at a tracker, besides its key and address.

    ``tunes`` is whether TVM's RPC may tune kernels on the worker's machine. ``since`` is when the worker started, in
    seconds since 1970; it distinguishes a restarted worker from its old entry.
    """

    name: str
    threads: int
    secure: bool
    tunes: bool
    state: State
    since: float


@dataclass(frozen=True)
class ListedServer:
    """An entry of a tracker's list: a worker, or a server of TVM's RPC if ``registration`` is None.

    ``is_invalid``: it is a worker whose registration is invalid in this version.
    """

    key: str
    address: Address
    registration: Registration | None = None
    is_invalid: bool = False

    @classmethod
    def read(cls, entry: object) -> ListedServer:
        """Return the server of an entry of a tracker's list.

        Raises:
            ProtocolError: the entry has no valid key and address of a server.
        """
        match entry:
            case {"key": str(key), "addr": [str(host), int(port)], **rest} if key.startswith("server:"):
                key = cleaned(key.removeprefix("server:"))
                try:
                    address = Address.callable(str(Address(host, port)))
                except InputError as error:
                    raise ProtocolError(f"an entry has no address that can be called: {error}") from error
            case _:
                raise ProtocolError(
                    f"an entry has no key 'server:KEY' and address [HOST, PORT]: {cleaned(repr(entry))}"
                )
        registration = _registration(rest.get(INFORMATION))
        return cls(key, address, registration, INFORMATION in rest and registration is None)


def _registration(content: object) -> Registration | None:
    """Return the registration in a tracker's entry; None if it is missing or invalid."""
    match content:
        case {
            "name": str(name),
            "threads": int(threads),
            "secure": bool(secure),
            "tunes": bool(tunes),
            "state": "ready" | "deployed" | "tuning" as state,
            "since": float(since),
        } if name and name.isprintable() and 0 < threads < 1 << 16:
            return Registration(name, threads, secure, tunes, state, since)
    return None


def information(key: str, host: str | None, port: int, registration: Registration) -> dict[str, Any]:
    """Return the argument of `Code.UPDATE_INFO` for a worker; for ``host`` None, see `TrackerEntry`."""
    return {"key": f"server:{key}", "addr": [host, port], INFORMATION: asdict(registration)}


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return the next ``size`` bytes.

    Raises:
        TimeoutError: they have not arrived before ``deadline``, in seconds of `time.monotonic`.
        ConnectionError: the other end closed the connection.
    """
    received = bytearray()
    while len(received) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(min(size - len(received), 1 << 16))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return bytes(received)


class TrackerConnection(Closing):
    """A connection to a tracker. Connecting, and each request with its answer, may take ``timeout_seconds``.

    Raises:
        WorkerUnavailableError: no server listens at the address, or the connection ended.
        DeadlineError: no answer in time.
        ProtocolError: the server is not a tracker, or its answer is invalid.
    """

    def __init__(self, address: Address, timeout_seconds: float = DEFAULT_SECONDS) -> None:
        self._address = address
        self._seconds = timeout_seconds
        try:
            self._socket = address.connect(timeout_seconds)
        except (OSError, UnicodeError) as error:
            raise self._error(error) from error
        try:
            magic, _ = self._exchange(_LENGTH.pack(TRACKER_MAGIC))
            if magic != TRACKER_MAGIC:
                raise ProtocolError(f"the server at {address} is not a TVM RPC tracker: it begins with {magic:#x}")
        except BaseException:
            self.close()
            raise

    def ask(self, code: Code, *arguments: object) -> Any:
        """Send a request and return the tracker's answer, which may be any JSON value."""
        message = json.dumps([int(code), *arguments]).encode()
        size, deadline = self._exchange(_LENGTH.pack(len(message)) + message)
        if not 0 < size <= MAXIMUM_REPLY_BYTES:
            raise ProtocolError(
                f"the tracker {self._address} announces an answer of {size} bytes; 1 to {MAXIMUM_REPLY_BYTES} are read"
            )
        try:
            return json.loads(receive_exactly(self._socket, size, deadline))
        except OSError as error:
            raise self._error(error) from error
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the tracker {self._address} sent an answer that is no JSON") from error

    def tell(self, code: Code, *arguments: object) -> None:
        """Send a request; raise `ProtocolError` unless the tracker confirms it."""
        if self.ask(code, *arguments) != SUCCESS:
            raise ProtocolError(f"the tracker {self._address} refuses {code.name}")

    def close(self) -> None:
        self._socket.close()

    def _exchange(self, message: bytes) -> tuple[int, float]:
        """Send a message; return the answer's first int32, and the deadline (monotonic seconds) for its rest."""
        deadline = time.monotonic() + self._seconds
        try:
            self._socket.settimeout(self._seconds)
            self._socket.sendall(message)
            (number,) = _LENGTH.unpack(receive_exactly(self._socket, _LENGTH.size, deadline))
        except OSError as error:
            raise self._error(error) from error
        return number, deadline

    def _error(self, error: OSError | UnicodeError) -> TvmSplitError:
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"the tracker {self._address} did not answer within {self._seconds:g} s: is it a TVM RPC tracker?"
            )
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return WorkerUnavailableError(
            f"no tracker can be reached at {self._address} ({reason}); start one there: "
            f"`tvm-split tracker --listen 0.0.0.0:{self._address.port}`"
        )


def listed_servers(address: Address, timeout_seconds: float = DEFAULT_SECONDS) -> tuple[ListedServer, ...]:
    """Return all servers that a tracker lists now, workers and others, sorted by key and address.

    Raises:
        WorkerUnavailableError, DeadlineError, ProtocolError: as `TrackerConnection`, or the list is invalid.
    """
    with TrackerConnection(address, timeout_seconds) as tracker:
        answer = tracker.ask(Code.SUMMARY)
    match answer:
        case [0, {"server_info": list(entries)}]:
            pass
        case _:
            raise ProtocolError(f"the tracker {address} answers without a list of its servers")
    servers = []
    for entry in entries:
        try:
            servers.append(ListedServer.read(entry))
        except ProtocolError as error:  # anyone can register an invalid entry; keep the others
            logger.warning("left out of what the tracker %s lists: %s", address, error)
    return tuple(sorted(servers, key=lambda server: (server.key, server.address.host, server.address.port)))


def require_key(key: str) -> str:
    """Return the key if a tracker and TVM's clients, which split keys at colons and blanks, can parse it.

    Raises:
        InputError: the key is empty, too long, not printable, or contains a colon or blank.
    """
    if not 0 < len(key) <= MAXIMUM_KEY_LETTERS or not key.isprintable() or ":" in key or " " in key:
        raise InputError(f"a key is a text of 1 to {MAXIMUM_KEY_LETTERS} letters without colon or blank, got {key!r}")
    return key
