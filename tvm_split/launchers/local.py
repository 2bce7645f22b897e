"""Launchers for this host: worker processes with cores of their own, or all stages in this process."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, product
from string import ascii_lowercase

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.hardware import own_cores
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import Launcher, Started
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError

MOST_ON_THIS_HOST = 26 + 26 * 26
"""The most machines on this host: their names end with one or two letters."""


@dataclass(frozen=True)
class Local(Launcher):
    """Worker processes on this host, each with ``threads`` cores of its own if there are enough."""

    name = "local"
    argument = "workers"
    on_this_host = True

    workers: int = 2
    threads: int = 1

    def find(self) -> Cluster:
        return Cluster(lettered_machines(self.workers, self.threads), launcher=self)

    def start(self, cluster: Cluster) -> Started:
        return _StartedHere(cluster)


class _StartedHere:
    def __init__(self, cluster: Cluster) -> None:
        threads = {machine.name: machine.threads for machine in cluster.machines}
        self._workers = LocalWorkers(cluster.machine_names, threads=threads)

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        for name in self._workers.ended:
            self._workers.restart(name)
        return self._workers.endpoints

    def close(self) -> None:
        self._workers.close()


@dataclass(frozen=True)
class InProcess(Launcher):
    """A cluster without processes and RPC; see `Cluster.in_process`."""

    name = "in-process"
    argument = "machines"
    on_this_host = True
    in_process = True

    machines: int = 1
    threads: int | None = None

    def find(self) -> Cluster:
        return Cluster(lettered_machines(self.machines, self.threads or own_cores().count), launcher=self)

    def start(self, cluster: Cluster) -> Started:
        raise ClusterError("an in-process cluster has no workers")


def lettered_machines(count: int, threads: int) -> tuple[Machine, ...]:
    """Return ``machine-a`` to ``machine-z``, then ``machine-aa``, ``machine-ab``, …, as spreadsheet columns are named.

    Raises:
        ClusterError: there are too many, or none.
    """
    if not 1 <= count <= MOST_ON_THIS_HOST:
        raise ClusterError(f"a cluster on this host can have 1 to {MOST_ON_THIS_HOST} machines, not {count}")
    letters = (word for length in (1, 2) for word in product(ascii_lowercase, repeat=length))
    return tuple(Machine(f"machine-{''.join(word)}", threads) for word in islice(letters, count))
