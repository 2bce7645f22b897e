"""Facts about the machines of a cluster, as their workers report them, before anything is timed."""

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
from rpc_runtime.client.worker_client import CudaDeviceDescription, WorkerDescription, describe_all
from rpc_runtime.hardware import HostCores
from tvm_split.cluster.cluster import Workers
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.machine_targets import require_fit
from tvm_split.compiler.targets import require_executable
from tvm_split.placement.profile import Bus


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine of a cluster.

    Machines of one ``host`` slow each other down when they compute at the same time; ``cores`` are the host's cores
    that this machine may use. ``memory_free_bytes`` is this machine's part of the free memory of its host or GPU, which
    is shared equally. ``identity`` is the key under which its measured times are kept. ``device`` identifies its GPU on
    the host; ``bus`` leads to that GPU, None if unknown or without a GPU.
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


def machine_facts(cluster: Workers, targets: Mapping[str, Mapping[str, Any]]) -> tuple[MachineFacts, ...]:
    """Return the facts about all machines of a cluster.

    Asks workers on other hosts and workers with GPUs; other workers of this host are not started.

    Raises:
        WorkerUnavailableError: workers do not answer; names their machines and addresses.
        ClusterError: a machine cannot execute code for its target.
    """
    asked = [machine for machine in cluster.machines if not _is_known(cluster, targets[machine.name])]
    endpoints = cluster.endpoints() if asked else {}
    workers = describe_all({machine.name: endpoints[machine.name] for machine in asked})
    all_facts = [_facts(machine, targets[machine.name], workers) for machine in cluster.machines]
    for facts in all_facts:
        described = facts.identity["architecture"], facts.identity["cpu_features"]
        require_executable("what would be timed", facts.name, facts.target, *described)
    return tuple(_in_cluster(facts, cluster, all_facts) for facts in all_facts)


def _in_cluster(facts: MachineFacts, cluster: Workers, all_facts: Sequence[MachineFacts]) -> MachineFacts:
    """Return ``facts`` with the machine's part of the free memory, and its name and cores in ``identity``."""
    neighbours = [peer for peer in all_facts if peer.host == facts.host]
    if facts.has_gpu:
        neighbours = [peer for peer in neighbours if facts.device and peer.device == facts.device] or [facts]
    limits = facts.memory_free_bytes // len(neighbours), cluster.machine(facts.name).memory_bytes
    return replace(
        facts,
        # In one process, stages run one after the other, never at the same time.
        host=facts.name if cluster.launcher.in_process else facts.host,
        memory_free_bytes=min(filter(None, limits), default=0),
        identity={
            **facts.identity,
            "launcher": cluster.launcher.name if cluster.launcher.on_this_host else "",
            "machine": facts.name,
            "threads": facts.threads,
            "cores": facts.cores.count,
            "core_quota": facts.cores.quota,
        },
    )


def _is_known(cluster: Workers, target: Mapping[str, Any]) -> bool:
    """Return whether the facts follow from this host, without asking a worker: the machine is here and has no GPU."""
    return cluster.launcher.in_process or (cluster.launcher.on_this_host and target["kind"] != "cuda")


def _facts(machine: Machine, target: Mapping[str, Any], workers: Mapping[str, WorkerDescription]) -> MachineFacts:
    """Return the facts about a machine, with all free memory of its host or GPU."""
    has_gpu = target["kind"] == "cuda"
    if machine.name not in workers:
        hostname = socket.gethostname()
        identity = _identity(hostname, platform.machine(), sorted(hardware.cpu_features()), version("apache-tvm"))
        host, memory = hardware.boot_id() or hostname, 0 if has_gpu else hardware.available_memory_bytes()
        cores = hardware.own_cores()
        return MachineFacts(machine.name, target, machine.threads, host, hostname, memory, identity, cores)
    worker = workers[machine.name]
    require_fit(machine, worker)
    identity = _identity(worker.hostname, worker.architecture, worker.cpu_features, worker.tvm_version)
    identity["cuda_devices"] = [device.arch for device in worker.cuda_devices]
    memory, device, bus = worker.memory_free_bytes, "", None
    if has_gpu:  # stages run on the first GPU
        gpu = next(iter(worker.cuda_devices), None)
        memory = (gpu.memory_free_bytes or gpu.memory_bytes) if gpu else 0
        device, bus = (gpu.bus_identity, bus_of(gpu)) if gpu else ("", None)
    described = worker.threads, worker.host, worker.hostname
    return MachineFacts(machine.name, target, *described, memory, identity, worker.host_cores, device, bus)


def bus_of(device: CudaDeviceDescription) -> Bus | None:
    """Return the bus of a GPU; None if its worker does not report valid numbers."""
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
