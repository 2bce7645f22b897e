"""Which machines of a cluster, and the client, compute on the same cores: as its file says, or as their hosts show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.rpc_runtime import hardware
from tvm_split.rpc_runtime.program.program import CLIENT
from tvm_split.rpc_runtime.wire.security import is_loopback, split_address


@dataclass(frozen=True)
class HostCores:
    """The cores that a process may run on, by the numbers of its ``host``: a boot's identity; empty: not known."""

    host: str
    numbers: tuple[int, ...]


def own_cores() -> HostCores:
    """Of this process."""
    return HostCores(hardware.boot_id(), hardware.core_numbers())


def cores_by_address(cluster: Cluster) -> dict[str, HostCores]:
    """Where the machines are, as far as that is known without asking their workers: on this host."""
    if cluster.kind == "local":
        here = cluster.machine_names
    else:
        addresses = {machine.name: machine.address for machine in cluster.machines}
        here = tuple(name for name, address in addresses.items() if address and is_loopback(split_address(address)[0]))
    return dict.fromkeys(here, own_cores())


def shared_cores(cluster: Cluster, cores_of: Mapping[str, HostCores]) -> tuple[SharedCores, ...]:
    """The cores that several machines, or a machine and the client, share.

    What the cluster says counts for whom it names; of the others those of one host share all cores that any of them may
    run on. Machines in one process take turns already.
    """
    if cluster.kind == "in_process":
        return cluster.shared_cores
    named = {name for shared in cluster.shared_cores for name in shared.machines}
    hosts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, cores in {**cores_of, CLIENT: own_cores()}.items():
        if name not in named and cores.host and cores.numbers:
            hosts.setdefault(cores.host, {})[name] = cores.numbers
    found = [
        SharedCores(tuple(numbers), len(set().union(*numbers.values())))
        for numbers in hosts.values()
        if len(numbers) > 1
    ]
    return (*cluster.shared_cores, *found)
