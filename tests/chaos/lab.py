"""Worker processes that faults hit. Each has its address, its cache and its log, and is started again if it has ended.

Workers on loopback share memory. Those at a switch are in network namespaces, so that their packets can be dropped;
they need root. So does a cache on a disk of its own, which can be full.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import psutil

from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TOKEN_VARIABLE
from tests.chaos.task import MACHINES, more_than
from tests.helpers.mappings import held_by
from tests.helpers.relay import Relay
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.shaped_network import Space, space_at, switch

TOKEN = "chaos"
PORTS = range(20_000, 30_000)
"""Ports that systems give to no outgoing connection, so that a worker finds its own again."""
CACHE_BYTES = 64 << 20
MORE_THREADS = 16
"""Threads that a worker may keep: its pool grows with the number of calls at a time, and never shrinks."""


class Worker:
    """A worker process of a machine; ``space`` is its network namespace, if any."""

    def __init__(self, machine: str, folder: Path, space: Space | None, until_end: ExitStack) -> None:
        self.machine, self.space = machine, space
        self.cache, self.log = folder / "cache", folder / "log"
        self.cache.mkdir(parents=True)
        self.has_own_disk = _mounted(self.cache, until_end)
        host = space.host if space is not None else "127.0.0.1"
        self.address = f"{host}:{_free_port(host if space is None else '127.0.0.1')}"
        self._within = [] if space is None else space.within
        self.process: subprocess.Popen[str] | None = None
        self.resting: Counter[str] = Counter()
        """What it held when it was ready."""
        until_end.callback(self.end)

    def start(self) -> None:
        """Start the process, if it does not run; `wait_ready` waits for it."""
        if self.is_running:
            return
        self.end()
        command = [*self._within, sys.executable, "-m", "rpc_runtime.worker", "--json", "--exit-with-parent"]
        command += ["--name", self.machine, "--listen", self.address, "--cache", str(self.cache), "--log-level", "info"]
        command += [] if self.space is None else ["--insecure"]
        environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        self.resting = Counter()

    def wait_ready(self) -> None:
        assert self.process is not None
        if not self.resting:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, f"{self.machine} does not start: {self.log.read_text()[-2000:]}"
            assert json.loads(line)["address"] == self.address
            self.resting = held_by(self.process.pid)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def endpoint(self) -> WorkerEndpoint:
        return self.endpoint_at(self.address)

    def endpoint_at(self, address: str) -> WorkerEndpoint:
        return WorkerEndpoint(self.machine, address, TOKEN)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def left(self) -> str:
        """Return what the worker still has of its deployments, as text."""
        assert self.process is not None
        try:
            if deployments := describe(self.endpoint).deployments:
                return f"{self.machine} has {len(deployments)} deployments"
            more = more_than(self.resting, held_by(self.process.pid), MORE_THREADS)
        except (TvmSplitError, OSError, psutil.Error) as error:
            return f"{self.machine}: {error}"
        return f"{self.machine} has {more}" if more else ""

    def empty_cache(self) -> None:
        for path in (self.cache / "blobs").glob("*/*"):
            path.unlink()

    def end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def _mounted(folder: Path, until_end: ExitStack) -> bool:
    """Mount a small disk of its own; return whether that was possible."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={CACHE_BYTES},mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    until_end.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=False)
    return True


def _free_port(host: str) -> int:
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"no port of {PORTS} is free")


_PORTS = iter(range(PORTS.start + os.getpid() % 5000 * 2, PORTS.stop))
"""Other ports in each run, also for runs at the same time."""


class Lab:
    """Workers on loopback and, where it is possible, at a switch. They start when they are first needed."""

    def __init__(self, folder: Path, until_end: ExitStack) -> None:
        self._folder, self._until_end = folder, until_end
        self._all: dict[tuple[str, bool], Worker] = {}

    def workers(self, machines: Sequence[str], *, at_switch: bool) -> dict[str, Worker]:
        """Return running workers of these machines."""
        chosen = {machine: self._worker(machine, at_switch) for machine in machines}
        for worker in chosen.values():
            worker.start()
        for worker in chosen.values():
            worker.wait_ready()
        return chosen

    def _worker(self, machine: str, at_switch: bool) -> Worker:
        if (machine, at_switch) not in self._all:
            number = MACHINES.index(machine)
            space = self._until_end.enter_context(space_at(self.bridge, number)) if at_switch else None
            folder = self._folder / f"{machine}{'-at-switch' * at_switch}"
            self._all[machine, at_switch] = Worker(machine, folder, space, self._until_end)
        return self._all[machine, at_switch]

    @cached_property
    def bridge(self) -> str:
        """The switch; empty if this process cannot make one."""
        try:
            return self._until_end.enter_context(switch())
        except (OSError, subprocess.CalledProcessError):
            return ""

    @cached_property
    def has_disks(self) -> bool:
        return self._worker(MACHINES[0], False).has_own_disk

    def logs(self) -> dict[str, str]:
        return {worker.log.parent.name: worker.log.read_text() for worker in self._all.values() if worker.log.exists()}


@contextlib.contextmanager
def relayed(workers: dict[str, Worker], machines: Sequence[str]) -> Iterator[dict[str, Relay]]:
    """Yield relays in front of some machines."""
    with ExitStack() as until_end:
        yield {machine: until_end.enter_context(Relay(workers[machine].address)) for machine in machines}
