"""What has to be known of a machine before its kernels are timed: what it is, and which others share its host."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import tvm_split
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.instruction_sets import require_executable
from tvm_split.compiler.targets import require_fit
from tvm_split.rpc_runtime import hardware
from tvm_split.rpc_runtime.client.client import describe


@dataclass(frozen=True)
class MachineFacts:
    """A machine of a cluster.

    Machines of one ``host`` slow each other when they compute at the same time; ``core_numbers`` are those of its cores
    that this one may use. ``memory_free_bytes`` is this machine's part: what a host has free is shared equally.
    ``identity`` is what times that were measured on it are known by.
    """

    name: str
    target: Mapping[str, Any]
    threads: int
    host: str
    hostname: str
    memory_free_bytes: int
    identity: Mapping[str, Any]
    core_numbers: tuple[int, ...] = ()

    @property
    def has_gpu(self) -> bool:
        return bool(self.target["kind"] == "cuda")


def machine_facts(
    cluster: Cluster, targets: Mapping[str, Mapping[str, Any]], timeout_seconds: float
) -> tuple[MachineFacts, ...]:
    """All machines of a cluster; workers on other hosts are asked, those of this host need not be started for it.

    Raises:
        WorkerUnavailableError: a worker does not answer; names the machine and its address.
        ClusterError: a machine cannot execute code for its target.
    """
    found = [_facts(cluster, machine, targets[machine.name], timeout_seconds) for machine in cluster.machines]
    for each in found:
        described = each.identity["architecture"], each.identity["cpu_features"]
        require_executable("what would be timed", each.name, each.target, *described)
    return tuple(_in_cluster(each, cluster, found) for each in found)


def _in_cluster(own: MachineFacts, cluster: Cluster, all_facts: Sequence[MachineFacts]) -> MachineFacts:
    """A machine with its part of its host's memory, known by its place in the cluster."""
    sharing = 1 if own.has_gpu else sum(other.host == own.host for other in all_facts)
    limits = [bytes_ for bytes_ in (own.memory_free_bytes // sharing, cluster.machine(own.name).memory_bytes) if bytes_]
    return replace(
        own,
        # In one process stages are called in turn, so they never compute at the same time.
        host=own.name if cluster.kind == "in_process" else own.host,
        memory_free_bytes=min(limits, default=0),
        identity={**own.identity, "kind": cluster.kind, "machine": own.name, "threads": own.threads},
    )


def _facts(cluster: Cluster, machine: Machine, target: Mapping[str, Any], timeout_seconds: float) -> MachineFacts:
    """With all of the memory that the machine's host, or its GPU, has free."""
    has_gpu = target["kind"] == "cuda"
    if cluster.kind == "in_process" or (cluster.kind == "local" and not has_gpu):
        hostname = socket.gethostname()
        identity = _identity(hostname, platform.machine(), sorted(hardware.cpu_features()), version("apache-tvm"))
        host, memory = hardware.boot_id() or hostname, 0 if has_gpu else hardware.available_memory_bytes()
        cores = hardware.core_numbers()
        return MachineFacts(machine.name, target, machine.threads, host, hostname, memory, identity, cores)
    worker = describe(cluster.endpoints()[machine.name], timeout_seconds)
    require_fit(machine, worker)
    identity = _identity(worker.hostname, worker.architecture, worker.cpu_features, worker.tvm_version)
    identity["cuda_devices"] = [device.arch for device in worker.cuda_devices]
    memory = worker.memory_free_bytes
    if has_gpu:
        memory = worker.cuda_devices[0].memory_bytes if worker.cuda_devices else 0
    return MachineFacts(
        machine.name, target, worker.threads, worker.host, worker.hostname, memory, identity, worker.core_numbers
    )


def _identity(hostname: str, architecture: str, features: Any, tvm_version: str) -> dict[str, Any]:
    return {
        "hostname": hostname,
        "architecture": architecture,
        "cpu_features": list(features),
        "tvm": tvm_version,
        "tvm_split": tvm_split.__version__,
    }
