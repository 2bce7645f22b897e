"""Measure a deployment: alternate single runs for its latency with streams for its throughput."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rpc_runtime.errors import InputError
from rpc_runtime.program.events import now
from tvm_split.arguments import inputs_of_batch
from tvm_split.deployment.batch import Batch
from tvm_split.deployment.deployment import Deployment
from tvm_split.deployment.deployment_report import DeploymentReport
from tvm_split.errors import required
from tvm_split.parameters import Count
from tvm_split.progress import StepProgress

RUNS_PER_ROUND = 5
WARM_UP_RUNS = 3


def bench(
    deployment: Deployment,
    inputs: Sequence[Any],
    *,
    rounds: Count = 5,
    micro_batches: Annotated[Count, Field(ge=3)] = 100,
    on_progress: StepProgress | None = None,
) -> DeploymentReport:
    """Run a deployment and compare its measurements with the prediction of its plan.

    The first runs and one stream are a warm-up of caches, connections and clocks, and do not count. Then follow
    ``rounds`` rounds of `RUNS_PER_ROUND` single runs and one stream each, so that a disturbance affects both. The
    report has the medians of all single runs, of the streams' steady parts, and of every stage within these parts.

    Args:
        inputs: each as for `Deployment.stream`, or a single array or dict; their micro-batches are used cyclically.
        rounds: at least 1.
        micro_batches: of each stream, at least 3; the first results, up to a tenth, do not count: the pipeline fills.

    Raises:
        InputError: no inputs, too few rounds or micro-batches, or inputs that do not fit the model.
        WorkerUnavailableError, StageError, DeadlineError: as `Deployment.run`.
    """
    required(Deployment, deployment, InputError, "give what tvm_split.deploy(bundle, cluster) returns")
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        raise InputError(f"inputs={inputs!r} was given; give a list of micro-batches, or one array or dict")
    listed = [inputs] if hasattr(inputs, "shape") or isinstance(inputs, Mapping) else inputs
    expected, rows = deployment.program.inputs, deployment.bundle.rows
    batches = [micro for batch in listed for micro in Batch(expected, rows, inputs_of_batch(expected, batch))]
    if not batches:
        raise InputError("nothing to measure with: give at least one micro-batch")
    fed = itertools.cycle(batches)
    # Enough to fill every queue of the pipeline once, but not more than a measured stream.
    warm_up = min(micro_batches, 8 * (1 + len(deployment.stages)))
    whole = WARM_UP_RUNS + warm_up + rounds * (RUNS_PER_ROUND + micro_batches)
    steps = itertools.count(1)

    def advance(doing: str) -> None:
        if on_progress is not None:
            on_progress(doing, next(steps), whole)

    def run(doing: str) -> None:
        deployment.run(*next(fed))
        advance(doing)

    def stream(count: int, doing: str) -> None:
        for _ in deployment.stream(itertools.islice(fed, count)):
            advance(doing)

    for _ in range(WARM_UP_RUNS):
        run("warming up")
    stream(warm_up, "warming up")
    since = now()
    for number in range(1, rounds + 1):
        for _ in range(RUNS_PER_ROUND):
            run(f"round {number} of {rounds}: latency")
        stream(micro_batches, f"round {number} of {rounds}: throughput")
    return deployment.report(since)
