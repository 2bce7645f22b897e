"""Serves TVM's own RPC next to a worker, so that kernels can be tuned on its machine through a tracker: ``python -m``.

A session runs any code that its client sends, and TVM's RPC has no authentication. So it has a process of its own. The
process imports TVM's runtime once and has only one thread, so that it can fork: each session runs in a child, one at a
time. The worker holds the other ends of standard input and output. It writes ``offer`` or ``withdraw``, a line each,
and reads ``session`` and ``idle``; the process ends when its input ends.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import struct
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.execution.cuda_runtime import gpu_facts
from rpc_runtime.processes import ForkedChild
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.tracker import (
    MAXIMUM_KEY_LETTERS,
    RPC_MAGIC,
    RPC_MISMATCH,
    Code,
    TrackerConnection,
    TrackerEntry,
    receive_exactly,
)
from rpc_runtime.worker.runtime_alone import load_runtime

LOOK_SECONDS = 2.0
"""Interval of checks of the tracker, the same as in TVM's own servers."""
GREETING_SECONDS = 2.0
UNUSED_LOOKS = 3
"""Number of checks after which an offer that was given to a client but not used is renewed."""
MAXIMUM_GREETING_BYTES = 4 * MAXIMUM_KEY_LETTERS
UNKNOWN_CACHE_BYTES = 128 << 20
"""Assumed L2 cache size if a GPU does not report it: more than any GPU had when this was written."""
_TIMEOUT_OPTION = "-timeout="


class Offer:
    """An offer of this machine to one client of the tracker.

    Raises:
        TvmSplitError: the tracker cannot be used now.
    """

    def __init__(self, entry: TrackerEntry, port: int) -> None:
        self._matchkey = f"{entry.key}:{token_hex(8)}"
        self.greeting = f"client:{self._matchkey}"
        self._unused = 0
        self._tracker = TrackerConnection(entry.tracker)
        try:
            # The tracker drops a closed connection's offers only if it had sent a key. The worker itself is listed.
            about = {"key": f"offer:{entry.key}", "addr": [entry.host, port]}
            self._tracker.tell(Code.UPDATE_INFO, about)
            self._tracker.tell(Code.PUT, entry.key, [port, self._matchkey], entry.host)
        except BaseException:
            self.close()
            raise

    def is_open(self) -> bool:
        """Ask the tracker for this offer; return whether a client may still connect with it."""
        pending = self._tracker.ask(Code.GET_PENDING_MATCHKEYS)
        self._unused = 0 if isinstance(pending, list) and self._matchkey in pending else self._unused + 1
        return self._unused < UNUSED_LOOKS

    def close(self) -> None:
        self._tracker.close()


class Session:
    """Serves a client in a child process with its own folder, until the client disconnects or ``seconds`` are over."""

    def __init__(self, connection: socket.socket, seconds: float | None) -> None:
        self._connection = connection
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory(prefix="tvm-split-tuning-", ignore_cleanup_errors=True)
        self._child = ForkedChild(partial(_serve, connection, Path(self._folder.name)), seconds or 0.0)
        self.ended = self._child.ended

    def close(self) -> None:
        if self._child.end() == -signal.SIGALRM:
            import tvm_ffi

            with contextlib.suppress(Exception):  # the client has disconnected
                self._connection.settimeout(GREETING_SECONDS)
                text = f"RPCSessionTimeoutError: the {self._seconds:g} s that the client asked for are over"
                tvm_ffi.get_global_func("rpc.ReturnException")(self._connection.fileno(), text)
        self._connection.close()
        self._folder.cleanup()


class Server:
    """The event loop of the process: offers, clients and sessions, one event at a time."""

    def __init__(self, listening: socket.socket, entry: TrackerEntry) -> None:
        self._listening = listening
        self._entry = entry
        self._wanted = False
        self._offer: Offer | None = None
        self._session: Session | None = None

    def run(self) -> None:
        looked = 0.0
        while True:
            session = self._session
            wait_for: list[Any] = [0, self._listening, *([] if session is None else [session.ended])]
            ready, _, _ = select.select(wait_for, [], [], LOOK_SECONDS)
            if 0 in ready:
                lines = os.read(0, 4096).split()
                if not lines:  # the worker has ended
                    return
                self._wanted = lines[-1] == b"offer"
            if session is not None and session.ended in ready:
                self._session = None
                session.close()
                _say("idle")
            if self._listening in ready:
                self._take_in()
            if time.monotonic() - looked >= LOOK_SECONDS or self._wanted == (self._offer is None):
                looked = time.monotonic()
                self._keep_offer()

    def close(self) -> None:
        self._withdraw()
        if self._session is not None:
            self._session.close()

    def _keep_offer(self) -> None:
        """Keep an offer open while it is wanted and no session runs; renew it if the tracker has lost it."""
        if not self._wanted or self._session is not None:
            self._withdraw()
            return
        try:
            if self._offer is None or not self._offer.is_open():
                self._withdraw()
                self._offer = Offer(self._entry, self._listening.getsockname()[1])
        except TvmSplitError:  # the worker has its own connection to the tracker and logs the problem
            self._withdraw()

    def _withdraw(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None

    def _take_in(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        expected = None if self._offer is None or self._session is not None else self._offer.greeting
        try:
            options = _greet(connection, expected, f"server:{self._entry.key}")
        except (OSError, ValueError):
            options = None
        if options is None:
            connection.close()
            return
        self._withdraw()
        self._session = Session(connection, _seconds_in(options))
        _say("session")


def _greet(connection: socket.socket, expected: str | None, own_key: str) -> list[str] | None:
    """Return the options of a client that has the offered key; reject another client and return None.

    Raises:
        OSError, ValueError: the client does not speak TVM's RPC, or sent nothing in time.
    """
    deadline = time.monotonic() + GREETING_SECONDS
    magic, size = struct.unpack("<ii", receive_exactly(connection, 8, deadline))
    if magic != RPC_MAGIC or not 0 < size <= MAXIMUM_GREETING_BYTES:
        raise ValueError("it does not speak TVM's RPC")
    greeting, *options = receive_exactly(connection, size, deadline).decode().split() or [""]
    if expected is None or greeting != expected:
        connection.sendall(struct.pack("<i", RPC_MISMATCH))
        return None
    key = own_key.encode()
    connection.sendall(struct.pack("<ii", RPC_MAGIC, len(key)) + key)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a client that was switched off
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    return options


def _seconds_in(options: list[str]) -> float | None:
    """Return the time limit of a session in seconds if its client gives one, else None."""
    for option in options:
        if option.startswith(_TIMEOUT_OPTION):
            with contextlib.suppress(ValueError):
                seconds = float(option.removeprefix(_TIMEOUT_OPTION))
                return seconds if 0 < seconds < 1e9 else None
    return None


def _serve(connection: socket.socket, folder: Path) -> int:
    """Serve a session in the child process; return its exit code."""
    os.chdir(folder)
    _provide_functions(folder)
    import tvm_ffi

    tvm_ffi.get_global_func("rpc.ServerLoop")(connection.fileno())
    return 0


def _provide_functions(folder: Path) -> None:
    """Register the functions that TVM's server needs, the path of an uploaded file and loading it, and our own."""
    import tvm
    import tvm_ffi

    def path_of(name: str) -> str:
        return str(folder / Path(name).name) if name else str(folder)

    def load(name: str) -> Any:
        return tvm.runtime.load_module(path_of(name))

    tvm_ffi.register_global_func("tvm.rpc.server.workpath", path_of, override=True)
    tvm_ffi.register_global_func("tvm.rpc.server.load_module", load, override=True)
    # `schedules.tuning.devices` calls these by name.
    tvm_ffi.register_global_func("tvm_split.tuning.gpu", describe_gpu, override=True)
    tvm_ffi.register_global_func("tvm_split.tuning.evict", evict, override=True)


def describe_gpu() -> str:
    """Return JSON about the first GPU, on which kernels are measured: its `gpu_facts` and the ``hostname``."""
    return json.dumps({"hostname": socket.gethostname(), **gpu_facts()})


def evict(*arguments: Any) -> None:
    """Fill the L2 cache of the arguments' GPU with other data, and then with the first argument.

    Copies on the device go through that cache. They use the stream of the kernels, so that a later timed run begins
    after them.
    """
    first = arguments[0]
    source, destination = _cache_fillers(first.device)
    source.copyto(destination)
    copy_of_first = _empty(first.shape, str(first.dtype), first.device)
    first.copyto(copy_of_first)


@cache
def _cache_fillers(device: Any) -> tuple[Any, Any]:
    """Return two tensors, each of twice the L2 cache's size; they are kept during the session."""
    size = 2 * (device.l2_cache_size_bytes or UNKNOWN_CACHE_BYTES)
    return _empty((size,), "uint8", device), _empty((size,), "uint8", device)


@cache
def _empty(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    import tvm

    return tvm.runtime.empty(shape, dtype, device)


def _say(word: str) -> None:
    with contextlib.suppress(OSError):  # the worker has ended; the input then ends, too
        os.write(1, word.encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listening", type=int, required=True, help="the file descriptor of a listening socket")
    parser.add_argument("--tracker", type=Address.callable, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--host")
    arguments = parser.parse_args()
    load_runtime()
    listening = socket.socket(fileno=arguments.listening)
    listening.settimeout(GREETING_SECONDS)
    server = Server(listening, TrackerEntry(arguments.tracker, arguments.key, arguments.host))
    try:
        server.run()
    finally:
        server.close()


if __name__ == "__main__":
    main()
