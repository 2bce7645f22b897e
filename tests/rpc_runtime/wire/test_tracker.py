"""Data from a tracker is validated, and no call waits for it longer than its timeout."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from rpc_runtime.errors import DeadlineError, ProtocolError, WorkerUnavailableError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.tracker import MAXIMUM_REPLY_BYTES, TRACKER_MAGIC, Registration, information, listed_servers
from tests.helpers.waiting import PATIENCE_SECONDS

MAGIC = struct.pack("<i", TRACKER_MAGIC)
SAID = Registration("box", 4, secure=False, tunes=True, state="ready", since=1.5)
ENTRY = information("lab", "192.0.2.7", 7001, SAID)


@contextmanager
def tracker_that(answers: Callable[[socket.socket], None]) -> Iterator[Address]:
    """A tracker that handles its only caller in this way, and waits until it has disconnected."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):  # the caller may have disconnected
            connection.settimeout(PATIENCE_SECONDS)
            answers(connection)
            while connection.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address("127.0.0.1", listening.getsockname()[1])
        finally:
            thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def message(value: Any) -> bytes:
    return sized(json.dumps(value).encode())


def sized(data: bytes) -> bytes:
    return struct.pack("<i", len(data)) + data


def listing(*entries: Any) -> bytes:
    return MAGIC + message([0, {"queue_info": {}, "server_info": list(entries)}])


def test_a_worker_and_a_server_are_told_apart() -> None:
    server = {"key": "server:pi", "addr": ["192.0.2.8", 9090]}
    with tracker_that(lambda caller: caller.sendall(listing(server, ENTRY))) as address:
        worker, plain = listed_servers(address)
    assert (worker.key, str(worker.address), worker.registration) == ("lab", "192.0.2.7:7001", SAID)
    assert (plain.key, str(plain.address), plain.registration) == ("pi", "192.0.2.8:9090", None)


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        {"key": "server:lab"},
        {"key": "client:lab", "addr": ["192.0.2.7", 1]},
        {"key": "server:lab", "addr": ["192.0.2.7", 0]},
        {"key": "server:lab", "addr": ["192.0.2.7\x1b[2J", 1]},
        {"key": "server:lab", "addr": ["http://192.0.2.7", 1]},
    ],
)
def test_an_invalid_entry_leaves_the_others(wrong: Any) -> None:
    with tracker_that(lambda caller: caller.sendall(listing(wrong, ENTRY))) as address:
        (server,) = listed_servers(address)
    assert server.registration == SAID


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "two\nlines"},
        {"threads": 0},
        {"state": "tired"},
        {"since": None},
    ],
    ids=str,
)
def test_an_invalid_registration_is_a_fault(change: dict[str, Any]) -> None:
    entry = {**ENTRY, "tvm_split": {**ENTRY["tvm_split"], **change}}
    with tracker_that(lambda caller: caller.sendall(listing(entry))) as address:
        (server,) = listed_servers(address)
    assert server.is_invalid
    assert server.registration is None


@pytest.mark.parametrize(
    ("sent", "error", "text"),
    [
        (b"", DeadlineError, "did not answer within 0.3 s"),
        (b"HTTP/1.1 400", ProtocolError, "is not a TVM RPC tracker"),
        (MAGIC, DeadlineError, "did not answer within 0.3 s"),
        (MAGIC + struct.pack("<i", -5), ProtocolError, "announces an answer of -5 bytes"),
        (MAGIC + struct.pack("<i", MAXIMUM_REPLY_BYTES + 1), ProtocolError, "announces an answer of"),
        (MAGIC + struct.pack("<i", 100) + b"[0", DeadlineError, "did not answer within 0.3 s"),
        (MAGIC + sized(b"\xff\xfe{"), ProtocolError, "no JSON"),
        (MAGIC + sized(b"[" * 100_000), ProtocolError, "no JSON"),
        (MAGIC + message([0, []]), ProtocolError, "without a list of its servers"),
        (MAGIC + message([-1, {"server_info": []}]), ProtocolError, "without a list of its servers"),
    ],
)
def test_a_tracker_that_is_none_is_an_error_in_time(sent: bytes, error: type[Exception], text: str) -> None:
    seconds = 0.3 if error is DeadlineError else PATIENCE_SECONDS
    with tracker_that(lambda caller: caller.sendall(sent)) as address, pytest.raises(error, match=text) as raised:
        listed_servers(address, timeout_seconds=seconds)
    assert str(address) in str(raised.value)


def test_a_tracker_that_hangs_up_or_does_not_listen() -> None:
    hang_up = lambda caller: caller.shutdown(socket.SHUT_RDWR)  # noqa: E731
    with tracker_that(hang_up) as address, pytest.raises(WorkerUnavailableError, match="closed the connection"):
        listed_servers(address)
    with pytest.raises(WorkerUnavailableError, match="start one there: `tvm-split tracker --listen"):
        listed_servers(address)
