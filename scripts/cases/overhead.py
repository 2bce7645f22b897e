"""Benchmark what a micro-batch costs outside of kernels: processor time and waits of the client and of each worker.

A long stream runs through a network that computes nearly nothing, or through a small convolutional network, whose
recorded computing times are subtracted. A wait is a voluntary context switch of a thread: a wake-up follows.
``--set micro-batches=2000``: of each stream.
"""

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tvm_split
from scripts.harness import Case, Setup, Side
from scripts.processes import Figures, Prepared
from scripts.sides import cluster_of, deployed, local_workers

SIZES, WORKERS, TRANSPORTS = {"4 KB": 1024, "600 KB": 150_528}, (1, 2, 3), ("shm", "grpc")
CONVOLUTIONS = "convolutions"
WARM_UP, BUSIEST = 200, 8


class Plus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1024] + 1.0


def network(kind: str, workers: int) -> tuple[nn.Module, torch.Tensor]:
    if kind == CONVOLUTIONS:
        convolutions = [nn.Conv2d(16 if number else 3, 16, 3, stride=2) for number in range(workers)]
        return nn.Sequential(*convolutions).eval(), torch.ones(1, 3, 224, 224)
    return nn.Sequential(*(Plus() for _ in range(workers))), torch.ones(1, SIZES[kind])


def used_seconds(pids: Mapping[str, int]) -> np.ndarray:
    """Return the processor time of each process, by its clock, whose number Linux makes of the process's."""
    return np.array([time.clock_gettime(~pid << 3 | 2) for pid in pids.values()])


def waits(pids: Mapping[str, int]) -> Counter[tuple[str, int]]:
    """Return the waits of each thread of each process since it began."""
    counts: Counter[tuple[str, int]] = Counter()
    for name, pid in pids.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
                _, _, rest = (thread / "status").read_text().partition("\nvoluntary_ctxt_switches:")
                counts[name, int(thread.name)] = int(rest.split()[0])
    return counts


@contextlib.contextmanager
def stream(kind: str, transport: str, workers: int, micro_batches: int) -> Iterator[Prepared]:
    module, x = network(kind, workers)
    names = [f"worker {number + 1}" for number in range(workers)]
    with contextlib.ExitStack() as until_end:
        processes = local_workers(names, until_end)
        pids = {"client": os.getpid(), **processes.process_ids}
        ends = {*pairwise(["client", *names, "client"]), *permutations(names, 2)}
        cluster = cluster_of(processes.endpoints, [tvm_split.Link(*pair, transport=transport) for pair in ends])
        model = tvm_split.load_model(module, (x,))
        plan = tvm_split.plan(model, cluster, split={name: [str(layer)] for layer, name in enumerate(names)})
        deployment = deployed(model, plan, cluster, until_end)

        def spent(count: int) -> tuple[np.ndarray, Counter[tuple[str, int]]]:
            """Return each process's milliseconds, and each thread's waits, for ``count`` micro-batches."""
            results = deployment.stream(itertools.repeat((x.numpy(),)))
            next(results)
            seconds, waited = used_seconds(pids), waits(pids)
            for _ in itertools.islice(results, count):
                pass
            return (used_seconds(pids) - seconds) * 1e3, waits(pids) - waited

        def measure() -> Figures:
            milliseconds, waited = spent(micro_batches)
            milliseconds /= micro_batches
            if kind == CONVOLUTIONS:
                # The median: a computation during which another program had the core took longer by the clock only.
                milliseconds[1:] -= [stage.median_compute_seconds * 1e3 for stage in deployment.stats().stages]
            figures = {f"{name}, ms": float(used) for name, used in zip(pids, milliseconds, strict=True)}
            for (name, _), count in waited.items():
                figures[f"{name}, waits"] = figures.get(f"{name}, waits", 0.0) + count / micro_batches
            return figures

        threads = {thread.native_id: thread.name for thread in threading.enumerate()}
        busiest = spent(WARM_UP)[1].most_common(BUSIEST)
        facts = {f"{name}, {threads.get(thread, thread)} waits": count / WARM_UP for (name, thread), count in busiest}
        yield Prepared(measure, facts)


def sides(kind: str, transport: str, workers: int, setup: Setup) -> Sequence[Side]:
    options = {"workers": workers, "micro_batches": int(setup.options.values.get("micro-batches", 2000))}
    return [setup.side("stream", stream, one, kind=kind, transport=transport, **options) for one in setup.checkouts]


CASE = Case(
    subjects={
        f"{kind}, {transport}, {workers} workers": partial(sides, kind, transport, workers)
        for kind, transport, workers in itertools.product([*SIZES, CONVOLUTIONS], TRANSPORTS, WORKERS)
        if kind in SIZES or workers == 2
    },
)
