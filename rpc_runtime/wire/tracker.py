"""TVM's RPC tracker, spoken with as TVM 0.27 does it (``tvm/rpc/tracker.py``, ``tvm/rpc/base.py``), and what is
registered there for a worker.

Each side sends the magic number once, then messages: a length (int32, little endian) and so many bytes of JSON. A
server is listed as long as the connection over which it gave its information lasts; what it offers to clients (a key, a
port, and a random ``matchkey`` that lets in the one client who is given it) is withdrawn with that connection too.
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
from rpc_runtime.wire.foreign_text import cleaned
from rpc_runtime.wire.security import split_address

logger = logging.getLogger(__name__)

RPC_MAGIC = 0xFF271
"""Begins a connection to one who offers himself."""
RPC_MISMATCH = RPC_MAGIC + 2
TRACKER_MAGIC = 0x2F271
SUCCESS = 0
MAXIMUM_REPLY_BYTES = 16 << 20
"""Some ten thousand servers."""
MAXIMUM_KEY_LETTERS = 128
DEFAULT_SECONDS = 5.0
INFORMATION = "tvm_split"
"""Where, in what a server says of itself, a worker says what only this project wants to know."""
_LENGTH = struct.Struct("<i")


class Code(IntEnum):
    """What a message wants of the tracker."""

    PING = 1
    PUT = 3
    UPDATE_INFO = 5
    SUMMARY = 6
    GET_PENDING_MATCHKEYS = 7


@dataclass(frozen=True)
class TrackerAddress:
    """Where a tracker listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TrackerAddress:
        """From HOST:PORT; an IPv6 host stands in brackets.

        Raises:
            InputError: it is none.
        """
        host, port = split_address(text)
        if port == 0:
            raise InputError(f"no tracker listens on port 0, as {text!r} says")
        return cls(host.strip("[]"), port)

    def __str__(self) -> str:
        return joined(self.host, self.port)


def joined(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


State = Literal["ready", "deployed", "tuning"]


@dataclass(frozen=True)
class Registration:
    """What a worker says of itself at a tracker, beside its key and address.

    ``tunes`` is whether TVM's RPC may tune kernels there; ``since`` is when the worker started, in seconds since 1970,
    by which one that came back is told from what is left of it in the list.
    """

    name: str
    threads: int
    secure: bool
    tunes: bool
    state: State
    since: float


@dataclass(frozen=True)
class ListedServer:
    """An entry of a tracker's list: a worker, or with no ``registration`` a server of TVM's own RPC."""

    key: str
    host: str
    port: int
    registration: Registration | None = None
    fault: str = ""
    """What is wrong with what it says of itself."""

    @property
    def address(self) -> str:
        return joined(self.host, self.port)

    @classmethod
    def read(cls, entry: object) -> ListedServer:
        """Return the server of an entry of a tracker's list; one that says of itself what no worker says has a fault.

        Raises:
            ProtocolError: it is no entry of a server.
        """
        match entry:
            case {"key": str(key), "addr": [str(host), int(port)], **rest} if (
                len(key) <= len("server:") + MAXIMUM_KEY_LETTERS
                and key.startswith("server:")
                and _is_text(host, 253)
                and port is not True
                and 0 < port < 1 << 16
            ):
                key = cleaned(key.removeprefix("server:"))
            case _:
                raise ProtocolError(
                    f"an entry has no key 'server:KEY' and address [HOST, PORT]: {cleaned(repr(entry))}"
                )
        if INFORMATION not in rest:
            return cls(key, host, port)
        registration = _registration(rest[INFORMATION])
        fault = "" if registration else "it says of itself what no worker of this version does"
        return cls(key, host, port, registration, fault)


def _registration(said: object) -> Registration | None:
    """What a worker says of itself; None if no worker says so."""
    match said:
        case {
            "name": str(name),
            "threads": int(threads),
            "secure": bool(secure),
            "tunes": bool(tunes),
            "state": "ready" | "deployed" | "tuning" as state,
            "since": float(since),
        } if _is_text(name, MAXIMUM_KEY_LETTERS) and threads is not True and 0 < threads < 1 << 16:
            return Registration(name, threads, secure, tunes, state, since)
    return None


def _is_text(text: str, letters: int) -> bool:
    """Whether a text has 1 to so many printable letters."""
    return 0 < len(text) <= letters and text.isprintable()


def information(key: str, host: str | None, port: int, registration: Registration) -> dict[str, Any]:
    """What `Code.UPDATE_INFO` takes of a worker; without ``host`` the tracker puts in where it is called from."""
    return {"key": f"server:{key}", "addr": [host, port], INFORMATION: asdict(registration)}


class TrackerConnection(Closing):
    """A connection to a tracker; connecting, and each question with its answer, may take ``timeout_seconds``.

    Raises:
        WorkerUnavailableError: nobody listens there, or the connection ended.
        DeadlineError: no answer in time.
        ProtocolError: it is no tracker, or answers nonsense.
    """

    def __init__(self, address: TrackerAddress, timeout_seconds: float = DEFAULT_SECONDS) -> None:
        self._address = address
        self._seconds = timeout_seconds
        deadline = time.monotonic() + timeout_seconds
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout_seconds)
        except (OSError, UnicodeError) as error:
            raise self._unavailable(error) from error
        try:
            self._send(_LENGTH.pack(TRACKER_MAGIC), deadline)
            (magic,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
            if magic != TRACKER_MAGIC:
                raise ProtocolError(f"who answers at {address} is no TVM RPC tracker: it begins with {magic:#x}")
        except BaseException:
            self.close()
            raise

    def ask(self, code: Code, *arguments: object) -> Any:
        """What the tracker answers; any JSON."""
        deadline = time.monotonic() + self._seconds
        message = json.dumps([int(code), *arguments]).encode()
        self._send(_LENGTH.pack(len(message)) + message, deadline)
        (size,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
        if not 0 < size <= MAXIMUM_REPLY_BYTES:
            raise ProtocolError(
                f"the tracker {self._address} announces an answer of {size} bytes; 1 to {MAXIMUM_REPLY_BYTES} are read"
            )
        try:
            return json.loads(self._receive(size, deadline))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the tracker {self._address} answers what is no JSON") from error

    def tell(self, code: Code, *arguments: object) -> None:
        """Raises `ProtocolError` if the tracker does not say that it is done."""
        if self.ask(code, *arguments) != SUCCESS:
            raise ProtocolError(f"the tracker {self._address} refuses {code.name}")

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes, deadline: float) -> None:
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(data)
        except OSError as error:
            raise self._error(error) from error

    def _receive(self, size: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self._socket.recv(min(size - len(found), 1 << 16))
            except OSError as error:
                raise self._error(error) from error
            if not part:
                raise WorkerUnavailableError(
                    f"the tracker {self._address} closed the connection: is it a TVM RPC tracker?"
                )
            found += part
        return bytes(found)

    def _error(self, error: OSError) -> TvmSplitError:
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"the tracker {self._address} did not answer within {self._seconds:g} s: is it a TVM RPC tracker?"
            )
        return self._unavailable(error)

    def _unavailable(self, error: OSError | UnicodeError) -> WorkerUnavailableError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return WorkerUnavailableError(
            f"no tracker can be reached at {self._address} ({reason}); start one there: "
            f"`python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {self._address.port}`"
        )


def listed_servers(address: TrackerAddress, timeout_seconds: float = DEFAULT_SECONDS) -> tuple[ListedServer, ...]:
    """All that a tracker lists now, workers and others, by key and address.

    Raises:
        WorkerUnavailableError, DeadlineError, ProtocolError: as `TrackerConnection`, or its list is none.
    """
    with TrackerConnection(address, timeout_seconds) as tracker:
        answer = tracker.ask(Code.SUMMARY)
    match answer:
        case [0, {"server_info": list(entries)}]:
            pass
        case _:
            raise ProtocolError(f"the tracker {address} answers without a list of its servers")
    found = []
    for entry in entries:
        try:
            found.append(ListedServer.read(entry))
        except ProtocolError as error:  # whoever reaches the tracker can put one there: the others stay
            logger.warning("left out of what the tracker %s lists: %s", address, error)
    return tuple(sorted(found, key=lambda each: (each.key, each.host, each.port)))


def require_key(key: str) -> str:
    """A key that a tracker, and TVM's own clients, can take apart again: they split it at colons and blanks.

    Raises:
        InputError: it is none.
    """
    if not 0 < len(key) <= MAXIMUM_KEY_LETTERS or not key.isprintable() or ":" in key or " " in key:
        raise InputError(f"a key is a text of 1 to {MAXIMUM_KEY_LETTERS} letters without colon or blank, got {key!r}")
    return key
