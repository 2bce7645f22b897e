"""Times pipelines of probe programs: single runs and streams, through one machine and through a chain of machines."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rpc_runtime.client.session import Session
from tvm_split.profiling.link_model import (
    SMALLEST_BYTES,
    ChainProbe,
    ChainSample,
    StreamProbe,
    StreamSample,
    median_sample,
)

FEWEST, MOST = 3, 60
HOPELESS_SECONDS = 0.5
"""A run that takes longer, in seconds, is not repeated."""
PRODUCTS = (1, 5)
"""Matrix products per stage: about 1 and 5 ms on a present-day core."""
MOST_HANDED_ON_SECONDS = 0.1
"""Longest time of one large tensor through a chain, in seconds; a stream of slower ones would take too long."""
ROUNDS = 3
"""Rounds that alternate short and long compute: a disturbance affects both, and the median of the rounds counts."""
SINGLE_RUNS = 5
SINGLE_SECONDS, MOST_SINGLE_RUNS = 0.02, 30
"""Seconds and largest number of single runs; at least `SINGLE_RUNS` are made, because the first few run cold."""
STREAM_SECONDS, FEWEST_STREAMED, FEWEST_OF_CHAIN, FILL, UNDER_WAY_PER_LINK = 0.05, 6, 3, 4, 3


@dataclass(frozen=True)
class Passage:
    """Times of a pass-through program: median and best run without compute, and means per micro-batch, in seconds."""

    single_seconds: float
    best_seconds: float
    stream_seconds: float | None
    processor_seconds: Mapping[str, float]
    transports: Mapping[tuple[str, str], str]


def measured_passage(pipeline: Session, inputs: Sequence[np.ndarray], series_seconds: float) -> Passage:
    """Measure single runs for about ``series_seconds`` and a stream for as long, after one warm-up run."""
    machines = pipeline.program.machines
    pipeline.run(inputs)
    start = time.perf_counter()
    pipeline.run(inputs)
    first = time.perf_counter() - start
    before = pipeline.processor_seconds()
    singles = [first]
    count = _times(series_seconds, first)
    for _ in range(count):
        start = time.perf_counter()
        pipeline.run(inputs)
        singles.append(time.perf_counter() - start)
    arrivals: list[float] = []
    if first < HOPELESS_SECONDS:
        for _ in pipeline.stream([inputs] * (1 + _times(series_seconds, first / 2))):
            arrivals.append(time.perf_counter())
    after = pipeline.processor_seconds()
    computing = dict.fromkeys(machines, 0.0)
    for stage in pipeline.statistics():
        computing[stage.machine] += stage.median_compute_seconds
    passed = count + len(arrivals)
    return Passage(
        max(statistics.median(singles) - sum(computing.values()), 0.0),
        max(min(singles) - sum(computing.values()), 0.0),
        (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None,
        {who: max((after[who] - before[who]) / passed - computing[who], 0.0) for who in computing},
        {(link.source, link.destination): link.transport for link in pipeline.links()},
    )


def _times(series_seconds: float, seconds: float) -> int:
    return 1 if seconds > HOPELESS_SECONDS else min(max(int(series_seconds / max(seconds, 1e-6)), FEWEST), MOST)


def probe_stream(opened: Callable[[int], Session]) -> StreamProbe:
    """Probe streams through one machine, with short and with longer compute.

    Args:
        opened: opens a pipeline through one stage that computes the given number of matrix products on this machine;
            the pipeline is closed here.
    """
    samples: list[list[StreamSample]] = [[] for _ in PRODUCTS]
    with contextlib.ExitStack() as stack:
        pipelines = [stack.enter_context(contextlib.closing(opened(products))) for products in PRODUCTS]
        for _ in range(ROUNDS):
            for pipeline, pipeline_samples in zip(pipelines, samples, strict=True):
                pipeline_samples.append(StreamSample(*_single_runs(pipeline), _period(pipeline)))
    return StreamProbe(time.time(), tuple(map(median_sample, samples)))


def probe_chain(cores: int, opened: Callable[[int], Session], size_bytes: int) -> ChainProbe:
    """Probe a chain of machines that keep all ``cores`` of a host busy, with streams and single micro-batches.

    Args:
        opened: opens a pipeline over the machines, closed here. Its stages forward tensors of the given bytes.
        size_bytes: size of larger tensors; 0 for none, if their bytes do not matter.
    """
    rounds: list[list[ChainSample]] = []
    with contextlib.ExitStack() as stack:

        def kept_open(size: int) -> Session:
            return stack.enter_context(contextlib.closing(opened(size)))

        pipelines = {SMALLEST_BYTES: kept_open(SMALLEST_BYTES)}
        if size_bytes:
            large = kept_open(size_bytes)
            if _seconds_of_run(large, _inputs(large)) < MOST_HANDED_ON_SECONDS:
                pipelines[size_bytes] = large
        for pipeline in pipelines.values():  # warm up: the first stream runs cold
            _period(pipeline)
        for _ in range(ROUNDS):
            rounds.append([_chain_sample(size, cores, pipeline) for size, pipeline in pipelines.items()])
    return ChainProbe(time.time(), tuple(map(_median_of_chain, zip(*rounds, strict=True))))


def _median_of_chain(samples: Sequence[ChainSample]) -> ChainSample:
    return ChainSample(
        samples[0].size_bytes,
        statistics.median(sample.single_seconds for sample in samples),
        statistics.median(sample.period_seconds for sample in samples),
        statistics.median(sample.busy_seconds for sample in samples),
    )


def _single_runs(pipeline: Session) -> tuple[float, float]:
    """Return the mean compute seconds of single micro-batches, and the median seconds of a whole run."""
    inputs = _inputs(pipeline)
    for _ in range(2):  # warm up after the pause since the last round
        pipeline.run(inputs)
    before = _computed(pipeline)
    begin = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < SINGLE_RUNS or (
        len(seconds) < MOST_SINGLE_RUNS and time.perf_counter() - begin < SINGLE_SECONDS
    ):
        seconds.append(_seconds_of_run(pipeline, inputs))
    return (_computed(pipeline) - before) / len(seconds), statistics.median(seconds)


def _chain_sample(size_bytes: int, cores: int, pipeline: Session) -> ChainSample:
    """Measure a stream, and the median of some single runs after it, as in `bench`."""
    inputs = _inputs(pipeline)
    used, passed = _used(pipeline)
    period = _period(pipeline)
    seconds = [_seconds_of_run(pipeline, inputs) for _ in range(SINGLE_RUNS)]
    used_now, passed_now = _used(pipeline)
    # The used time includes single runs and statistics queries. A stream cannot use more than all cores for its time.
    busy = min((used_now - used) / (passed_now - passed), cores * period)
    return ChainSample(size_bytes, statistics.median(seconds), period, busy)


def _used(pipeline: Session) -> tuple[float, int]:
    """Return processor seconds of the workers and this process so far, and the number of micro-batches."""
    seconds = sum(pipeline.processor_seconds().values()) + time.process_time()
    return seconds, pipeline.statistics()[0].micro_batches


def _seconds_of_run(pipeline: Session, inputs: Sequence[np.ndarray]) -> float:
    begin = time.perf_counter()
    pipeline.run(inputs)
    return time.perf_counter() - begin


def _computed(pipeline: Session) -> float:
    return sum(stage.compute_seconds for stage in pipeline.statistics())


def _period(pipeline: Session) -> float:
    """Return the seconds from one result to the next, while the pipeline is full."""
    inputs = _inputs(pipeline)
    seconds = _seconds_of_run(pipeline, inputs)
    stages = len(pipeline.program.stages)
    # Do not count fill and drain: then idle stages leave their cores to the others.
    fill = UNDER_WAY_PER_LINK * (stages + 1) if stages > 1 else FILL
    fewest = FEWEST_STREAMED if stages == 1 else FEWEST_OF_CHAIN * stages
    counted = max(fewest, int(STREAM_SECONDS * stages / max(seconds, 1e-6)))
    arrivals = [time.perf_counter() for _ in pipeline.stream([inputs] * (fill + counted + fill))]
    return (arrivals[fill + counted - 1] - arrivals[fill - 1]) / counted


def _inputs(pipeline: Session) -> list[np.ndarray]:
    return [np.zeros(tensor.shape, tensor.dtype) for tensor in pipeline.program.inputs]
