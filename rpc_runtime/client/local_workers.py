"""Worker processes on this host, to try things out and to use several cores: start, find, and surely end them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from rpc_runtime.errors import DeadlineError, InputError, WorkerUnavailableError
from rpc_runtime.hardware import own_cores
from rpc_runtime.processes import Closing, OwnProcess, before_end, cleared, module_command, module_environment
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TOKEN_VARIABLE, is_loopback
from rpc_runtime.wire.tracker import joined

logger = logging.getLogger(__name__)

TERMINATE_SECONDS = 5.0
STARTING_PER_CORE = 4
"""Of many workers so many start at once: if all did, on few cores none would be ready in time."""


def most_at_once() -> int:
    """How many workers start at once where nothing else is going on."""
    return STARTING_PER_CORE * own_cores().count


def beside_this_thread() -> int:
    """How many, where each keeps a core busy and this process wants one."""
    return max(1, own_cores().count - 1)


class LocalWorkers(Closing):
    """One worker process per name, with a random token, or the one given; on loopback, unless ``host`` is another
    address of this host, where nothing but the token protects it. A context manager.

    With enough cores for all, each worker gets ``threads`` cores of its own (``pin=False`` leaves that to the system).
    ``cache`` is the folder for blobs, by default one that is removed at the end.
    ``environment`` is what workers have beside this process's. ``at_once`` is asked before each start how many may be
    starting.

    Raises:
        InputError: names are missing, doubled or reserved.
        WorkerUnavailableError: a worker died while it started; what it wrote is in the message.
        DeadlineError: a worker was not ready within ``start_timeout_seconds`` of its own start.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        threads: int = 1,
        cache: Path | None = None,
        pin: bool = True,
        host: str = "127.0.0.1",
        token: str | None = None,
        start_timeout_seconds: float = 60.0,
        environment: Mapping[str, str] | None = None,
        at_once: Callable[[], int] = most_at_once,
    ) -> None:
        if not names or len(set(names)) != len(names) or CLIENT in names or "" in names:
            raise InputError(f"workers need names, all different and none {CLIENT!r}, got {list(names)}")
        if threads < 1:
            raise InputError(f"a worker needs at least one thread, got {threads}")
        self._folder = ScratchFolder("workers")
        self._token = token or secrets.token_hex(16)
        self._host, self._environment = host, environment or {}
        self._threads, self._cache, self._start_timeout_seconds = threads, cache, start_timeout_seconds
        self._cores = dict(zip(names, _cores(len(names), threads, pin), strict=True))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._endpoints: dict[str, WorkerEndpoint] = {}
        self._closed = False
        self._own_process = OwnProcess()
        before_end(self, self.close)
        try:
            starting: deque[tuple[str, float]] = deque()
            for name in names:
                while len(starting) >= at_once():
                    self._await_ready(*starting.popleft())
                self._processes[name] = self._start(name)
                starting.append((name, time.monotonic() + start_timeout_seconds))
            for each in starting:
                self._await_ready(*each)
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        return dict(self._endpoints)

    @property
    def process_ids(self) -> Mapping[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def ended(self) -> tuple[str, ...]:
        """The names of workers whose processes have ended."""
        return tuple(name for name, process in self._processes.items() if process.poll() is not None)

    def restart(self, name: str) -> WorkerEndpoint:
        """End a worker, if it still runs, and start it again with the same cores and cache; return where it listens.

        Raises:
            WorkerUnavailableError: it died while it started.
            DeadlineError: it was not ready in time.
        """
        process = self._processes[name]
        process.kill()
        process.wait()
        _close_pipes(process)
        self._processes[name] = self._start(name)
        self._await_ready(name, time.monotonic() + self._start_timeout_seconds)
        return self._endpoints[name]

    def messages(self, name: str) -> str:
        """What a worker wrote to its standard error, at most the last 4000 letters."""
        try:
            return self._log(name).read_text(encoding="utf-8", errors="replace")[-4000:].strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Ends all workers; returns when they are gone. May be called again; no concern of a fork's."""
        if self._closed or not self._own_process.is_this:
            return
        self._closed = True
        cleared(self)
        processes = list(self._processes.values())  # one may be starting in another thread
        for process in processes:
            with contextlib.suppress(OSError):
                process.terminate()
                process.send_signal(signal.SIGCONT)  # one that was stopped could not end
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close_pipes(process)
        self._folder.close()

    def _log(self, name: str) -> Path:
        return self._folder.path / f"{list(self._cores).index(name)}.log"

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        cores = self._cores[name]
        command = [*module_command("worker"), "--exit-with-parent", f"--name={name}"]
        command += [f"--threads={self._threads}", f"--cache={self._cache or self._folder.path / 'blobs'}"]
        command += ["--listen", joined(self._host, 0), *([] if is_loopback(self._host) else ["--insecure"])]
        if cores:
            command += ["--cores", ",".join(map(str, cores))]
        with self._log(name).open("wb") as log:
            return subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                command,
                stdin=subprocess.PIPE,  # its end tells the worker that this process has gone, however it went
                stdout=subprocess.PIPE,
                stderr=log,
                env=module_environment(**{**self._environment, TOKEN_VARIABLE: self._token}),
                start_new_session=True,  # Ctrl-C in the terminal is for this process, which then ends the workers
            )

    def _await_ready(self, name: str, deadline: float) -> None:
        address = self._wait_ready(name, deadline)
        self._endpoints[name] = WorkerEndpoint(name, address, self._token)
        logger.info("%s runs as process %d", self._endpoints[name], self._processes[name].pid)

    def _wait_ready(self, name: str, deadline: float) -> str:
        process = self._processes[name]
        line = _read_line(process.stdout, deadline) if process.stdout is not None else None
        if line is None:
            raise DeadlineError(
                f"worker {name!r} was not ready within {self._start_timeout_seconds:g} seconds. {self._quoted(name)}"
            )
        try:
            return str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            raise WorkerUnavailableError(
                f"worker {name!r} ended with exit code {process.poll()} while it started. {self._quoted(name)}"
            ) from None

    def _quoted(self, name: str) -> str:
        return f"It wrote: {self.messages(name) or '(nothing)'}"


def _cores(workers: int, threads: int, pin: bool) -> list[tuple[int, ...]]:
    """The cores of each worker; none when there are too few for all to have their own."""
    available = own_cores().numbers
    if not pin or workers * threads > len(available):
        return [()] * workers
    return [available[index * threads : (index + 1) * threads] for index in range(workers)]


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _read_line(pipe: IO[bytes], deadline: float) -> bytes | None:
    """A line, or what came before the pipe's end; None when the deadline passes."""
    content = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not content.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            part = os.read(pipe.fileno(), 4096)
            if not part:
                return content
            content += part
    return content
