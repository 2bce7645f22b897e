"""What has to be known of a machine before its kernels are timed: what it is, and which others share its host."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import tvm_split
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine, require_fit
from tvm_split.compiler.instruction_sets import require_executable
from tvm_split.rpc_runtime import hardware
from tvm_split.rpc_runtime.client.client import describe


@dataclass(frozen=True)
class ProfiledMachine:
    """A machine of a cluster.

    Machines of one ``host`` slow each other when they compute at the same time. ``memory_free_bytes`` is this machine's
    part: what a host has free is shared equally. ``identity`` is what times that were measured on it are known by.
    """

    name: str
    target: Mapping[str, Any]
    threads: int
    host: str
    hostname: str
    memory_free_bytes: int
    identity: Mapping[str, Any]
    machine: Machine


def profiled_machines(
    cluster: Cluster, targets: Mapping[str, Mapping[str, Any]], timeout_seconds: float
) -> tuple[ProfiledMachine, ...]:
    """All machines of a cluster; workers on other hosts are asked, those of this host need not be started for it.

    Raises:
        WorkerUnavailableError: a worker does not answer; names the machine and its address.
        ClusterError: a machine cannot execute code for its target.
    """
    facts = {
        machine.name: _facts(cluster, machine, targets[machine.name]["kind"] == "cuda", timeout_seconds)
        for machine in cluster.machines
    }
    found = []
    for machine in cluster.machines:
        own = facts[machine.name]
        target = targets[machine.name]
        described = own.identity["architecture"], own.identity["cpu_features"]
        require_executable("what would be timed", machine.name, target, *described)
        # In one process stages are called in turn, so they never compute at the same time.
        host = machine.name if cluster.kind == "in_process" else own.host
        if target["kind"] == "cuda":
            memory = own.device_memory_bytes
        else:
            memory = own.memory_free_bytes // sum(other.host == own.host for other in facts.values())
        limits = [bytes_ for bytes_ in (memory, machine.memory_bytes) if bytes_]
        identity = {**own.identity, "kind": cluster.kind, "machine": machine.name, "threads": own.threads}
        found.append(
            ProfiledMachine(
                machine.name,
                target,
                own.threads,
                host,
                own.hostname,
                min(limits, default=0),
                identity,
                machine,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class _Facts:
    threads: int
    hostname: str
    host: str
    memory_free_bytes: int
    device_memory_bytes: int
    identity: Mapping[str, Any]


def _facts(cluster: Cluster, machine: Machine, has_gpu: bool, timeout_seconds: float) -> _Facts:
    if cluster.kind == "in_process" or (cluster.kind == "local" and not has_gpu):
        architecture, features = platform.machine(), hardware.cpu_features()
        identity = _identity(socket.gethostname(), architecture, sorted(features), version("apache-tvm"))
        host = hardware.boot_id() or socket.gethostname()
        return _Facts(machine.threads, socket.gethostname(), host, hardware.available_memory_bytes(), 0, identity)
    worker = describe(cluster.endpoints()[machine.name], timeout_seconds)
    require_fit(machine, worker)
    identity = _identity(worker.hostname, worker.architecture, worker.cpu_features, worker.tvm_version)
    identity["cuda_devices"] = [device.arch for device in worker.cuda_devices]
    device_memory = worker.cuda_devices[0].memory_bytes if worker.cuda_devices else 0
    return _Facts(
        worker.threads,
        worker.hostname,
        worker.boot_id or worker.hostname,
        worker.memory_free_bytes,
        device_memory,
        identity,
    )


def _identity(hostname: str, architecture: str, features: Any, tvm_version: str) -> dict[str, Any]:
    return {
        "hostname": hostname,
        "architecture": architecture,
        "cpu_features": list(features),
        "tvm": tvm_version,
        "tvm_split": tvm_split.__version__,
    }
