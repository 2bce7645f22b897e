"""Find the compilation targets of machines, and check that their workers match."""

from collections.abc import Iterable, Mapping
from typing import Any

from rpc_runtime.client.worker_client import WorkerDescription, describe_all
from rpc_runtime.execution.cuda_code import toolkit_version
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.cluster.launcher import worker_misfit
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit
from tvm_split.compiler.targets import cannot_execute, cpu_target, host_target, tvm_target
from tvm_split.errors import ClusterError, PlanError


def resolve_targets(
    cluster: Workers, names: Iterable[str], described: Mapping[str, WorkerDescription] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the target of every named machine: the described one, this host's, or the one that its worker reports.

    Workers that are not in ``described`` are asked.

    Raises:
        WorkerUnavailableError: workers that have to report their target cannot be reached.
        ClusterError: a described target is invalid, or a worker does not match its machine's description.
    """
    machines = {name: cluster.machine(name) for name in sorted(names)}
    targets = {name: _complete_target(machine, machine.target) for name, machine in machines.items() if machine.target}
    unknown = [name for name in machines if name not in targets]
    if cluster.launcher.on_this_host:
        return targets | {name: host_target(machines[name].threads) for name in unknown}
    answers = dict(described or {})
    unasked = [name for name in unknown if name not in answers]
    endpoints = cluster.endpoints() if unasked else {}
    answers |= describe_all({name: endpoints[name] for name in unasked})
    for name in unknown:
        worker = answers[name]
        require_fit(machines[name], worker)
        targets[name] = cpu_target(worker.architecture, worker.cpu_features, worker.threads)
    return targets


def require_known_targets(cluster: Cluster) -> None:
    """Raise a `ClusterError` for a described target that cannot be compiled for; contacts no worker."""
    for machine in cluster.machines:
        if machine.target is not None:
            _complete_target(machine, machine.target)


def misfit(machine: Machine, worker: WorkerDescription) -> str:
    """Return why the worker at a machine's address does not match its description, and what to do; empty if it does.

    `worker_misfit` makes the checks that need no TVM; this function adds those of the target.
    """
    if problem := worker_misfit(machine, worker):
        return problem
    if machine.target is None:
        return ""
    start = f"machine {machine.name!r} is described with the target {dict(machine.target)}, and its worker"
    if problem := cannot_execute(machine.target, worker.architecture, worker.cpu_features):
        return (
            f"{start}'s processor {problem}: code for it would crash there. Give the machine its right target, or "
            "leave it out"
        )
    if machine.target["kind"] != "cuda" or "arch" not in machine.target:
        return ""
    problem = cuda_misfit(CudaNeeds(str(machine.target["arch"]), toolkit_version()), worker)
    return f"{start} {problem}" if problem else ""


def require_fit(machine: Machine, worker: WorkerDescription) -> None:
    """Raise a `ClusterError` if the worker does not match its machine's description (`misfit`)."""
    problem = misfit(machine, worker)
    if problem:
        raise ClusterError(problem)


def _complete_target(machine: Machine, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's target with defaults filled in; raise a `ClusterError` if it is incomplete or invalid."""
    location = f"{machine.described_at}: " * bool(machine.described_at) + f"machine {machine.name!r}"
    completed = dict(target)
    kind = completed.get("kind")
    if kind == "llvm":
        completed.setdefault("num-cores", machine.threads)
    elif kind != "cuda":
        raise ClusterError(f"{location} has a target of kind {kind!r}; 'llvm' and 'cuda' can be compiled for")
    try:
        tvm_target(completed)
    except PlanError as error:
        raise ClusterError(f"{location}: {error}") from error
    return completed
