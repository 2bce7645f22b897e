"""A network on two workers of one core each: streamed through both as a pipeline, or computed as a whole by each.

A single input is timed by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

import tvm_split
from scripts.rounds import Figures, median_seconds

RUNS = 5
"""Of a single input, of which the median counts."""
FILL = 6
"""Results of a stream that do not count."""


class Streamed:
    """Deployments of a model on the machines of ``cluster``, that live until ``until_end``; streams take ``seconds``.

    The pipeline is split as the planner splits for throughput over two machines, measured anew.
    """

    def __init__(
        self, model: tvm_split.Model, cluster: tvm_split.Cluster, seconds: float, until_end: contextlib.ExitStack
    ) -> None:
        self._inputs = model.example_inputs
        self._seconds = seconds
        first = model.graph.layers[0]
        plans = [tvm_split.plan(model, cluster, stages=2, refresh=True)]
        plans += [tvm_split.plan(model, cluster, split={machine: [first]}) for machine in cluster.machine_names]
        self.pipeline, *self.wholes = (
            until_end.enter_context(tvm_split.deploy(tvm_split.compile(model, planned, verify=False), cluster))
            for planned in plans
        )

    def through_pipeline(self) -> Figures:
        return self._stream(self.pipeline)

    def through_one(self) -> Figures:
        return self._stream(self.wholes[0])

    def through_each(self) -> Figures:
        """Every worker computes the whole network, on inputs of its own, at the same time."""
        with ThreadPoolExecutor(len(self.wholes)) as threads:
            return {"per_second": sum(each["per_second"] for each in threads.map(self._stream, self.wholes))}

    def _stream(self, deployment: tvm_split.Deployment) -> Figures:
        """Throughput, and the slowest stage's mean time of computing for a micro-batch of the same stream."""
        before = {stage.name: stage for stage in deployment.stats().stages}
        arrivals = [time.perf_counter() for _ in deployment.stream(self._fed())]
        slowest = max(
            (stage.compute_seconds - before[stage.name].compute_seconds) / len(arrivals)
            for stage in deployment.stats().stages
        )
        per_second = (len(arrivals) - FILL) / (arrivals[-1] - arrivals[FILL - 1])
        return {"per_second": per_second, "slowest_compute_seconds": slowest, "share_of_limit": per_second * slowest}

    def _fed(self) -> Iterator[tuple[object, ...]]:
        end, number = time.perf_counter() + self._seconds, 0
        while number < 3 * FILL or time.perf_counter() < end:
            yield self._inputs
            number += 1


def median_run(deployment: tvm_split.Deployment, inputs: Sequence[np.ndarray], runs: int = RUNS) -> Figures:
    """The seconds of a ``run``, after one that does not count."""
    return median_seconds(partial(deployment.run, *inputs), runs)
