"""Find the compilation targets of machines, and check that their workers match."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rpc_runtime.client.worker_client import WorkerDescription, describe
from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.execution.cuda_code import toolkit_version
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.cluster.discovery import ASKED_AT_ONCE
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit
from tvm_split.compiler.targets import cannot_execute, cpu_target, host_target, tvm_target
from tvm_split.errors import ClusterError, PlanError

DESCRIBE_TIMEOUT_SECONDS = 10.0
REACHED_SECONDS = 3.0
"""Timeout for describing a worker when its machine can be planned without it."""


def resolve_targets(cluster: Workers, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the target of every named machine: the described one, this host's, or the one that its worker reports."""
    return {name: _target_of(cluster, cluster.machine(name)) for name in sorted(names)}


def require_known_targets(cluster: Cluster) -> None:
    """Raise a `ClusterError` for a described target that cannot be compiled for; contacts no worker."""
    for machine in cluster.machines:
        if machine.target is not None:
            _complete_target(machine, machine.target)


def misfit(machine: Machine, worker: WorkerDescription) -> str:
    """Return why the worker at a machine's address does not match its description, and what to do; empty if it does.

    A worker without ``--name`` reports its host's name, and then matches any machine.
    """
    if worker.machine not in (machine.name, worker.hostname):
        return (
            f"the worker that answers for machine {machine.name!r} is {worker.machine!r}; give each machine the "
            f"address of its own worker, or start that one with --name={shlex.quote(machine.name)}"
        )
    if machine.threads > worker.threads:
        return (
            f"machine {machine.name!r} is said to have {machine.threads} threads, and its worker computes with "
            f"{worker.threads}; start it with --threads {machine.threads}, or say threads: {worker.threads}"
        )
    problem = machine.target and cannot_execute(machine.target, worker.architecture, worker.cpu_features)
    if problem:
        return (
            f"machine {machine.name!r} is said to have the target {dict(machine.target or {})}, and its worker's "
            f"processor {problem}: code for it would crash there. Give the machine its right target, or leave it out"
        )
    if machine.target and machine.target["kind"] == "cuda" and "arch" in machine.target:
        problem = cuda_misfit(CudaNeeds(str(machine.target["arch"]), toolkit_version()), worker)
        if problem:
            return (
                f"machine {machine.name!r} is said to have the target {dict(machine.target)}, and its worker {problem}"
            )
    return ""


def require_fit(machine: Machine, worker: WorkerDescription) -> None:
    """Raise a `ClusterError` if the worker does not match its machine's description (`misfit`)."""
    problem = misfit(machine, worker)
    if problem:
        raise ClusterError(problem)


def reached_workers(cluster: Workers) -> dict[str, WorkerDescription]:
    """Describe the reachable workers of a remote cluster, by machine; empty for workers that this process starts."""
    if cluster.launcher.on_this_host:
        return {}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        described = zip(cluster.machine_names, pool.map(_if_reached, cluster.endpoints().values()), strict=True)
        return {name: worker for name, worker in described if worker is not None}


def _if_reached(endpoint: WorkerEndpoint) -> WorkerDescription | None:
    try:
        return describe(endpoint, timeout_seconds=REACHED_SECONDS)
    except WorkerUnavailableError:
        return None


def fitting_workers(cluster: Workers) -> dict[str, WorkerDescription]:
    """Return `reached_workers`; raise a `ClusterError` if one does not match its machine's description."""
    workers = reached_workers(cluster)
    for name, worker in workers.items():
        require_fit(cluster.machine(name), worker)
    return workers


def _target_of(cluster: Workers, machine: Machine) -> dict[str, Any]:
    if machine.target is not None:
        return _complete_target(machine, machine.target)
    if cluster.launcher.on_this_host:
        return host_target(machine.threads)
    description = describe(cluster.endpoints()[machine.name], timeout_seconds=DESCRIBE_TIMEOUT_SECONDS)
    require_fit(machine, description)
    return cpu_target(description.architecture, description.cpu_features, description.threads)


def _complete_target(machine: Machine, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's target with defaults filled in; raise a `ClusterError` if it is incomplete or invalid."""
    location = f"{machine.described_at}: " * bool(machine.described_at) + f"machine {machine.name!r}"
    completed = dict(target)
    kind = completed.get("kind")
    if kind == "llvm":
        completed.setdefault("num-cores", machine.threads)
    elif kind == "cuda":
        if "arch" not in completed:
            raise ClusterError(
                f"{location} has a CUDA target without 'arch'; give the GPU's, for example "
                '{"kind": "cuda", "arch": "sm_90"}'
            )
    else:
        raise ClusterError(f"{location} has a target of kind {kind!r}; 'llvm' and 'cuda' can be compiled for")
    try:
        tvm_target(completed)
    except PlanError as error:
        raise ClusterError(f"{location}: {error}") from error
    return completed
