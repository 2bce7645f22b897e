"""The cores that several machines share, including the client: from the cluster file or from their hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field

from rpc_runtime.hardware import HostCores, own_cores, usable_together
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.addresses import Address
from tvm_split.errors import ClusterError
from tvm_split.parameters import fit_fields
from tvm_split.units import ShownFields

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster

MOST_CORES = 8192
"""The most CPUs that a Linux kernel can be configured for: a larger number is a mistake, for example bytes."""
Cores = Annotated[int, Field(ge=1, le=MOST_CORES, strict=True)]


@dataclass(frozen=True, repr=False)
class SharedCores(ShownFields):
    """A number of ``cores`` on which all these machines compute; ``"client"`` may be among them.

    The machines' busy times add up on these cores: while one machine computes, another may have to wait.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    machines: Annotated[tuple[str, ...], Field(min_length=1)]
    cores: Cores

    def __post_init__(self) -> None:
        fit_fields(self, ClusterError)

    def oversubscription(self, cores_of: Mapping[str, int]) -> float:
        """Return the sum of the machines' own core counts, divided by the cores that they share.

        Below 1 some cores stay free; above 1 the cores are oversubscribed, and machines wait for each other.
        """
        return sum(cores_of.get(name, 0) for name in self.machines) / self.cores


def cores_by_address(cluster: Cluster) -> dict[str, HostCores]:
    """Return the cores of machines that are on this host, without asking their workers."""
    if cluster.launcher.on_this_host and not cluster.launcher.in_process:
        local_names = cluster.machine_names
    else:
        addresses = {machine.name: machine.address for machine in cluster.machines}
        local_names = tuple(
            name for name, address in addresses.items() if address and Address.parse(address).is_loopback
        )
    return dict.fromkeys(local_names, own_cores())


def shared_cores(cluster: Cluster, cores_of: Mapping[str, HostCores]) -> tuple[SharedCores, ...]:
    """Return the cores that several machines, or a machine and the client, share.

    Machines that the cluster's description names share the cores stated there. Other machines of one host share all
    cores in their affinity masks, up to their quotas. Machines of an in-process cluster compute in turn already.
    """
    if cluster.launcher.in_process:
        return cluster.shared_cores
    named = {name for shared in cluster.shared_cores for name in shared.machines}
    hosts: dict[str, dict[str, HostCores]] = {}
    for name, cores in {**cores_of, CLIENT: own_cores()}.items():
        if name not in named and cores.host and cores.numbers:
            hosts.setdefault(cores.host, {})[name] = cores
    groups = [
        SharedCores(tuple(members), usable_together(members.values())) for members in hosts.values() if len(members) > 1
    ]
    return (*cluster.shared_cores, *groups)
