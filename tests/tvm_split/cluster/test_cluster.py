import pytest

from rpc_runtime.client.worker_client import describe
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Link, Machine, SharedCores
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
        (lambda: Cluster.local(workers=0), r"workers: .*greater than or equal to 1 \(it is 0\)"),
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


def test_a_session_starts_its_workers_once_and_shares_them() -> None:
    cluster = Cluster.local(workers=1)
    with cluster as workers:
        with workers.start() as shared, cluster.start() as inside:
            assert shared.endpoints() == inside.endpoints() == workers.endpoints()
        (endpoint,) = workers.endpoints().values()
        assert describe(endpoint, PATIENCE_SECONDS).machine == "machine-a"  # a shared session's end ends no worker
        with cluster as inner:
            assert inner.endpoints() != workers.endpoints()
        assert workers.endpoints() == {"machine-a": endpoint}
    workers.close()
    with pytest.raises(ClusterError, match="have ended"):
        shared.endpoints()
    assert Cluster.local(workers=1) == cluster


def test_each_worker_on_this_host_has_the_threads_of_its_machine() -> None:
    with Cluster((Machine("a"), Machine("b", threads=2)), launcher=Local()) as workers:
        described = {name: describe(endpoint, PATIENCE_SECONDS) for name, endpoint in workers.endpoints().items()}
    assert {name: worker.threads for name, worker in described.items()} == {"a": 1, "b": 2}


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


def test_machines_on_standby_are_not_planned_on() -> None:
    shared = (SharedCores(("b", "client"), 1), SharedCores(("c",), 2))
    links = tuple(Link(source, end, 1e9) for source, end in ("ab", "ac", "bc"))
    cluster = Cluster((Machine("a"), Machine("b"), Machine("c", standby=True)), links, shared)
    assert cluster.planned.machine_names == ("a", "b")
    assert {(link.source, link.destination) for link in cluster.planned.links} == {("a", "b"), ("b", "a")}
    assert cluster.planned.shared_cores == (SharedCores(("b", "client"), 1),)
    assert cluster.with_standby(1) is cluster
    assert cluster.with_standby(2).planned.machine_names == ("a",)
    assert cluster.with_standby(2, used={"b"}).planned.machine_names == ("b",)
    with pytest.raises(ClusterError, match=r"2 machines on standby: .*compute, the cluster has c; add some"):
        cluster.with_standby(2, used={"a", "b"})
    with pytest.raises(ClusterError, match="every machine is on standby"):
        cluster.with_standby(3)


def test_more_workers_of_this_host_are_on_standby() -> None:
    cluster = Cluster((Machine("machine-b", threads=2), Machine("desk")), launcher=Local()).with_standby(2)
    assert cluster.machine_names == ("machine-b", "desk", "standby-1", "standby-2")
    assert [machine.standby for machine in cluster.machines] == [False, False, True, True]
    assert cluster.machine("standby-2").threads == 2
    assert cluster.with_standby(2, used={"machine-b", "desk"}) is cluster


def test_a_part_of_a_session_has_its_workers() -> None:
    cluster = Cluster.local(workers=1).with_standby(1)
    with cluster as workers:
        for part in (workers.planned, cluster.planned):
            assert part.start().endpoints() == {"machine-a": workers.endpoints()["machine-a"]}
        assert workers.with_standby(1) is workers
        with pytest.raises(ClusterError, match="every machine is on standby"):
            workers.with_standby(2)  # they run already, so there are no more
