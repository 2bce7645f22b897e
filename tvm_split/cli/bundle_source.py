"""From the BUNDLE argument, or a model, to a bundle and the cluster that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tvm_split.cli.model_source import ModelOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.planning import ClusterOptions, ClusterOrProcessOptions, PlanOptions

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.compiler.bundle import Bundle

SOURCE_HELP = "A folder of `tvm-split compile`, or a MODEL as for `tvm-split plan`, planned and compiled first."


def bundle_and_cluster(
    source: str, shapes: ModelOptions, request: PlanOptions, cluster: ClusterOptions
) -> tuple[Bundle, Cluster]:
    """The bundle that the argument names, or the model, planned and compiled; and where it runs."""
    from tvm_split.compiler.bundle import Bundle

    if not (Path(source) / "manifest.json").is_file():
        if Path(source).is_dir():
            raise WrongUseError(f"{source!r} is a folder without a bundle", "BUNDLE|MODEL")
        from tvm_split.compiling import compile

        loaded = shapes.load(source)
        machines = cluster.machines()
        planned = request.plan(source, loaded, machines)
        return compile(loaded, planned, database=request.database), machines
    if shapes != ModelOptions() or request != PlanOptions():
        raise WrongUseError("is planned and compiled already; leave options of the plan out", "BUNDLE")
    bundle = Bundle.load(source)
    return bundle, cluster_for(bundle, cluster)


def cluster_for(bundle: Bundle, request: ClusterOptions) -> Cluster:
    """The machines that the command line asks for; else workers on this host with the names that the bundle uses.

    Raises:
        ClusterError: the bundle is for machines elsewhere, or for some that this host cannot stand in for.
    """
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.cluster.machine import Machine
    from tvm_split.compiler.targets import runs_here
    from tvm_split.errors import ClusterError
    from tvm_split.launchers.local import InProcess, Local

    if request.is_given:
        return request.machines()
    in_process = isinstance(request, ClusterOrProcessOptions) and request.in_process
    planned = [bundle.plan.machine(name) for name in bundle.program.machines]
    elsewhere = ", ".join(f"{each.name} at {each.address}" for each in planned if each.address is not None)
    if elsewhere and request.workers is None and not in_process:
        raise ClusterError(
            f"the bundle was compiled for {elsewhere}: give --cluster with the file that names them, or try it on this "
            f"host with --workers {len(planned)}"
        )
    for each in planned:
        if not runs_here(each.target):
            raise ClusterError(
                f"the stages of {each.name!r} are compiled for {dict(each.target)}, which this host cannot run; "
                "give --cluster with the machines that the bundle was compiled for, or compile for this host"
            )
    if not in_process and (request.workers or len(planned)) < len(planned):
        names = ", ".join(each.name for each in planned)
        raise ClusterError(f"the bundle needs {len(planned)} workers ({names}), --workers gives {request.workers}")
    machines = tuple(Machine(each.name, request.threads or each.threads) for each in planned)
    return Cluster(machines, launcher=InProcess() if in_process else Local())
