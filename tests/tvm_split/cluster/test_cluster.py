from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import Launcher, Started
from tvm_split.cluster.machine import Link, Machine
from tvm_split.errors import ClusterError
from tvm_split.launchers.local import Local


def test_local_machines_are_lettered() -> None:
    cluster = Cluster.local(workers=3, threads=2)
    assert cluster.machine_names == ("machine-a", "machine-b", "machine-c")
    assert {machine.threads for machine in cluster.machines} == {2}
    assert Cluster.local(workers=702).machine_names[25:28] == ("machine-z", "machine-aa", "machine-ab")
    assert Cluster.local(workers=702).machine_names[-1] == "machine-zz"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster.local(workers=0), "1 to 702 machines, not 0"),
        (lambda: Cluster(()), "at least one machine"),
        (lambda: Link("a", "b", latency_seconds=0.5), "a latency and no bytes_per_second"),
        (lambda: Link("a", "client", address="b:1"), "the address of the machine itself"),
        (lambda: Cluster((Machine("a"),)).start().endpoints(), "'a' has no address"),
        (lambda: Cluster.local().machine("desk"), "no machine is named 'desk'; the cluster has machine-a, machine-b"),
    ],
)
def test_wrong_clusters(make, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        make()


class Scripted(Launcher):
    """Counts how often its workers were started and ended."""

    name = "scripted"
    on_this_host = True

    def __init__(self) -> None:
        self.counts = {"started": 0, "ended": 0}

    def find(self) -> Cluster:
        return Cluster((Machine("a"),), launcher=self)

    def start(self, cluster: Cluster) -> Started:
        self.counts["started"] += 1
        return ScriptedWorkers(self.counts)


@dataclass
class ScriptedWorkers:
    counts: dict[str, int]

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        return {"a": WorkerEndpoint("a", f"127.0.0.1:{self.counts['started']}")}

    def close(self) -> None:
        self.counts["ended"] += 1


def test_a_session_starts_its_workers_once_and_ends_them() -> None:
    launcher = Scripted()
    cluster = launcher.find()
    with cluster as workers:
        assert launcher.counts == {"started": 0, "ended": 0}  # they start when they are first needed
        with workers.start() as shared:
            assert shared.endpoints() == workers.endpoints()
        assert launcher.counts == {"started": 1, "ended": 0}
    assert launcher.counts == {"started": 1, "ended": 1}
    workers.close()
    assert launcher.counts == {"started": 1, "ended": 1}
    with pytest.raises(ClusterError, match="have ended"):
        shared.endpoints()


def test_sessions_of_one_cluster_have_workers_of_their_own() -> None:
    launcher = Scripted()
    cluster = launcher.find()
    with cluster as outer, cluster as inner:
        assert outer.endpoints() != inner.endpoints()
    assert launcher.counts == {"started": 2, "ended": 2}
    with cluster.start() as first, cluster.start() as second:
        assert first.endpoints() != second.endpoints()
    assert launcher.find() == cluster


def test_nccl_is_for_two_gpus_and_takes_no_codec() -> None:
    gpus = tuple(Machine(name, target={"kind": "cuda", "arch": "sm_90"}) for name in "AB")
    linked = Cluster(gpus, (Link("A", "B", transport="nccl", codec="auto"),), launcher=Local())
    assert [linked.transport_between_gpus(*ends) for ends in ("AB", "BA")] == ["nccl", "nccl"]
    with pytest.raises(ClusterError, match="has the transport nccl, which joins no client"):
        Link("client", "A", transport="nccl")
    with pytest.raises(ClusterError, match="'ipc'; there are auto, grpc, shm, mpi, nccl"):
        Link("A", "B", transport="ipc")
    with pytest.raises(ClusterError, match="from 'A' to 'C' has the transport nccl, and 'C' has no target with a GPU"):
        Cluster(
            (*gpus, Machine("C")), (Link("A", "B"), Link("A", "C", transport="nccl"), Link("B", "C")), launcher=Local()
        )
    with pytest.raises(ClusterError, match="nccl, by which no codec writes: leave out codec fp16"):
        Link("A", "B", transport="nccl", codec="fp16")
