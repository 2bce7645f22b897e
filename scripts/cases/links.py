"""Benchmark one transfer between two workers for each transport.

Latency is the time from the end of the sender's stage to the start of the receiver's, by their traces, while the sender
computes the next tensor. Throughput is that of a stream whose stages only fill the tensor and read a little of it.
Processor time is that of both workers for one tensor. Idle deployments: the cores that they use.
``--set seconds=0.5``: of each stream.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import tvm_split
from scripts.harness import Case, Ratio, Setup, Side
from scripts.processes import Figures, Prepared
from scripts.sides import arrivals, cluster_of, deployed, rate

SIZES = {1_000: 8, 100_000: 8, 800_000: 8, 16_000_000: 64}
"""Bytes of a tensor to the sender's matrix products per tensor, which take longer than the transfer."""
TRANSPORTS = ("shm", "grpc")
ROWS, FEATURES = 64, 512
IDLE_SECONDS = 10.0


@contextmanager
def hop(transport: str, size_bytes: int) -> Iterator[Prepared]:
    """Start two workers with two deployments: one computes for each tensor, the other only forwards it."""

    class Sender(torch.nn.Module):
        def __init__(self, products: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(products))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.mean().reshape(1, 1).expand(1, size_bytes // 4) + 1.0

    class Receiver(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :16] + 1.0

    x = np.zeros((ROWS, FEATURES), np.float32)
    split = {"machine-a": ["0"], "machine-b": ["1"]}
    with contextlib.ExitStack() as until_end:
        workers = until_end.enter_context(tvm_split.Cluster.local(2))
        # A cluster of the same workers whose link has the transport.
        first, second = workers.machine_names
        cluster = cluster_of(workers.endpoints(), [tvm_split.Link(first, second, transport=transport)])

        def running(products: int) -> tvm_split.Deployment:
            module = torch.nn.Sequential(Sender(products), Receiver()).eval()
            model = tvm_split.load_model(module, (torch.from_numpy(x),))
            return deployed(model, tvm_split.plan(model, cluster, split=split), cluster, until_end)

        computing, quick = running(SIZES[size_bytes]), running(0)

        def measure(what: str, seconds: float) -> Figures:
            if what == "idle":
                return {"cores_used": processor_seconds(lambda: time.sleep(seconds)) / seconds}
            arrivals(computing, (x,), seconds)
            latency = latency_seconds(computing)
            times: list[float] = []
            used = processor_seconds(lambda: times.extend(arrivals(quick, (x,), seconds)))
            return {
                "latency_seconds": latency,
                "bytes_per_second": size_bytes * rate(times),
                "processor_seconds": used / len(times),
            }

        yield Prepared(measure)


def latency_seconds(deployment: Any) -> float:
    """Return the median time from the end of the first stage's computing to the start of the second's, by the trace."""
    first, second = (stage.name for stage in deployment.stages)
    begins, ends = {}, {}
    for event in deployment.trace():
        if event.kind == "compute" and event.stage == first:
            begins[event.sequence] = event.end_nanoseconds
        elif event.kind == "compute" and event.stage == second:
            ends[event.sequence] = event.start_nanoseconds
    return statistics.median(float(ends[begin] - begins[begin]) * 1e-9 for begin in begins.keys() & ends.keys())


def processor_seconds(run: Any) -> float:
    """Return the processor time that this process's children use while ``run`` runs."""
    before = _children_seconds()
    run()
    return _children_seconds() - before


def _children_seconds() -> float:
    """Return the processor time of all children's threads, from the scheduler's count in nanoseconds."""
    used = 0
    for child in psutil.Process().children(recursive=True):
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end at any time
                used += int((thread / "schedstat").read_text().split()[0])
    return used * 1e-9


def hops(size_bytes: int, setup: Setup) -> Sequence[Side]:
    seconds = float(setup.options.values.get("seconds", 0.5))
    return [
        replace(side, measure=partial(side.measure, what="hop", seconds=seconds)) for side in _sides(size_bytes, setup)
    ]


def idle(setup: Setup) -> Sequence[Side]:
    """Measure how many cores two idle deployments use."""
    all_sides = _sides(1_000, setup)
    for side in all_sides:
        side.measure(what="hop", seconds=0.2)
    return [replace(side, measure=partial(side.measure, what="idle", seconds=IDLE_SECONDS)) for side in all_sides]


def _sides(size_bytes: int, setup: Setup) -> list[Side]:
    return [
        setup.side(transport, hop, checkout, transport=transport, size_bytes=size_bytes)
        for transport in TRANSPORTS
        for checkout in setup.checkouts
    ]


CASE = Case(
    subjects={**{f"{size:,} bytes": partial(hops, size) for size in SIZES}, "idle": idle},
    ratios=tuple(Ratio(key, *TRANSPORTS) for key in ("latency_seconds", "bytes_per_second", "processor_seconds")),
)
