# Every public name once: this file is what `__init__.py` loads them by, and what type checkers read.
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
from tvm_split.cluster.cluster import Cluster as Cluster, Workers as Workers
from tvm_split.cluster.machine import Link as Link, Machine as Machine, SharedCores as SharedCores
from tvm_split.compiler.bundle import Bundle as Bundle
from tvm_split.compiling import compile as compile
from tvm_split.deployment.benchmark import bench as bench
from tvm_split.deployment.deployment import Deployment as Deployment, deploy as deploy
from tvm_split.deployment.deployment_report import DeploymentReport as DeploymentReport
from tvm_split.errors import (
    BundleError as BundleError,
    CacheWarning as CacheWarning,
    ClusterError as ClusterError,
    CompileError as CompileError,
    ModelImportError as ModelImportError,
    OneMachineWarning as OneMachineWarning,
    PlanError as PlanError,
    RecoveryWarning as RecoveryWarning,
    TuningError as TuningError,
    UntriedVersionWarning as UntriedVersionWarning,
    VerificationError as VerificationError,
)
from tvm_split.frontends import load_model as load_model
from tvm_split.model import Model as Model
from tvm_split.placement.by_hand import Shard as Shard
from tvm_split.placement.plan import Plan as Plan
from tvm_split.placement.request import PlanRequest as PlanRequest
from tvm_split.placement.search import solve as solve
from tvm_split.planning.plan import plan as plan
from tvm_split.planning.replan import replan as replan
from tvm_split.profiling.cluster_profile import profile as profile
from tvm_split.simulation.simulate import simulate as simulate
from tvm_split.tuning import TuningReport as TuningReport, merge_databases as merge_databases, tune as tune

__version__: str

def require_own_packages() -> None: ...

__all__: list[str]
