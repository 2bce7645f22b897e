from rpc_runtime.hardware import HostCores, own_cores
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster, cores_by_address, shared_cores
from tvm_split.cluster.machine import Machine, SharedCores


def remote(*addresses: str, shared: tuple[SharedCores, ...] = ()) -> Cluster:
    machines = tuple(
        Machine(f"box-{n}", endpoint=WorkerEndpoint(f"box-{n}", address)) for n, address in enumerate(addresses)
    )
    return Cluster(machines, shared_cores=shared)


def test_local_workers_and_the_client_share_what_this_process_may_use() -> None:
    cluster = Cluster.local(workers=3)
    expected = SharedCores((*cluster.machine_names, "client"), own_cores().count)
    assert shared_cores(cluster, cores_by_address(cluster)) == (expected,)


def test_workers_on_loopback_are_on_this_host_and_others_are_not() -> None:
    cluster = remote("127.0.0.1:7001", "192.0.2.1:7001", "[::1]:7002")
    (group,) = shared_cores(cluster, cores_by_address(cluster))
    assert group.machines == ("box-0", "box-2", "client")


def test_workers_of_one_boot_share_all_cores_that_any_may_use() -> None:
    cluster = remote("192.0.2.1:1", "192.0.2.1:2", "192.0.2.2:1", "192.0.2.3:1")
    cores = HostCores("a boot", (0, 1)), HostCores("a boot", (1, 2)), HostCores("another", (0,)), HostCores("", (0, 1))
    groups = shared_cores(cluster, dict(zip(cluster.machine_names, cores, strict=True)))
    assert groups == (SharedCores(("box-0", "box-1"), 3),)


def test_workers_of_one_quota_share_it() -> None:
    cluster = remote("192.0.2.1:1", "192.0.2.1:2")
    cores = HostCores("a boot", (0, 1, 2, 3), 1.5, "a group"), HostCores("a boot", (0, 1, 2, 3), 1.5, "a group")
    groups = shared_cores(cluster, dict(zip(cluster.machine_names, cores, strict=True)))
    assert groups == (SharedCores(("box-0", "box-1"), 1),)


def test_what_the_cluster_says_counts_for_whom_it_names() -> None:
    declared = (SharedCores(("box-0", "box-1"), 1),)
    cluster = remote("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", shared=declared)
    first, second = shared_cores(cluster, cores_by_address(cluster))
    assert (first,) == declared
    assert second.machines == ("box-2", "client")


def test_machines_in_one_process_take_turns_already() -> None:
    cluster = Cluster.in_process(machines=2)
    assert shared_cores(cluster, cores_by_address(cluster)) == ()
