"""Benchmark one transfer between two workers for each transport, beside a plain copy and a socket.

Latency is the time from the end of the sender's stage to the start of the receiver's, by their traces, while the sender
computes the next tensor. Throughput is that of a stream whose stages only fill the tensor and read a little of it.
Processor time is that of both workers for one tensor.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from scripts.harness import Case, MakeSides, Options, Ratio, Setup, Side
from scripts.processes import Figures, Prepared
from scripts.streaming import arrivals, rate

SIZES = {1_000: 8, 100_000: 8, 800_000: 8, 16_000_000: 64}
"""Bytes of a tensor to the sender's matrix products per tensor, which take longer than the transfer."""
TRANSPORTS = ("shm", "grpc")
ROWS, FEATURES = 64, 512
IDLE_SECONDS = 10.0


@contextmanager
def hop(transport: str, size_bytes: int) -> Iterator[Prepared]:
    """Start two workers with two deployments: one computes for each tensor, the other only forwards it."""
    import torch

    import tvm_split

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
        endpoints = workers.endpoints()
        machines = tuple(tvm_split.Machine(name, 1, endpoint=endpoints[name]) for name in workers.machine_names)
        link = tvm_split.Link(*workers.machine_names, transport=transport)
        cluster = tvm_split.Cluster(machines, (link,))

        def deployed(products: int) -> tvm_split.Deployment:
            module = torch.nn.Sequential(Sender(products), Receiver()).eval()
            model = tvm_split.load_model(module, (torch.from_numpy(x),))
            bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split), verify=False)
            return until_end.enter_context(tvm_split.deploy(bundle, cluster))

        computing, quick = deployed(SIZES[size_bytes]), deployed(0)

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
    return statistics.median((ends[begin] - begins[begin]) * 1e-9 for begin in begins.keys() & ends.keys())


def processor_seconds(run: Any) -> float:
    """Return the processor time that this process's children use while ``run`` runs."""
    before = _children_seconds()
    run()
    return _children_seconds() - before


def _children_seconds() -> float:
    """Return the processor time of all children's threads, from the scheduler's count in nanoseconds."""
    import psutil

    used = 0
    for child in psutil.Process().children(recursive=True):
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end at any time
                used += int((thread / "schedstat").read_text().split()[0])
    return used * 1e-9


# The lower bound of a transfer's cost, without this project: two processes on the cores of two workers.

MEMCPY, UNIX = RAW = ("memcpy", "unix socket")
WARM_UP, FEWEST = 10, 40
"""The number of first messages that do not count, and the least number of messages."""
WORD = struct.Struct("<q")
"""The header of a message: its start in nanoseconds of the host's clock; 0 ends the stream."""
MATRIX = np.ones((256, 256), np.float32)
COMPUTING_SECONDS = 0.002
"""The computing time per message when latency is measured, so that the receiver waits for each message."""


def messages(seconds: float, computing_seconds: float) -> Iterator[None]:
    """Yield once per message for ``seconds``, and compute before each."""
    end, number = time.perf_counter() + seconds, 0
    while number < FEWEST or time.perf_counter() < end:
        begin = time.process_time()
        while time.process_time() - begin < computing_seconds:
            MATRIX @ MATRIX
        yield
        number += 1


def copied(payload: np.ndarray, seconds: float, computing_seconds: float) -> dict[str, float]:
    """Measure copying the payload in one process."""
    target, times = np.empty_like(payload), []
    for _ in messages(seconds, computing_seconds):
        start = time.process_time()
        target[:] = payload
        times.append(time.process_time() - start)
    median_seconds = statistics.median(times[WARM_UP:])
    return {"latency_seconds": median_seconds, "per_second": 1 / median_seconds, "processor_seconds": median_seconds}


def sent(payload: np.ndarray, seconds: float, computing_seconds: float, core: int) -> dict[str, float]:
    """Measure sending the payload through a unix socket to a process on another core; processor time is both's."""
    sender, receiver = socket.socketpair()
    results, answers = multiprocessing.Pipe(duplex=False)
    arguments = (sender, receiver, payload.nbytes, core, answers)
    process = multiprocessing.get_context("fork").Process(target=_receive, args=arguments, daemon=True)
    process.start()
    receiver.close()
    used, count = 0.0, 0
    with sender:
        for _ in messages(seconds, computing_seconds):
            begin = time.process_time()
            done = sender.sendmsg([WORD.pack(time.monotonic_ns()), payload.data])
            sender.sendall(payload.data[done - WORD.size :])
            used += time.process_time() - begin
            count += 1
        sender.sendall(WORD.pack(0))
        figures: dict[str, float] = results.recv()
    process.join()
    return {**figures, "processor_seconds": figures["processor_seconds"] + used / count}


def _receive(sender: socket.socket, connection: socket.socket, size: int, core: int, answers: Connection) -> None:
    sender.close()
    os.sched_setaffinity(0, {core})
    word, target, latencies, arrivals = bytearray(WORD.size), bytearray(size), [], []
    while connection.recv_into(word, 0, socket.MSG_WAITALL) and (start := WORD.unpack(word)[0]):
        connection.recv_into(target, 0, socket.MSG_WAITALL)
        arrivals.append(time.monotonic_ns())
        latencies.append(arrivals[-1] - start)
    counted = arrivals[WARM_UP:]
    figures = {
        "latency_seconds": statistics.median(latencies[WARM_UP:]) * 1e-9,
        "per_second": (len(counted) - 1) / (counted[-1] - counted[0]) * 1e9,
        "processor_seconds": time.process_time() / len(latencies),
    }
    answers.send(figures)


@contextmanager
def raw(kind: str, size_bytes: int, cores: Sequence[int]) -> Iterator[Prepared]:
    os.sched_setaffinity(0, {cores[0]})
    payload = np.arange(size_bytes, dtype=np.uint32).astype(np.uint8)

    def measure(what: str, seconds: float) -> Figures:
        beside, streamed = (
            copied(payload, seconds, computing) if kind == MEMCPY else sent(payload, seconds, computing, cores[1])
            for computing in (COMPUTING_SECONDS, 0.0)
        )
        return {
            "latency_seconds": beside["latency_seconds"],
            "bytes_per_second": streamed["per_second"] * size_bytes,
            "processor_seconds": beside["processor_seconds"],
        }

    yield Prepared(measure)


def hops(size_bytes: int, setup: Setup) -> Sequence[Side]:
    cores, seconds = sorted(os.sched_getaffinity(0))[:2], float(setup.options.values.get("seconds", 0.5))
    all_sides = [
        setup.side(transport, hop, checkout, transport=transport, size_bytes=size_bytes)
        for transport in TRANSPORTS
        for checkout in setup.checkouts
    ]
    all_sides += [
        setup.side(kind, raw, environment={"OPENBLAS_NUM_THREADS": "1"}, kind=kind, size_bytes=size_bytes, cores=cores)
        for kind in RAW
    ]
    return [
        Side(side.name, partial(side.measure, what="hop", seconds=seconds), checkout=side.checkout)
        for side in all_sides
    ]


def idle(setup: Setup) -> Sequence[Side]:
    """Measure how many cores two idle deployments use."""
    all_sides = []
    for transport in TRANSPORTS:
        for checkout in setup.checkouts:
            process = setup.begin(hop, checkout, transport=transport, size_bytes=1_000)
            process.ready()
            process.measure(what="hop", seconds=0.2)
            measure = partial(process.measure, what="idle", seconds=IDLE_SECONDS)
            all_sides.append(Side(transport, measure, checkout=checkout.label))
    return all_sides


def subjects(options: Options) -> Mapping[str, MakeSides]:
    return {**{f"{size:,} bytes": partial(hops, size) for size in SIZES}, "idle": idle}


CASE = Case(
    doc="One hop between two workers by each transport, beside copying and a unix socket; what idle deployments use. "
    "--set seconds=0.5: of each stream.",
    subjects=subjects,
    ratios=tuple(
        Ratio(key, transport, reference)
        for transport in TRANSPORTS
        for key, reference in (("latency_seconds", UNIX), ("bytes_per_second", MEMCPY), ("processor_seconds", UNIX))
    ),
)
