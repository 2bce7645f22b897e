"""From a bundle on disk to the cluster that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tvm_split.cli.planning import ClusterOptions, ClusterOrProcessOptions

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.compiler.bundle import Bundle


def is_bundle(path: str) -> bool:
    return (Path(path) / "manifest.json").is_file()


def cluster_for(bundle: Bundle, request: ClusterOptions) -> Cluster:
    """The machines that the command line asks for; else workers on this host with the names that the bundle uses.

    Raises:
        ClusterError: the bundle is for machines that this host cannot stand in for.
    """
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.cluster.machine import Machine

    if request.cluster is not None:
        return request.machines()
    _require_runnable_here(bundle)
    if request.workers is not None:
        return request.machines()
    planned = [bundle.plan.machine(name) for name in bundle.program.machines]
    machines = tuple(Machine(each.name, request.threads or each.threads) for each in planned)
    in_process = isinstance(request, ClusterOrProcessOptions) and request.in_process
    return Cluster("in_process" if in_process else "local", machines)


def _require_runnable_here(bundle: Bundle) -> None:
    from tvm_split.compiler.targets import runs_here
    from tvm_split.errors import ClusterError

    for machine in bundle.plan.machines:
        if not runs_here(machine.target):
            raise ClusterError(
                f"the stages of {machine.name!r} are compiled for {dict(machine.target)}, which this host cannot run; "
                "give --cluster with the machines that the bundle was compiled for, or compile for this host"
            )
