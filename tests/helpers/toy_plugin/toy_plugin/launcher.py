"""Machines named after the letters of a word, as workers of this host: ``toy:abc`` has ``a``, ``b`` and ``c``."""

from collections.abc import Mapping
from dataclasses import dataclass

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import Launcher, Started
from tvm_split.cluster.machine import Machine


class ToyWorkers:
    def __init__(self, names: tuple[str, ...], threads: int) -> None:
        self._workers = LocalWorkers(names, threads=threads)

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        return self._workers.endpoints

    def close(self) -> None:
        self._workers.close()


@dataclass(frozen=True)
class Toy(Launcher):
    name = "toy"
    argument = "word"

    word: str
    threads: int = 1

    def find(self) -> Cluster:
        return Cluster(tuple(Machine(letter, self.threads) for letter in self.word), launcher=self)

    def start(self, cluster: Cluster) -> Started:
        return ToyWorkers(cluster.machine_names, self.threads)
