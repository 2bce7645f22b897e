"""Measures what streams take from computing: stages that really compute, for a short and for a longer time."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import numpy as np

from tvm_split.measuring.link_samples import CrowdSample, StreamSample, median_sample
from tvm_split.measuring.link_store import CrowdProbe, StreamProbe
from tvm_split.rpc_runtime.client.pipeline import Pipeline

PRODUCTS = (2, 10)
"""Of matrices, in the stages: about 2 and 10 ms on a present-day core."""
CROWD_PRODUCTS = (1, 4)
"""In each of many stages in turn."""
ROUNDS = 3
"""Short and long computing take turns, so that a disturbance spoils a round of both, and medians of rounds are kept."""
MOST_ROUNDS, MOST_SECONDS = 5 * ROUNDS, 1.0
"""As long as the medians contradict themselves: so many, or no more than for so long."""
SINGLE_RUNS = 3
STREAM_SECONDS, FEWEST_STREAMED, FEWEST_OF_CHAIN, FILL = 0.06, 6, 3, 4


def probe_streams(names: Sequence[str], opened: Callable[[str, int], Pipeline], timeout_seconds: float) -> StreamProbe:
    """A stream through each of the machines at the same time, with short and with longer computing.

    Each machine has a stream of its own: what links between them do is measured elsewhere.

    Args:
        opened: a pipeline through one stage that computes so many products on this machine; closed here.
        timeout_seconds: how long the machines wait for one another before their streams begin.
    """
    samples: dict[str, list[list[StreamSample]]] = {name: [[] for _ in PRODUCTS] for name in names}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(names), thread_name_prefix="probe") as threads:
        pipelines = {
            name: [stack.enter_context(contextlib.closing(opened(name, products))) for products in PRODUCTS]
            for name in names
        }
        begin = time.monotonic()
        for number in range(MOST_ROUNDS):
            if number >= ROUNDS and (time.monotonic() - begin > MOST_SECONDS or not _are_contradictory(samples)):
                break
            for place in range(len(PRODUCTS)):
                singles = {name: _single_runs(pipelines[name][place]) for name in names}
                start = Barrier(len(names), timeout=timeout_seconds)
                running = [threads.submit(_period, pipelines[name][place], start) for name in names]
                for name, period in zip(names, _results(running), strict=True):
                    samples[name][place].append(StreamSample(*singles[name], period))
    return StreamProbe(time.time(), _medians(samples))


def probe_crowd(opened: Callable[[int], Pipeline]) -> CrowdProbe:
    """A chain of machines that share too few cores: in a stream, and single micro-batches.

    Args:
        opened: a pipeline through stages of so many products, 0 of them included; closed here.
    """
    periods: list[float] = []
    samples: list[list[CrowdSample]] = [[] for _ in CROWD_PRODUCTS]
    with contextlib.ExitStack() as stack:
        passing, *busy = (
            stack.enter_context(contextlib.closing(opened(products))) for products in (0, *CROWD_PRODUCTS)
        )
        for _ in range(ROUNDS):
            periods.append(_period(passing))
            for products, pipeline, found in zip(CROWD_PRODUCTS, busy, samples, strict=True):
                singles = _single_runs(pipeline)
                period = _period(pipeline) if products == min(CROWD_PRODUCTS) else None
                found.append(CrowdSample(products, *singles, period))
    medians = tuple(map(_median_of_crowd, samples))
    return CrowdProbe(time.time(), statistics.median(periods), medians)


def _median_of_crowd(samples: Sequence[CrowdSample]) -> CrowdSample:
    periods = [each.period_seconds for each in samples if each.period_seconds is not None]
    return CrowdSample(
        samples[0].products,
        statistics.median(each.compute_seconds for each in samples),
        statistics.median(each.single_seconds for each in samples),
        statistics.median(periods) if periods else None,
    )


def _are_contradictory(samples: Mapping[str, Sequence[Sequence[StreamSample]]]) -> bool:
    return any(each.is_contradictory for found in _medians(samples).values() for each in found)


def _medians(samples: Mapping[str, Sequence[Sequence[StreamSample]]]) -> dict[str, tuple[StreamSample, ...]]:
    return {name: tuple(median_sample(rounds) for rounds in found) for name, found in samples.items()}


def _results(running: Sequence[Future[float]]) -> list[float]:
    """What all gave; or the error that broke the others' barrier, rather than that it was broken."""
    errors = [error for each in running if (error := each.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, BrokenBarrierError))
    return [each.result() for each in running]


def _single_runs(pipeline: Pipeline) -> tuple[float, float]:
    """Seconds that a micro-batch alone computes, and that such a run takes in all."""
    before = _computed(pipeline)
    start = time.perf_counter()
    for _ in range(SINGLE_RUNS):
        pipeline.run(_inputs(pipeline))
    seconds = time.perf_counter() - start
    return (_computed(pipeline) - before) / SINGLE_RUNS, seconds / SINGLE_RUNS


def _computed(pipeline: Pipeline) -> float:
    return sum(stage.compute_seconds for stage in pipeline.statistics())


def _period(pipeline: Pipeline, start: Barrier | None = None) -> float:
    """Seconds from one result to the next, once the pipeline is full and all others are that wait to start."""
    inputs = _inputs(pipeline)
    begin = time.perf_counter()
    try:
        pipeline.run(inputs)
    except BaseException:
        if start is not None:
            start.abort()  # or the others would wait for this one
        raise
    seconds = time.perf_counter() - begin
    stages = len(pipeline.program.stages)
    fill = FILL + stages - 1
    fewest = FEWEST_STREAMED if stages == 1 else FEWEST_OF_CHAIN * stages
    count = fill + max(fewest, int(STREAM_SECONDS / max(seconds, 1e-6)))
    if start is not None:
        start.wait()
    arrivals = [time.perf_counter() for _ in pipeline.stream([inputs] * count)]
    return (arrivals[-1] - arrivals[fill - 1]) / (count - fill)


def _inputs(pipeline: Pipeline) -> list[np.ndarray]:
    return [np.zeros(tensor.shape, tensor.dtype) for tensor in pipeline.program.inputs]
