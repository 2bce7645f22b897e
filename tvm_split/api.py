"""`compile_and_deploy`: one call from a trained network to a running pipeline."""

import contextlib
import gc
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rpc_runtime.option import options as options_of, takes_options
from tvm_split.arguments import ClusterLike, as_cluster
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiling import compile
from tvm_split.deployment.deployment import Deployment, deploy_on
from tvm_split.deployment.options import DeployOptions
from tvm_split.errors import OneMachineWarning
from tvm_split.frontends import load_model
from tvm_split.parameters import Size
from tvm_split.placement.problem import Objective
from tvm_split.placement.request import PlanRequest
from tvm_split.planning.advice import one_machine_advice
from tvm_split.planning.plan import SplitLike, plan, request_for
from tvm_split.progress import StepProgress, step_progress
from tvm_split.reached_workers import reached_workers


@takes_options(DeployOptions)
@takes_options(PlanRequest)
def compile_and_deploy(
    source: Any,
    example_inputs: Any = None,
    cluster: ClusterLike | None = None,
    split: SplitLike | None = None,
    stages: int | None = None,
    objective: Objective | None = None,
    *,
    request: PlanRequest | None = None,
    batch: Size | None = None,
    verify: bool = True,
    on_progress: StepProgress | None = None,
    **fields: Any,
) -> Deployment:
    """Import, plan, compile, verify and deploy a network, and return the running `Deployment`.

    Use the deployment as a context manager, or close it. Without a split, the network is measured on the machines and
    the best plan is used. That plan may use one machine only; then an `OneMachineWarning` gives the figures. A network
    that was planned before in the same way, from measurements that still hold, is deployed by that plan.

    Args:
        source: a torch module or exported program, a function of JAX or a module of Flax, a Keras model, a file of
            any of these or of ONNX, or a `Model`; see `tvm_split.load_model`.
        example_inputs: a tuple of the model's inputs; needed for modules and functions.
        cluster: the machines, a session of their workers, or a location as for `Cluster.at`, such as a cluster file; by
            default two worker processes on this host. It may be the second argument if there are no example inputs.
        request: how to plan; ``fields`` are fields of a `PlanRequest` that change it or create one, and options of
            `deploy`. The plan leaves out machines on standby.
        batch: the size of a dynamic batch dimension.
        verify: compare the compiled stages with the source before deployment.
        on_progress: called with the current step, the number of steps done and the number of all steps; by default
            they are shown on stderr (not with TVM_SPLIT_PROGRESS=0).
    """
    if cluster is None and isinstance(example_inputs, ClusterLike):
        example_inputs, cluster = None, example_inputs
    options = DeployOptions(
        **{field.name: fields.pop(field.name) for field in options_of(DeployOptions) if field.name in fields}
    )
    cluster = (Cluster.local() if cluster is None else as_cluster(cluster)).with_standby(options.standby)
    request = request_for(cluster.planned, request, fields, split=split, stages=stages, objective=objective)
    with (
        contextlib.ExitStack() as undo,
        _rare_garbage_collection(),
        contextlib.nullcontext(on_progress) if on_progress else step_progress("from network to pipeline") as report,
    ):
        workers = undo.enter_context(cluster.start())
        described = reached_workers(cluster.planned, request, deploys=True)
        with ThreadPoolExecutor(1) as pool:  # workers start while the frontend is imported
            starting = None if cluster.launcher.in_process else pool.submit(workers.endpoints)
            model = load_model(source, example_inputs, batch=batch)
        if starting is not None:
            starting.result()
        planned = plan(model, workers, request=request, reuse=True, described=described, on_progress=report)
        advice = one_machine_advice(planned, len(cluster.planned.machines))
        if advice is not None:
            warnings.warn(OneMachineWarning(f"{model.name}: {advice}"), stacklevel=3)
        bundle = compile(model, planned, verify=verify, database=request.database, on_progress=report)
        undo.pop_all()
        with step_progress("deploying"):
            return deploy_on(workers, bundle, options)


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Make Python collect garbage after 50,000 new objects instead of 700, since loading modules creates many.

    Planning and compiling a small network then take a tenth less processor time.
    """
    first, *older_thresholds = gc.get_threshold()
    if first >= 50_000:  # also if another thread is here, which restores the threshold
        yield
        return
    gc.set_threshold(50_000, *older_thresholds)
    try:
        yield
    finally:
        gc.set_threshold(first, *older_thresholds)
