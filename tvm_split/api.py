"""The one call from a trained network to a running pipeline."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

from rpc_runtime.option import takes_options
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiling import compile
from tvm_split.deployment.deployment import DEFAULT_TIMEOUT_SECONDS, Deployment, deploy
from tvm_split.errors import OneMachineWarning
from tvm_split.frontends import load_model
from tvm_split.planner.explain import one_machine_advice
from tvm_split.planner.request import PlanRequest
from tvm_split.planning import plan
from tvm_split.progress import step_progress
from tvm_split.steps import StepProgress


@takes_options(PlanRequest)
def compile_and_deploy(
    source: Any,
    example_inputs: Any = None,
    cluster: Cluster | None = None,
    request: PlanRequest | None = None,
    *,
    batch: int | None = None,
    verify: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    in_flight: int | None = None,
    on_progress: StepProgress | None = None,
    **fields: Any,
) -> Deployment:
    """A network that is imported, planned, compiled, verified and deployed: a running `Deployment`.

    Use it as a context manager, or close it. Without a split the network is measured on the machines and the best plan
    for them is taken, which may use one machine alone; an `OneMachineWarning` then gives the figures.

    Args:
        source: a torch module or exported program, a function of JAX or a module of Flax, a Keras model, a file of
            any of these or of ONNX, or a `Model`; see `tvm_split.load_model`.
        example_inputs: a tuple of inputs, as the model takes them; needed for modules and functions.
        cluster: where to run; by default two worker processes on this host.
        request: how to plan; ``fields`` are fields of a `PlanRequest`, which change it or make one.
        batch: the size of a dynamic batch dimension.
        verify: compare the compiled stages with the source before anything is deployed.
        timeout_seconds: the longest wait for a worker's answer or the next result.
        in_flight: so many micro-batches of a stream are under way at most; see `deploy`.
        on_progress: called with what is being done, the steps done and all steps; by default they are shown
            on stderr (TVM_SPLIT_PROGRESS=0: not).
    """
    request = PlanRequest.of(request, fields)
    cluster = cluster if cluster is not None else Cluster.local()
    with cluster.kept(), contextlib.ExitStack() as bars:
        bars.enter_context(_rare_garbage_collection())
        with cluster.starting():  # beside which what imports networks is imported
            model = load_model(source, example_inputs, batch=batch)
        report = on_progress or bars.enter_context(step_progress("planning"))
        planned = plan(model, cluster, request, on_progress=report)
        advice = one_machine_advice(planned, len(cluster.machines))
        if advice is not None:
            warnings.warn(OneMachineWarning(f"{model.name}: {advice}"), stacklevel=2)
        bundle = compile(model, planned, verify=verify, database=request.database, on_progress=report)
    return deploy(bundle, cluster, timeout_seconds=timeout_seconds, in_flight=in_flight)


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Inside, Python collects garbage after 50,000 new objects instead of 700: most belong to modules that are loaded.

    Planning and compiling a small network take a tenth less processor time.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, 50_000), *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
