"""The one call from a trained network to a running pipeline."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_split.cluster.cluster import Cluster
from tvm_split.compiling import compile
from tvm_split.deployment.deployment import DEFAULT_TIMEOUT_SECONDS, Deployment, deploy
from tvm_split.errors import OneMachineWarning
from tvm_split.frontends import load_model
from tvm_split.planner.explain import one_machine_advice
from tvm_split.planner.problem import Objective, Precision
from tvm_split.planner.request import PlanRequest, Split
from tvm_split.planner.shard import Shard, as_shards
from tvm_split.planning import plan_as_requested
from tvm_split.progress import step_progress


def compile_and_deploy(
    source: Any,
    example_inputs: Any = None,
    cluster: Cluster | None = None,
    split: Split | None = None,
    stages: int | None = None,
    objective: Objective = "throughput",
    *,
    shards: Shard | Sequence[Shard] | None = None,
    consider_shards: bool = True,
    batch: int | None = None,
    verify: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    in_flight: int | None = None,
    allow_lossy: float = 0.0,
    precision: Precision = "float32",
    database: str | Path | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Deployment:
    """Import, plan, compile, verify and deploy a network.

    Without ``split`` the network is measured on the machines and the best plan for them is taken, which may use one
    machine alone; an `OneMachineWarning` then gives the figures.

    Args:
        source: a torch module or exported program, a function of JAX or a module of Flax, a Keras model, a file of
            any of these or of ONNX, or a `Model`; see `tvm_split.load_model`.
        example_inputs: a tuple of inputs, as the model takes them; needed for modules and functions.
        cluster: where to run; by default two worker processes on this host.
        split: layers by machine, in the source's own names; without it the planner decides.
        stages: exactly so many stages.
        shards: layers that machines compute together; see `tvm_split.Shard`.
        consider_shards: whether a plan for latency may have such layers by itself.
        objective: ``"throughput"`` or ``"latency"``.
        batch: the size of a dynamic batch dimension.
        verify: compare the compiled stages with the source before anything is deployed.
        timeout_seconds: the longest wait for a worker's answer or the next result.
        in_flight: so many micro-batches of a stream are under way at most; see `deploy`.
        allow_lossy: how much the codecs of links may change outputs; see `tvm_split.planner.request.PlanRequest`.
        precision: of the operands of convolutions and products; ``"float16"`` or ``"bfloat16"`` rounds them.
        database: tuned kernels, to be measured and compiled; see `tvm_split.compile`.
        on_progress: called with what is being done, the steps done and all steps; by default they are shown
            on stderr (TVM_SPLIT_PROGRESS=0: not).

    Returns:
        A running `Deployment`; use it as a context manager, or close it.
    """
    cluster = cluster if cluster is not None else Cluster.local()
    with cluster.kept(), contextlib.ExitStack() as bars:
        bars.enter_context(_rare_garbage_collection())
        with cluster.starting():  # beside which what imports networks is imported
            model = load_model(source, example_inputs, batch=batch)
        report = on_progress or bars.enter_context(step_progress("planning"))
        request = PlanRequest(
            objective,
            stages,
            split,
            as_shards(shards),
            consider_shards=consider_shards,
            database=database,
            allow_lossy=allow_lossy,
            precision=precision,
        )
        planned = plan_as_requested(model, cluster, request, on_progress=report)
        advice = one_machine_advice(planned, len(cluster.machines))
        if advice is not None:
            warnings.warn(OneMachineWarning(f"{model.name}: {advice}"), stacklevel=2)
        bundle = compile(model, planned, verify=verify, database=database, on_progress=report)
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
