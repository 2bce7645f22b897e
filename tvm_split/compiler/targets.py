"""Targets: what the machines' own are, and what this host can run."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

import tvm

from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine, require_fit
from tvm_split.compiler.instruction_sets import cannot_execute, own_features
from tvm_split.compiler.placement import tvm_target
from tvm_split.errors import ClusterError, PlanError
from tvm_split.rpc_runtime.client.client import describe

DESCRIBE_TIMEOUT_SECONDS = 10.0


def host_target(threads: int) -> dict[str, Any]:
    """This host's CPU as a TVM target."""
    return {"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(), "num-cores": threads}


def resolve_targets(cluster: Cluster, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The target of every named machine; workers of other hosts are asked what they are."""
    return {name: _target_of(cluster, cluster.machine(name)) for name in sorted(names)}


def require_known_targets(cluster: Cluster) -> None:
    """Raise a `ClusterError` for a target in the cluster's description that cannot be compiled for; contacts nobody."""
    for machine in cluster.machines:
        if machine.target is not None:
            _complete_target(machine, machine.target)


def _target_of(cluster: Cluster, machine: Machine) -> dict[str, Any]:
    if machine.target is not None:
        return _complete_target(machine, machine.target)
    if cluster.kind != "remote":
        return host_target(machine.threads)
    description = describe(cluster.endpoints()[machine.name], timeout_seconds=DESCRIBE_TIMEOUT_SECONDS)
    require_fit(machine, description)
    target = {"kind": "llvm", "mcpu": description.mcpu, "num-cores": description.threads}
    if description.architecture != platform.machine():
        target["mtriple"] = f"{description.architecture}-linux-gnu"
    return target


def _complete_target(machine: Machine, target: Mapping[str, Any]) -> dict[str, Any]:
    """A target as the user gave it, with what can be added, or a `ClusterError` for what must be said."""
    completed = dict(target)
    kind = completed.get("kind")
    if kind == "llvm":
        completed.setdefault("num-cores", machine.threads)
    elif kind == "cuda":
        if "arch" not in completed:
            raise ClusterError(
                f"machine {machine.name!r} has a CUDA target without 'arch'; give the GPU's, for example "
                '{"kind": "cuda", "arch": "sm_90"}'
            )
    else:
        raise ClusterError(
            f"machine {machine.name!r} has a target of kind {kind!r}; 'llvm' and 'cuda' can be compiled for"
        )
    try:
        tvm_target(completed)
    except PlanError as error:
        raise ClusterError(f"machine {machine.name!r}: {error}") from error
    return completed


def runs_here(target: Mapping[str, Any]) -> bool:
    """Whether this host can run code for a target: a CPU's, of its architecture and with instructions that it has."""
    return target["kind"] == "llvm" and not cannot_execute(target, platform.machine(), own_features())
