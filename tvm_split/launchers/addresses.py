"""Launchers for workers that run already at known addresses, from a cluster file or listed one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rpc_runtime.client.worker_client import describe, on_every_machine
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.cluster_file import read_cluster_file
from tvm_split.cluster.launcher import Launcher, WithAccess
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError


@dataclass(frozen=True)
class ClusterFile(Launcher):
    """The machines and links of a YAML file; see `tvm_split.cluster.cluster_file`."""

    name = "file"
    argument = "path"

    path: Path = Path("cluster.yaml")

    def find(self) -> Cluster:
        return Cluster(*read_cluster_file(self.path), launcher=self)


@dataclass(frozen=True)
class At(WithAccess, Launcher):
    """Workers at addresses, ``HOST:PORT`` separated by commas; each worker reports its machine's name and threads.

    A cluster that code makes from `Machine` objects has this launcher, without addresses.
    """

    name = "at"
    argument = "addresses"

    addresses: str = ""

    def find(self) -> Cluster:
        addresses = [text.strip() for text in self.addresses.split(",") if text.strip()]
        if not addresses:
            raise ClusterError("at: needs at least one HOST:PORT, several are separated by commas")
        return Cluster(tuple(on_every_machine(addresses, self._machine).values()), launcher=self)

    def _machine(self, address: str) -> Machine:
        worker = describe(WorkerEndpoint(address, address, self.token, self.tls), self.timeout_seconds)
        endpoint = WorkerEndpoint(worker.machine, address, self.token, self.tls)
        return Machine(worker.machine, worker.threads, endpoint=endpoint)
