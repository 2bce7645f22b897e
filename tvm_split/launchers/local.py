"""Launchers for this host: worker processes with cores of their own, or all stages in this process."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, product
from string import ascii_lowercase
from typing import Annotated

from pydantic import Field

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.hardware import own_cores
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import Launcher, Started
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError
from tvm_split.parameters import Count

MOST_ON_THIS_HOST = 26 + 26 * 26
"""The most machines on this host: their names end with one or two letters."""
HostMachines = Annotated[Count, Field(le=MOST_ON_THIS_HOST)]


@dataclass(frozen=True)
class Local(Launcher):
    """Worker processes on this host, each with ``threads`` cores of its own if there are enough."""

    name = "local"
    argument = "workers"
    on_this_host = starts_more = True

    workers: HostMachines = 2
    threads: Count = 1

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

    machines: HostMachines = 1
    threads: Count | None = None

    def find(self) -> Cluster:
        return Cluster(lettered_machines(self.machines, self.threads or own_cores().count), launcher=self)

    def start(self, cluster: Cluster) -> Started:
        raise ClusterError("an in-process cluster has no workers")


def lettered_machines(count: int, threads: int) -> tuple[Machine, ...]:
    """Return ``machine-a`` to ``machine-z``, then ``machine-aa``, …, as spreadsheet columns are named."""
    letters = (word for length in (1, 2) for word in product(ascii_lowercase, repeat=length))
    return tuple(Machine(f"machine-{''.join(word)}", threads) for word in islice(letters, count))
