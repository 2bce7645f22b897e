"""Worker processes on this host, for experiments and for using several cores: starts and reliably ends them."""

import contextlib
import json
import logging
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from multiprocessing.connection import wait
from pathlib import Path

from rpc_runtime.errors import DeadlineError, InputError, WorkerUnavailableError
from rpc_runtime.hardware import own_cores
from rpc_runtime.processes import Closing, OwnProcess, before_end, cleared, module_command, module_environment, reap
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TOKEN_VARIABLE

logger = logging.getLogger(__name__)

TERMINATE_SECONDS = 5.0
STARTING_PER_CORE = 4
"""Workers that start at the same time per core: if many started on few cores, none would be ready in time."""


class LocalWorkers(Closing):
    """Starts one worker process per name on this host. A context manager.

    Workers listen on loopback or on ``host``, another address of this host, on which only the token protects them.
    If there are enough cores, each thread gets a core of its own; ``pin=False`` leaves that to the system.

    Args:
        threads: the number of threads of every worker, or of each worker by name.
        cache: folder for blobs; default: a temporary folder that is removed at the end.
        token: the workers' token; default: a random one.
        environment: variables added to this process's environment.

    Raises:
        InputError: names are missing, duplicate or reserved.
        WorkerUnavailableError: a worker died while it started; the message has its output.
        DeadlineError: a worker was not ready within ``start_timeout_seconds`` after its own start.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        threads: int | Mapping[str, int] = 1,
        cache: Path | None = None,
        pin: bool = True,
        host: str = "127.0.0.1",
        token: str | None = None,
        start_timeout_seconds: float = 60.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not names or len(set(names)) != len(names) or CLIENT in names or "" in names:
            raise InputError(f"workers need names, all different and none {CLIENT!r}, got {list(names)}")
        self._threads = threads if isinstance(threads, Mapping) else dict.fromkeys(names, threads)
        if min(self._threads.values()) < 1:
            raise InputError(f"a worker needs at least one thread, got {threads}")
        self._folder = ScratchFolder("workers")
        self._token = token or secrets.token_hex(16)
        self._listen, self._environment = Address(host, 0), environment or {}
        self._cache, self._start_timeout_seconds = cache, start_timeout_seconds
        self._cores = dict(zip(names, _cores([self._threads[name] for name in names], pin), strict=True))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._endpoints: dict[str, WorkerEndpoint] = {}
        self._closed = False
        self._own_process = OwnProcess()
        before_end(self, self.close)
        try:
            starting: deque[tuple[str, float]] = deque()
            for name in names:
                while len(starting) >= STARTING_PER_CORE * own_cores().count:
                    self._await_ready(*starting.popleft())
                self._processes[name] = self._start(name)
                starting.append((name, time.monotonic() + start_timeout_seconds))
            while starting:
                self._await_ready(*starting.popleft())
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
        """Kill a worker if it runs, and start it again with the same cores and cache; return its endpoint.

        Raises:
            WorkerUnavailableError: the worker died while it started.
            DeadlineError: the worker was not ready in time.
        """
        process = self._processes[name]
        process.kill()
        process.communicate()
        self._processes[name] = self._start(name)
        self._await_ready(name, time.monotonic() + self._start_timeout_seconds)
        return self._endpoints[name]

    def messages(self, name: str) -> str:
        """Return the last 4000 characters that a worker wrote to standard error; empty if there are none."""
        try:
            return self._log(name).read_text(encoding="utf-8", errors="replace")[-4000:].strip()
        except OSError:
            return ""

    def close(self) -> None:
        """End all workers and wait until they have ended. Idempotent; does nothing in a forked process."""
        if self._closed or not self._own_process.is_this:
            return
        self._closed = True
        cleared(self)
        processes = list(self._processes.values())  # one may be starting in another thread
        for process in processes:
            with contextlib.suppress(OSError):
                process.terminate()
                process.send_signal(signal.SIGINT)  # without waiting until stages are moved away
                process.send_signal(signal.SIGCONT)  # a stopped process does not handle SIGTERM
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()  # waits, and closes the pipes
        self._folder.close()

    def _log(self, name: str) -> Path:
        return self._folder.path / f"{list(self._cores).index(name)}.log"

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        cores = self._cores[name]
        command = [*module_command("worker"), "--exit-with-parent", f"--name={name}"]
        command += [f"--threads={self._threads[name]}", f"--cache={self._cache or self._folder.path / 'blobs'}"]
        command += [f"--listen={self._listen}", *([] if self._listen.is_loopback else ["--insecure"])]
        if cores:
            command += ["--cores", ",".join(map(str, cores))]
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                command,
                stdin=subprocess.PIPE,  # its end tells the worker that this process has ended, for whatever reason
                stdout=subprocess.PIPE,
                stderr=log,
                env=module_environment(**{**self._environment, TOKEN_VARIABLE: self._token}),
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which ends the workers
            )
        reap(process)
        return process

    def _await_ready(self, name: str, deadline: float) -> None:
        process = self._processes[name]
        if not wait([process.stdout], max(0.0, deadline - time.monotonic())):  # type: ignore[list-item]
            raise DeadlineError(
                f"worker {name!r} was not ready within {self._start_timeout_seconds:g} seconds. {self._quoted(name)}"
            )
        try:
            address = str(json.loads(process.stdout.readline())["address"])  # type: ignore[union-attr]
        except (ValueError, KeyError, TypeError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            raise WorkerUnavailableError(
                f"worker {name!r} ended with exit code {process.poll()} while it started. {self._quoted(name)}"
            ) from None
        self._endpoints[name] = WorkerEndpoint(name, address, self._token)
        logger.info("%s runs as process %d", self._endpoints[name], process.pid)

    def _quoted(self, name: str) -> str:
        return f"It wrote: {self.messages(name) or '(nothing)'}"


def _cores(threads: Sequence[int], pin: bool) -> list[tuple[int, ...]]:
    """Return the cores of each worker; no cores if ``pin`` is False or there are too few for all."""
    available = own_cores().numbers
    if not pin or sum(threads) > len(available):
        return [()] * len(threads)
    return [available[end - count : end] for end, count in zip(accumulate(threads), threads, strict=True)]
