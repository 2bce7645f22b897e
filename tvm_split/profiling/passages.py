"""Times a program of pass-through stages: single runs, and a stream."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rpc_runtime.client.session import Session

FEWEST, MOST = 3, 60
HOPELESS_SECONDS = 0.5
"""A run that takes longer, in seconds, is not repeated."""


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
