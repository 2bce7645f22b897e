"""Benchmark what a micro-batch costs outside of kernels: processor time and waits of the client and of each worker.

A long stream runs through a network that computes nearly nothing, or through a small convolutional network, whose
recorded computing times are subtracted. A voluntary context switch is a thread that waits: a wake-up follows.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
SENT = 1024
"""The numbers that a stage of the cheap network sends: 4 KB."""
CONVOLUTIONS = "convolutions"
KEYS = ("ms", "waits")
WARM_UP = 200
BUSIEST = 4
"""Threads of a process whose waits are reported one by one."""


class Plus(nn.Module):
    """Adds to the first numbers of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :SENT] + 1.0


def network(kind: str, workers: int) -> tuple[nn.Module, torch.Tensor]:
    if kind == CONVOLUTIONS:
        convolutions = [nn.Conv2d(3 if one == 0 else 16, 16, 3, stride=2) for one in range(workers)]
        return nn.Sequential(*convolutions).eval(), torch.ones(1, 3, 224, 224)
    return nn.Sequential(*(Plus() for _ in range(workers))), torch.ones(1, SIZES[kind])


def used_seconds(pids: Mapping[str, int]) -> np.ndarray:
    """Return the processor time of each process, by its clock, whose number Linux makes of the process's."""
    return np.array([time.clock_gettime(~pid << 3 | 2) for pid in pids.values()])


def waits(pids: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Return the voluntary context switches of each thread of each process."""
    return {name: dict(_waits(pid)) for name, pid in pids.items()}


def _waits(pid: int) -> Iterator[tuple[int, int]]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            yield (
                int(thread.name),
                int((thread / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]),
            )


def new_waits(pids: Mapping[str, int], before: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
    return {
        name: {thread: count - before[name].get(thread, 0) for thread, count in counts.items()}
        for name, counts in waits(pids).items()
    }


@contextlib.contextmanager
def stream(kind: str, transport: str, workers: int, micro_batches: int) -> Iterator[Prepared]:
    module, x = network(kind, workers)
    names = [f"worker {number + 1}" for number in range(workers)]
    with ExitStack() as until_end:
        processes = local_workers(names, until_end)
        pids = {"client": os.getpid(), **processes.process_ids}
        ends = {*pairwise(["client", *names, "client"]), *permutations(names, 2)}
        links = [tvm_split.Link(*pair, transport=transport) for pair in ends]
        cluster = cluster_of(processes.endpoints, links)
        model = tvm_split.load_model(module, (x,))
        split = {name: [str(layer)] for layer, name in enumerate(names)}
        plan = tvm_split.plan(model, cluster, split=split)
        deployment = deployed(model, plan, cluster, until_end)
        inputs = x.numpy()

        def run(count: int) -> None:
            for _ in deployment.stream(itertools.repeat((inputs,), count)):
                pass

        def measure() -> Figures:
            used, waited = used_seconds(pids), waits(pids)
            run(micro_batches)
            milliseconds = (used_seconds(pids) - used) / micro_batches * 1e3
            counts = [sum(own.values()) / micro_batches for own in new_waits(pids, waited).values()]
            if kind == CONVOLUTIONS:
                # The median: a computation during which another program had the core took longer by the clock only.
                milliseconds[1:] -= [stage.median_compute_seconds * 1e3 for stage in deployment.stats().stages]
            figures = zip(pids, milliseconds.tolist(), counts, strict=True)
            return {f"{name}, {key}": value for name, *both in figures for key, value in zip(KEYS, both, strict=True)}

        run(WARM_UP)
        waited = waits(pids)
        run(WARM_UP)
        busiest = {name: busiest_threads(counts) for name, counts in new_waits(pids, waited).items()}
        yield Prepared(measure, {"waits by thread": busiest})


def busiest_threads(counts: Mapping[int, int]) -> dict[str, float]:
    """Return the waits per micro-batch of the threads that wait most, by name if they are this process's."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    most = sorted(counts, key=lambda thread: -counts[thread])[:BUSIEST]
    return {names.get(thread, f"thread {thread}"): counts[thread] / WARM_UP for thread in most}


def sides(kind: str, transport: str, workers: int, setup: Setup) -> Sequence[Side]:
    count = int(setup.options.values.get("micro-batches", 2000))
    arguments = {"kind": kind, "transport": transport, "workers": workers, "micro_batches": count}
    return [setup.side("stream", stream, checkout, **arguments) for checkout in setup.checkouts]


CASE = Case(
    doc="Processor time and waits per micro-batch of a stream outside of kernels, of the client and of each worker. "
    "--set micro-batches=2000: of each stream.",
    subjects={
        f"{kind}, {transport}, {workers} workers": partial(sides, kind, transport, workers)
        for kind, transport, workers in itertools.product([*SIZES, CONVOLUTIONS], TRANSPORTS, WORKERS)
        if kind in SIZES or workers == 2
    },
)
