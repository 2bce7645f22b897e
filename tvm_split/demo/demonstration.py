"""Run the demonstration: train, split, compile, run, compare. `tvm_split.display.demo` prints the result."""

import math
import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.worker_client import describe
from rpc_runtime.program.events import StageStatistics, TraceEvent
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.bundle import Bundle
from tvm_split.compiling import compile
from tvm_split.demo.network import FIRST_LAYERS, accuracy, load_digits, scores_of, shards_over, train
from tvm_split.deployment.benchmark import bench
from tvm_split.deployment.deployment import Deployment, deploy
from tvm_split.deployment.deployment_report import DeploymentReport
from tvm_split.errors import PlanError, RecoveryWarning, VerificationError
from tvm_split.frontends import load_model
from tvm_split.model import Model
from tvm_split.planning.plan import plan
from tvm_split.progress import StepProgress

SEED = 0
MICRO_BATCH = 120
"""Images in a micro-batch: enough that computing outweighs the cost of a message; divides `TEST_IMAGES`."""
SHOWN_MICRO_BATCHES = 6
STREAMED = 250
"""Micro-batches of each measured stream, about half a second; one pass over the test set takes milliseconds."""
ALLOWED_DIFFERENCE = 1e-5
"""The limit between scores before and after the split; float32 rounding differs by about 1e-6 at scores up to 10."""


@dataclass(frozen=True)
class Run:
    """The results of running the pipeline: scores, and the median seconds for one pass over the test set.

    ``events`` are those of the last measured stream, ``first_events`` those of the pass over the test set after it.
    """

    scores: np.ndarray
    pipelined_seconds: float
    one_by_one_seconds: float
    statistics: tuple[StageStatistics, ...]
    events: tuple[TraceEvent, ...]
    first_events: tuple[TraceEvent, ...]


@dataclass(frozen=True)
class Demonstration:
    """The compiled bundle, the run's results, and the comparison with the unsplit network; accuracies are in [0, 1].

    ``one_worker_seconds`` is the median for one pass over the test set, streamed through one worker with all layers.
    """

    bundle: Bundle
    ran: Run
    one_worker_seconds: float
    test_images: int
    accuracy_unsplit: float
    accuracy_split: float
    largest_difference: float
    recovered: DeploymentEvent | None = None
    """With ``kill``: what happened when a machine died in a stream of `STREAMED` micro-batches."""

    @property
    def micro_batches(self) -> int:
        return self.test_images // MICRO_BATCH


def demonstrate(
    workers: int, folder: Path, on_step: StepProgress, *, shard: bool = False, kill: bool = False
) -> Demonstration:
    """Run the whole demonstration on 1 to 4 workers; the bundle, with the full IR, is left in ``folder / "bundle"``.

    With ``shard`` each layer is sharded over all workers, and micro-batches run one after the other. With ``kill`` a
    worker is killed in a second stream.

    Raises:
        VerificationError: the scores of the split network differ from those of the whole one.
        PlanError: sharding was requested with one worker, or killing it.
    """
    if kill and workers == 1:
        raise PlanError("without its only worker nothing is left: give --kill with --workers 2 or more")
    steps = 6
    on_step("reading the digits", 0, steps)
    cluster = Cluster.local(workers=workers)
    split = None if shard else [[layer] for layer in FIRST_LAYERS[workers]]
    shards = shards_over(cluster.machine_names) if shard else ()
    digits = load_digits(SEED)
    network = train(digits, SEED, lambda done, epochs: on_step(f"training, epoch {done} of {epochs}", 1, steps))
    on_step("planning", 2, steps)
    model = load_model(network, (digits.test_images[:MICRO_BATCH],))
    planned = plan(model, cluster, split=split, shards=shards)
    bundle = compile(model, planned, on_progress=lambda what, done, parts: on_step(what, 3, steps))
    bundle.save(folder / "bundle")
    on_step(f"running the test set on {workers} workers", 4, steps)
    batches = digits.test_images.reshape(-1, MICRO_BATCH, *digits.test_images.shape[1:])
    with deploy(bundle, cluster) as deployment:
        ran = _run(deployment, batches, shows_stream=not shard)
    recovered = _survived(bundle, cluster, batches, ran.scores) if kill else None
    on_step("running the test set on one worker", 5, steps)
    one_worker_seconds = ran.pipelined_seconds if workers == 1 else _one_worker_seconds(model, batches)
    expected = scores_of(network, digits.test_images)
    largest_difference = float(np.abs(ran.scores - expected).max())
    if not largest_difference <= ALLOWED_DIFFERENCE:
        raise VerificationError(
            f"the split network's scores differ from torch's by {largest_difference:.3g}; {ALLOWED_DIFFERENCE:.3g} is "
            "allowed"
        )
    on_step("done", steps, steps)
    return Demonstration(
        bundle=bundle,
        ran=ran,
        one_worker_seconds=one_worker_seconds,
        test_images=len(digits.test_labels),
        accuracy_unsplit=accuracy(expected, digits.test_labels),
        accuracy_split=accuracy(ran.scores, digits.test_labels),
        largest_difference=largest_difference,
        recovered=recovered,
    )


def _run(deployment: Deployment, batches: np.ndarray, *, shows_stream: bool) -> Run:
    measured = _measured(deployment, batches)
    results = list(deployment.stream(batches)) if shows_stream else [deployment.run(batch) for batch in batches]
    events = deployment.trace().events
    first = max(event.sequence for event in events) + 1 - len(batches)
    return Run(
        np.concatenate([scores for (scores,) in results]),
        (measured.period.measured or math.nan) * len(batches),
        (measured.latency.measured or math.nan) * len(batches),
        deployment.stats().stages,
        tuple(event for event in events if first - STREAMED <= event.sequence < first),
        tuple(replace(event, sequence=event.sequence - first) for event in events if event.sequence >= first),
    )


def _survived(bundle: Bundle, cluster: Cluster, batches: np.ndarray, scores: np.ndarray) -> DeploymentEvent:
    """Kill the last machine in the middle of a stream, and check each result; return the event of the recovery."""
    with cluster as workers, deploy(bundle, workers, on_failure="recover") as deployment, warnings.catch_warnings():
        warnings.simplefilter("ignore", RecoveryWarning)
        process = describe(workers.endpoints()[deployment.stages[-1].machine]).process_id

        def fed() -> Iterator[np.ndarray]:
            for number in range(STREAMED):
                if number == STREAMED // 2:
                    os.kill(process, signal.SIGKILL)
                yield batches[number % len(batches)]

        results = np.stack([outputs[0] for outputs in deployment.stream(fed())])
        expected = scores.reshape(len(batches), MICRO_BATCH, -1)[np.arange(STREAMED) % len(batches)]
        if not np.array_equal(results, expected):
            raise VerificationError("results are missing after the recovery, or differ from those before it")
        return next(event for event in deployment.events if event.kind == "recovered")


def _measured(deployment: Deployment, batches: np.ndarray) -> DeploymentReport:
    return bench(deployment, list(batches), micro_batches=STREAMED)


def _one_worker_seconds(model: Model, batches: np.ndarray) -> float:
    """Return the seconds for the test set in a stream through one worker with all layers."""
    cluster = Cluster.local(workers=1)
    bundle = compile(model, plan(model, cluster), verify=False, on_progress=lambda what, done, steps: None)
    with deploy(bundle, cluster) as deployment:
        return (_measured(deployment, batches).period.measured or math.nan) * len(batches)
