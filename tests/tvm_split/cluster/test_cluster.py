from __future__ import annotations

from collections.abc import Callable

import pytest

from rpc_runtime.client.local_workers import LocalWorkers, beside_this_thread, most_at_once
from rpc_runtime.errors import WorkerUnavailableError
from tests.helpers.waiting import eventually
from tvm_split.cluster import cluster as cluster_module
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Link, Machine
from tvm_split.errors import ClusterError


def test_local_machines_are_lettered() -> None:
    cluster = Cluster.local(workers=3, threads=2)
    assert cluster.machine_names == ("machine-a", "machine-b", "machine-c")
    assert {machine.threads for machine in cluster.machines} == {2}
    assert Cluster.local(workers=702).machine_names[25:28] == ("machine-z", "machine-aa", "machine-ab")
    assert Cluster.local(workers=702).machine_names[-1] == "machine-zz"


THREE = (Machine("a"), Machine("b"), Machine("c"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster.local(workers=0), "1 to 702 machines, not 0"),
        (lambda: Cluster.local(threads=0), "'machine-a' has 0 threads"),
        (lambda: Cluster("remote", ()), "at least one machine"),
        (lambda: Cluster("remote", (Machine("a"), Machine("a"))), "two machines are named 'a'"),
        (lambda: Cluster("remote", (Machine("client"),)), "cannot be named 'client'"),
        (lambda: Cluster("remote", (Machine("a"),), (Link("a", "b", 1.0),)), "no machine is named 'b'; there are a"),
        (lambda: Machine("a", memory_bytes=0), "memory_bytes=0; give more than 0"),
        (lambda: Link("a", "a"), "joins a machine to itself"),
        (
            lambda: Link("a", "b", -1.0),
            "'a' to 'b' has bytes_per_second=-1.0; give more than 0 \\(1e-09 to 1e\\+18\\), 0 for no traffic",
        ),
        (lambda: Link("a", "b", float("nan")), "bytes_per_second=nan"),
        (lambda: Link("a", "b", 1.0, -0.5), "latency_seconds=-0.5; give 0 or more"),
        (lambda: Link("a", "b", latency_seconds=0.5), "a latency and no bytes_per_second"),
        (lambda: Link("a", "client", address="b:1"), "the address of the machine itself"),
        (lambda: Cluster("remote", THREE, (Link("a", "b"),)), "no link between 'a' and 'c', 'b' and 'c'; give"),
        (lambda: Cluster("remote", THREE, (Link("a", "b"), Link("a", "b", 1.0))), "a second link from 'a' to 'b'"),
        (lambda: Cluster("remote", (Machine("a"),)).endpoints(), "'a' has no address"),
        (lambda: Cluster.in_process().endpoints(), "no workers"),
        (lambda: Cluster.local().machine("desk"), "no machine is named 'desk'; the cluster has machine-a, machine-b"),
    ],
)
def test_wrong_clusters(make, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        make()


def test_local_workers_start_beside_something_else() -> None:
    with Cluster.local(workers=2) as cluster:
        with cluster.starting():
            pass
        workers = cluster._workers
        assert workers is not None
        assert set(workers.endpoints) == {"machine-a", "machine-b"}
        with cluster.starting():
            assert cluster._workers is workers


def test_what_keeps_workers_from_starting_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*names: object, **options: object) -> None:
        raise WorkerUnavailableError("no worker starts here")

    monkeypatch.setattr(cluster_module, "LocalWorkers", refuses)
    with pytest.raises(WorkerUnavailableError, match="no worker starts here"), Cluster.local().starting():
        pass
    with pytest.raises(ZeroDivisionError), Cluster.local().starting():
        raise ZeroDivisionError


def test_beside_something_else_fewer_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on beside wants a core; once it has ended, the workers get all."""
    asked: list[Callable[[], int]] = []

    def noted(*names: object, at_once: Callable[[], int], **options: object) -> LocalWorkers:
        asked.append(at_once)
        return LocalWorkers(["a"])

    monkeypatch.setattr(cluster_module, "LocalWorkers", noted)
    with Cluster.local(workers=2) as cluster:
        with cluster.starting():
            eventually(lambda: asked, "the workers start")
            assert asked[0]() == beside_this_thread()
        assert asked[0]() == most_at_once() > beside_this_thread()


def test_only_local_workers_are_started() -> None:
    with Cluster.in_process().starting():
        pass


def test_nccl_is_for_two_gpus_and_takes_no_codec() -> None:
    gpus = tuple(Machine(name, target={"kind": "cuda", "arch": "sm_90"}) for name in "AB")
    linked = Cluster("local", gpus, (Link("A", "B", transport="nccl", codec="auto"),))
    assert [linked.transport_between_gpus(*ends) for ends in ("AB", "BA")] == ["nccl", "nccl"]
    with pytest.raises(ClusterError, match="has the transport nccl, which joins no client"):
        Link("client", "A", transport="nccl")
    with pytest.raises(ClusterError, match="'ipc'; there are auto, grpc, shm, mpi, nccl"):
        Link("A", "B", transport="ipc")
    with pytest.raises(ClusterError, match="from 'A' to 'C' has the transport nccl, and 'C' has no target with a GPU"):
        Cluster("local", (*gpus, Machine("C")), (Link("A", "B"), Link("A", "C", transport="nccl"), Link("B", "C")))
    with pytest.raises(ClusterError, match="nccl, by which no codec writes: leave out codec fp16"):
        Link("A", "B", transport="nccl", codec="fp16")
