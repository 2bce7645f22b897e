"""Start and end the workers of all machines of a cluster file that have ssh access."""

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from rpc_runtime.client.asking import on_every_machine, raise_errors
from rpc_runtime.client.worker_client import WorkerDescription, describe
from rpc_runtime.errors import TvmSplitError, WorkerUnavailableError
from rpc_runtime.processes import Closing, before_end, cleared
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError
from tvm_split.ssh.ssh_worker import Kits, SshWorker

AT_ONCE = 32
REACH_SECONDS = 10.0
ALSO_SECONDS = 1.0
"""Time for further errors after the first one: several unreachable machines fail at about the same time."""


class SshCluster(Closing):
    """The started and answering workers of a cluster's machines with ``ssh``. A context manager.

    They end with this object, with this process, or with the connection. With ``detach`` they keep running until
    `stop_workers`. Workers that run already are left as they are. ``on_line`` gets a machine's name and a line of its
    output. ``require_fit`` raises a `ClusterError` if the worker that answers is not the machine's.

    Raises:
        ClusterError: no machine has ``ssh``, or a worker is not the machine's.
        TvmSplitError: a machine does not start; the workers of the others have been ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        require_fit: Callable[[Machine, WorkerDescription], None],
        on_line: Callable[[str, str], None],
        detach: bool = False,
    ) -> None:
        machines = reached_by_ssh(cluster)
        self._workers = [SshWorker(machine, on_line) for machine in machines]
        self._detached: list[Machine] = []
        """Machines whose workers are detached already, while others are still starting."""
        before_end(self, self.close)
        kits = Kits()

        def start(worker: SshWorker) -> None:
            process = worker.start(kits, detach)
            if detach and not worker.ran_before:
                self._detached.append(worker.machine)
            require_fit(worker.machine, _answer(worker))
            verb = "runs already, and answers" if worker.ran_before else "answers"
            on_line(worker.machine.name, f"{verb} at {worker.machine.address} (process {process} there)")

        try:
            _all(self._workers, start)
        except BaseException:
            self.close()
            raise
        if detach:
            self._detached.clear()
            self.close()

    @property
    def started(self) -> list[SshWorker]:
        """The workers that did not run before."""
        return [worker for worker in self._workers if not worker.ran_before]

    def wait(self) -> None:
        """Wait until one of the workers that were started here ends, which is an error; return if there is none."""
        _all(self.started, SshWorker.wait)

    def close(self) -> None:
        """End all workers that are not detached, and return when they have ended. May be called again."""
        cleared(self)
        threads = [threading.Thread(target=worker.close) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        started, self._detached = self._detached, []
        with contextlib.suppress(TvmSplitError):  # the error that led here is the one to report
            _stop_all(started, remove=False)


def stop_workers(cluster: Cluster, remove: bool) -> dict[str, int]:
    """End the workers that this or another process started with `SshCluster`; with ``remove``, delete their folders.

    Return the workers' process numbers by machine, 0 for none.

    Raises:
        TvmSplitError: a machine cannot be reached, or its worker does not end; the workers of the others have ended.
    """
    return _stop_all(reached_by_ssh(cluster), remove)


def _stop_all(machines: Iterable[Machine], remove: bool) -> dict[str, int]:
    """End the machines' workers; raise an error only after all others have ended."""
    workers = {machine.name: SshWorker(machine, lambda *_: None) for machine in machines}

    def stop(machine: str) -> int:
        with workers[machine] as worker:
            return worker.stop(remove)

    return on_every_machine(workers, stop)


def reached_by_ssh(cluster: Cluster) -> list[Machine]:
    """Return the machines with ssh access. Raises `ClusterError` if there is none."""
    machines = [machine for machine in cluster.machines if machine.ssh is not None]
    if not machines:
        raise ClusterError("no machine of the cluster file has ssh:, which says how to reach it")
    return machines


def _answer(worker: SshWorker) -> WorkerDescription:
    try:
        return describe(worker.endpoint, REACH_SECONDS)
    except WorkerUnavailableError as error:
        raise WorkerUnavailableError(
            f"the worker of machine {worker.machine.name!r} runs there, but cannot be reached from here: {error} Is a "
            "firewall in between, or the address another one?"
        ) from error


def _all(workers: Iterable[SshWorker], act: Callable[[SshWorker], None]) -> None:
    """Call ``act`` for all workers in threads, at most `AT_ONCE`; raise the first errors as soon as they occur."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        started: list[Future[None]] = [pool.submit(act, worker) for worker in workers]
        if any(future.exception() for future in wait(started, return_when=FIRST_EXCEPTION).done):
            wait(started, ALSO_SECONDS)
        raise_errors([error for future in started if future.done() and (error := future.exception()) is not None])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
