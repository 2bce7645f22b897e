"""Split a neural network over unequal machines, compile each part for its machine, and run them as one pipeline.

    import tvm_split

    with tvm_split.compile_and_deploy(network, (x,), tvm_split.Cluster.local(workers=2)) as deployment:
        (y,) = deployment.run(x)

Names are loaded when they are first used, so that a worker, which needs none of the compiler, starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpc_runtime.errors import (
        BlobError as BlobError,
        DeadlineError as DeadlineError,
        InputError as InputError,
        ProtocolError as ProtocolError,
        StageError as StageError,
        TvmSplitError as TvmSplitError,
        WorkerError as WorkerError,
        WorkerUnavailableError as WorkerUnavailableError,
    )
    from tvm_split.api import compile_and_deploy as compile_and_deploy
    from tvm_split.cluster.cluster import Cluster as Cluster
    from tvm_split.cluster.machine import Link as Link, Machine as Machine
    from tvm_split.cluster.shared_cores import SharedCores as SharedCores
    from tvm_split.compiler.bundle import Bundle as Bundle
    from tvm_split.compiling import compile as compile
    from tvm_split.deployment.benchmark import bench as bench
    from tvm_split.deployment.deployment import Deployment as Deployment, deploy as deploy
    from tvm_split.deployment.deployment_report import DeploymentReport as DeploymentReport
    from tvm_split.errors import (
        BundleError as BundleError,
        ClusterError as ClusterError,
        CompileError as CompileError,
        MeasurementsWarning as MeasurementsWarning,
        ModelImportError as ModelImportError,
        OneMachineWarning as OneMachineWarning,
        PlanError as PlanError,
        TuningError as TuningError,
        UntriedVersionWarning as UntriedVersionWarning,
        VerificationError as VerificationError,
    )
    from tvm_split.frontends import load_model as load_model
    from tvm_split.model import Model as Model
    from tvm_split.planner.plan import Plan as Plan
    from tvm_split.planner.shard import Shard as Shard
    from tvm_split.planning import plan as plan
    from tvm_split.tuning import TuningReport as TuningReport, merge_databases as merge_databases, tune as tune

__version__ = "0.1.0"

_HOMES = {
    "rpc_runtime.errors": (
        "BlobError", "DeadlineError", "InputError", "ProtocolError", "StageError", "TvmSplitError", "WorkerError",
        "WorkerUnavailableError",
    ),
    "tvm_split.api": ("compile_and_deploy",),
    "tvm_split.deployment.benchmark": ("bench",),
    "tvm_split.compiler.bundle": ("Bundle",),
    "tvm_split.cluster.cluster": ("Cluster",),
    "tvm_split.compiling": ("compile",),
    "tvm_split.deployment.deployment": ("Deployment", "deploy"),
    "tvm_split.deployment.deployment_report": ("DeploymentReport",),
    "tvm_split.errors": (
        "BundleError", "ClusterError", "CompileError", "MeasurementsWarning", "ModelImportError",
        "OneMachineWarning", "PlanError", "TuningError", "UntriedVersionWarning", "VerificationError",
    ),
    "tvm_split.frontends": ("load_model",),
    "tvm_split.cluster.machine": ("Link", "Machine"),
    "tvm_split.cluster.shared_cores": ("SharedCores",),
    "tvm_split.model": ("Model",),
    "tvm_split.planner.plan": ("Plan",),
    "tvm_split.planner.shard": ("Shard",),
    "tvm_split.planning": ("plan",),
    "tvm_split.tuning": ("TuningReport", "merge_databases", "tune"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tvm_split' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
