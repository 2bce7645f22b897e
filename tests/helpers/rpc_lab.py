"""A real TVM RPC tracker and server processes on loopback; at the end, each is killed with all its children."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rpc_runtime.processes import Closing
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.tracker import ListedServer, listed_servers
from schedules.tuning.devices import Tracker
from schedules.tuning.errors import DeviceError
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS, eventually
from tvm_split.tuning import tracker_at

KEY = "lab"
NO_TORCH = 'raise ModuleNotFoundError("machines of a lab have none", name="torch")'
"""A replacement for torch: TVM imports torch wherever it is installed, which takes twice as long as everything else."""


class RpcLab(Closing):
    """A tracker and ``servers`` devices of key `KEY`. A context manager.

    ``environment`` is that of its processes.
    """

    def __init__(self, folder: Path, servers: int, threads: int = 1) -> None:
        self._folder = folder
        self._log = (folder / "lab.log").open("ab")
        (folder / "modules").mkdir()
        (folder / "modules/torch.py").write_text(NO_TORCH)
        path = os.pathsep.join(filter(None, (str(folder / "modules"), str(ROOT), os.environ.get("PYTHONPATH"))))
        self.environment = {**os.environ, "PYTHONPATH": path}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self.servers: list[subprocess.Popen[bytes]] = []
        try:
            self._tracker = self._start_tracker()
            # A server that does not reach the tracker retries only after five seconds.
            self._wait_for(self._tracker_answers)
            for _ in range(servers):
                self.start_server(threads)
            if servers:
                self._wait_for(lambda: self.count() == servers)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def tracker(self, **options: float) -> Tracker:
        return tracker_at(Address("127.0.0.1", self.port), KEY, **options)

    def count(self) -> int:
        try:
            return self.tracker().count_devices()
        except DeviceError:
            return 0

    def start_server(self, threads: int = 1) -> None:
        port = free_port()
        options = ("--host", "127.0.0.1", "--silent", "--port", str(port), "--port-end", str(port + 1))
        options += ("--tracker", self.address, "--key", KEY, "--custom-addr", "127.0.0.1")
        self.servers.append(self._run("tvm.exec.rpc_server", *options, threads=threads))

    def start_worker(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a worker of key `KEY` that trusts all callers, unless ``options`` say otherwise."""
        where = ("--tracker", self.address, "--key", KEY, f"--name={name}", "--cache", str(self._folder / name))
        return self._run("rpc_runtime.worker", *where, *(options or ("--insecure",)))

    def listed(self) -> list[ListedServer]:
        return list(listed_servers(Address("127.0.0.1", self.port)))

    def wait_listed(self, condition: Callable[[dict[str, ListedServer]], bool]) -> dict[str, ListedServer]:
        """Return everything listed, by the name of its worker or else its address, once ``condition`` holds."""

        def look() -> dict[str, ListedServer]:
            servers = {
                server.registration.name if server.registration else str(server.address): server
                for server in self.listed()
            }
            return servers if condition(servers) else {}

        return eventually(look, f"the tracker lists what is expected; the lab's log is {self._log.name}")

    def restart_tracker(self) -> None:
        """Restart a server, as if its machine were switched off and on again."""
        kill_group(self._tracker)
        self._tracker = self._start_tracker()
        self._wait_for(self._tracker_answers)

    def kill_server(self, index: int) -> None:
        """Kill the server and everything that it runs at once, as if the machine lost its power."""
        kill_group(self.servers[index])

    def close(self) -> None:
        for process in self._processes:
            kill_group(process)
        self._log.close()

    def _start_tracker(self) -> subprocess.Popen[bytes]:
        return self._run("tvm_split", "tracker", "--listen", self.address)

    def _run(self, module: str, *options: str, threads: int = 1) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *options]
        environment = {**self.environment, "TVM_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def _tracker_answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        eventually(condition, f"the lab has started; its log is {self._log.name}")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
