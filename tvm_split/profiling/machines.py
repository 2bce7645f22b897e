"""What has to be known of a machine before its kernels are timed: what it is, and which others share its host."""

from __future__ import annotations

import math
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import tvm_split
from rpc_runtime import hardware
from rpc_runtime.client.worker_client import CudaDeviceDescription, describe
from rpc_runtime.hardware import HostCores
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.instruction_sets import require_executable
from tvm_split.compiler.targets import require_fit
from tvm_split.planner.profile import Bus


@dataclass(frozen=True)
class MachineFacts:
    """A machine of a cluster.

    Machines of one ``host`` slow each other when they compute at the same time; ``cores`` are those of its cores that
    this one may use. ``memory_free_bytes`` is this machine's part: what a host, or a GPU, has free is shared
    equally. ``identity`` is what times that were measured on it are known by. ``device`` names a GPU on its host, and
    ``bus`` is what leads to it; None where that is not known, or nothing does.
    """

    name: str
    target: Mapping[str, Any]
    threads: int
    host: str
    hostname: str
    memory_free_bytes: int
    identity: Mapping[str, Any]
    cores: HostCores = field(default_factory=lambda: HostCores("", ()))
    device: str = ""
    bus: Bus | None = None

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
    here = [other for other in all_facts if other.host == own.host]
    if own.has_gpu:
        here = [other for other in here if own.device and other.device == own.device] or [own]
    limits = [
        bytes_ for bytes_ in (own.memory_free_bytes // len(here), cluster.machine(own.name).memory_bytes) if bytes_
    ]
    return replace(
        own,
        # In one process stages are called in turn, so they never compute at the same time.
        host=own.name if cluster.launcher.in_process else own.host,
        memory_free_bytes=min(limits, default=0),
        identity={
            **own.identity,
            "launcher": cluster.launcher.name if cluster.launcher.on_this_host else "",
            "machine": own.name,
            "threads": own.threads,
            "core_quota": own.cores.quota,
        },
    )


def _facts(cluster: Cluster, machine: Machine, target: Mapping[str, Any], timeout_seconds: float) -> MachineFacts:
    """With all of the memory that the machine's host, or its GPU, has free."""
    has_gpu = target["kind"] == "cuda"
    if cluster.launcher.in_process or (cluster.launcher.on_this_host and not has_gpu):
        hostname = socket.gethostname()
        identity = _identity(hostname, platform.machine(), sorted(hardware.cpu_features()), version("apache-tvm"))
        host, memory = hardware.boot_id() or hostname, 0 if has_gpu else hardware.available_memory_bytes()
        cores = hardware.own_cores()
        return MachineFacts(machine.name, target, machine.threads, host, hostname, memory, identity, cores)
    worker = describe(cluster.endpoints()[machine.name], timeout_seconds)
    require_fit(machine, worker)
    identity = _identity(worker.hostname, worker.architecture, worker.cpu_features, worker.tvm_version)
    identity["cuda_devices"] = [device.arch for device in worker.cuda_devices]
    found = MachineFacts(
        machine.name,
        target,
        worker.threads,
        worker.host,
        worker.hostname,
        worker.memory_free_bytes,
        identity,
        worker.host_cores,
    )
    return _on_gpu(found, worker.cuda_devices) if has_gpu else found


def _on_gpu(machine: MachineFacts, devices: Sequence[CudaDeviceDescription]) -> MachineFacts:
    """With the memory of the GPU that stages run on, which is the first, and what leads to it."""
    if not devices:
        return replace(machine, memory_free_bytes=0)
    device = devices[0]
    return replace(
        machine,
        memory_free_bytes=device.memory_free_bytes or device.memory_bytes,
        device=device.bus_identity,
        bus=bus_of(device),
    )


def bus_of(device: CudaDeviceDescription) -> Bus | None:
    """What leads to a GPU; None where its worker does not say it, or no numbers."""
    speed, latency = device.bus_bytes_per_second, device.bus_latency_seconds
    is_known = math.isfinite(speed) and math.isfinite(latency) and speed > 0 and latency >= 0
    return Bus(speed, latency) if is_known else None


def _identity(hostname: str, architecture: str, features: Any, tvm_version: str) -> dict[str, Any]:
    return {
        "hostname": hostname,
        "architecture": architecture,
        "cpu_features": list(features),
        "tvm": tvm_version,
        "tvm_split": tvm_split.__version__,
    }
