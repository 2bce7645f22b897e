"""Measures how much streams slow compute down, with stages that compute for a short and for a longer time."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from rpc_runtime.client.session import Session
from tvm_split.profiling.link_samples import SMALLEST_BYTES, ChainSample, StreamSample, median_sample
from tvm_split.profiling.link_store import CERTAIN, ChainProbe, StreamProbe

PRODUCTS = (1, 5)
"""Matrix products per stage: about 1 and 5 ms on a present-day core."""
MOST_HANDED_ON_SECONDS = 0.1
"""Longest time of one large tensor through a chain, in seconds; a stream of slower ones would take too long."""
ROUNDS = 3
"""Rounds that alternate short and long compute: a disturbance affects both, and the median of the rounds counts."""
MOST_ROUNDS, MOST_SECONDS = 5 * ROUNDS, 1.0
"""Most rounds, and most seconds, while the medians still contradict each other."""
SINGLE_RUNS = 5
SINGLE_SECONDS, MOST_SINGLE_RUNS = 0.02, 30
"""Seconds and largest number of single runs; at least `SINGLE_RUNS` are made, because the first few run cold."""
STREAM_SECONDS, FEWEST_STREAMED, FEWEST_OF_CHAIN, FILL, UNDER_WAY_PER_LINK = 0.05, 6, 3, 4, 3


def probe_stream(opened: Callable[[int], Session]) -> StreamProbe:
    """Probe streams through one machine, with short and with longer compute.

    Args:
        opened: opens a pipeline through one stage that computes the given number of matrix products on this machine;
            the pipeline is closed here.
    """
    samples: list[list[StreamSample]] = [[] for _ in PRODUCTS]
    with contextlib.ExitStack() as stack:
        pipelines = [stack.enter_context(contextlib.closing(opened(products))) for products in PRODUCTS]
        begin = time.monotonic()
        for number in range(MOST_ROUNDS):
            if number >= ROUNDS and (time.monotonic() - begin > MOST_SECONDS or not _are_contradictory(samples)):
                break
            for pipeline, found in zip(pipelines, samples, strict=True):
                found.append(StreamSample(*_single_runs(pipeline), _period(pipeline)))
    return StreamProbe(time.time(), tuple(map(median_sample, samples)))


def probe_chain(
    machines: Sequence[str], cores: int, opened: Callable[[Sequence[str], int], Session], size_bytes: int
) -> ChainProbe:
    """Probe a chain of machines that keep all ``cores`` of a host busy, with streams and single micro-batches.

    Of several rounds, the `ROUNDS` with the shortest streams count, because disturbances make streams longer. The cost
    of a start is the extra compute time of stages on all machines over that of all stages on the first machine.

    Args:
        opened: opens a pipeline over machines, closed here. Its stages forward tensors of the given bytes, or compute
            if these are 0.
        size_bytes: size of larger tensors, which are only forwarded; 0 for none, if their bytes do not matter.
    """
    sizes = [SMALLEST_BYTES]
    rounds: list[list[ChainSample]] = []
    starts: list[float] = []
    with contextlib.ExitStack() as stack:

        def kept_open(names: Sequence[str], size: int) -> Session:
            return stack.enter_context(contextlib.closing(opened(names, size)))

        alone = [machines[0]] * len(machines)
        computing = [(kept_open(names, 0), kept_open(names, SMALLEST_BYTES)) for names in (machines, alone)]
        handing_on = [computing[0][1]]
        if size_bytes:
            large = kept_open(machines, size_bytes)
            if _seconds_of_run(large, _inputs(large)) < MOST_HANDED_ON_SECONDS:
                sizes.append(size_bytes)
                handing_on.append(large)
        for pipeline in handing_on:  # warm up: the first stream runs cold
            _period(pipeline)
        begin = time.monotonic()
        while len(rounds) < ROUNDS or (
            len(rounds) < MOST_ROUNDS
            and time.monotonic() - begin < MOST_SECONDS
            and _scatter(_quietest(rounds)) > CERTAIN
        ):
            rounds.append(
                [_chain_sample(size, cores, pipeline) for size, pipeline in zip(sizes, handing_on, strict=True)]
            )
            # Subtract the chain that only forwards, to keep the compute alone.
            apart, together = (_single_runs(busy)[0] - _single_runs(idle)[0] for busy, idle in computing)
            starts.append((apart - together) / len(machines))
    kept = _quietest(rounds)
    samples = tuple(map(_median_of_chain, zip(*kept, strict=True)))
    return ChainProbe(time.time(), samples, max(0.0, statistics.median(starts)), _scatter(kept))


def _quietest(rounds: Sequence[Sequence[ChainSample]]) -> list[Sequence[ChainSample]]:
    return sorted(rounds, key=lambda found: sum(each.period_seconds for each in found))[:ROUNDS]


def _scatter(rounds: Sequence[Sequence[ChainSample]]) -> float:
    """Return the largest spread (most minus least) of a sample's periods, relative to their median."""
    found = [0.0]
    for samples in zip(*rounds, strict=True):
        periods = [each.period_seconds for each in samples if each.period_seconds]
        if periods:
            found.append((max(periods) - min(periods)) / statistics.median(periods))
    return max(found)


def _median_of_chain(samples: Sequence[ChainSample]) -> ChainSample:
    return ChainSample(
        samples[0].size_bytes,
        statistics.median(each.single_seconds for each in samples),
        statistics.median(each.period_seconds for each in samples),
        statistics.median(each.busy_seconds for each in samples),
    )


def _are_contradictory(samples: Sequence[Sequence[StreamSample]]) -> bool:
    return any(median_sample(found).is_contradictory for found in samples)


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
