"""Check that machines and workers fit a bundle, before anything is sent to them."""

import platform
from collections.abc import Mapping, Sequence

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.hardware import cpu_features
from rpc_runtime.program.codecs import NONE, fitting
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import StageSpec, weight_bytes
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import AUTO_CODEC, Machine
from tvm_split.compiler.bundle import Bundle, kernels_key
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit
from tvm_split.compiler.machine_targets import require_fit
from tvm_split.compiler.targets import require_executable
from tvm_split.errors import BundleError, ClusterError
from tvm_split.units import known_names


def check_machines(program: Program, cluster: Cluster) -> None:
    """Raise a `ClusterError` if the cluster lacks a machine of the program."""
    for machine in program.machines:
        if machine not in cluster.machine_names:
            known = known_names(cluster.machine_names, machine)
            raise ClusterError(
                f"the bundle has stages for machine {machine!r}; the cluster has {known}. Equal machines may take "
                f"their place: --rename {machine}=NAME, or bundle.renamed in Python"
            )


def check_same_model(bundle: Bundle, other: Bundle) -> None:
    """Raise a `BundleError` unless both bundles were compiled from the same graph and weights."""
    if bundle.model_digest != other.model_digest:
        one, two = (f"{b.model!r} (digest {b.model_digest[:12] or 'unknown'})" for b in (bundle, other))
        raise BundleError(f"the deployment runs the model {one}, and the bundle has {two}: compile it from that model")


def check_codecs(program: Program, cluster: Cluster) -> None:
    """Raise a `ClusterError` if the cluster names other codecs than those that the bundle was planned with."""
    for route in program.routes:
        link = cluster.link(route.source, route.destination)
        if link is None or link.codec in (AUTO_CODEC, NONE):
            continue
        codec = fitting(link.codec, route.tensor)
        if codec != route.codec:
            raise ClusterError(
                f"the link from {link.source!r} to {link.destination!r} has codec {link.codec!r}, which would write "
                f"tensor {route.tensor.name!r} as {codec}, and the bundle was planned with {route.codec}: plan and "
                "compile for this cluster, or take the codec out of it"
            )


def check_runnable_here(bundle: Bundle) -> None:
    """Raise a `ClusterError` if this process cannot run the stages, which an in-process cluster does."""
    for stage in bundle.program.stages:
        target = bundle.plan.machine(stage.machine).target
        if target["kind"] != "llvm":
            raise ClusterError(
                f"{stage.name} is compiled for {dict(target)}; an in-process cluster runs CPU stages only"
            )
        require_executable(stage.name, stage.machine, target, platform.machine(), cpu_features())


def check_workers(
    bundle: Bundle,
    cluster: Cluster,
    program: Program,
    endpoints: Mapping[str, WorkerEndpoint],
    workers: Mapping[str, WorkerDescription],
) -> None:
    """Validate the description of each worker against the needs of its stages in ``program``."""
    for name, worker in workers.items():
        stages, address = program.stages_on(name), endpoints[name].address
        if not cluster.launcher.on_this_host:
            require_fit(cluster.machine(name), worker)
            # A stage that was moved may run on fewer threads than were planned.
            planned = bundle.plan.machine(name).threads if program is bundle.program else 0
            if planned > worker.threads:
                raise ClusterError(
                    f"the bundle was planned for {planned} threads of {name!r}, and its worker at "
                    f"{address} computes with {worker.threads}; start it with --threads {planned}, or "
                    f"plan and compile for threads: {worker.threads}"
                )
        check_worker(bundle, stages, cluster.machine(name), address, worker)


def check_worker(
    bundle: Bundle, stages: Sequence[StageSpec], machine: Machine, address: str, worker: WorkerDescription
) -> None:
    """Raise an error unless the worker of a machine can run these stages of a bundle, wherever they were planned."""
    name, named = machine.name, ", ".join(stage.name for stage in stages)
    versions = {"apache-tvm": worker.tvm_version, "apache-tvm-ffi": worker.tvm_ffi_version}
    for package, compiled_version in bundle.versions.items():
        worker_version = versions.get(package, "unknown")
        if worker_version != compiled_version:
            raise BundleError(
                f"the bundle was compiled with {package} {compiled_version}, the worker of {name!r} at "
                f"{address} has {worker_version}; install the same version on both, or compile again"
            )
    for stage in stages:
        planned = _planned(bundle, stage)
        target = bundle.plan.machine(planned.machine).target
        if stage.device == "cpu":
            require_executable(stage.name, name, target, worker.architecture, worker.cpu_features)
            continue
        needs = bundle.cuda.get(kernels_key(planned), CudaNeeds(str(target["arch"]), None))
        problem = cuda_misfit(needs, worker)
        if problem:
            raise ClusterError(
                f"{stage.name} on {name!r} is compiled for CUDA, and the worker at {address} {problem}. "
                "Or plan the stage for another machine, or give this one an llvm target"
            )
    needed = weight_bytes(stages)
    if machine.memory_bytes is not None and needed > machine.memory_bytes:
        raise ClusterError(
            f"{name!r} needs {needed / 1e9:.3f} GB for the weights of {named}, but has "
            f"{machine.memory_bytes / 1e9:.3f} GB; move layers to another machine"
        )


def _planned(bundle: Bundle, stage: StageSpec) -> StageSpec:
    """Return the stage as it was planned; ``stage`` may be on another machine, or have another replica's number."""
    replicas = bundle.program.replicas[stage.name]
    return next((replica for replica in replicas if replica.library == stage.library), replicas[0])
