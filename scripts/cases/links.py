"""One hop, one way, between two workers, by each transport; beside what copying, memory and sockets need for it.

Latency is from the end of the sender's stage to the begin of the receiver's, by the trace of both, while the sender
computes the next tensor. Throughput is that of a stream whose stages only fill the tensor and read a little of it.
Processor time is that of both workers for one tensor.
"""

from __future__ import annotations

import contextlib
import mmap
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

SIZES = {1_000: 2, 100_000: 2, 800_000: 2, 16_000_000: 20}
"""Bytes of a tensor, and matrix products that the sender computes for each: longer than the transfer takes."""
TRANSPORTS = ("shm", "grpc")
FEATURES = 1024
FILL = 6
"""First results of a stream that do not count."""
IDLE_SECONDS = 10.0


@contextmanager
def hop(transport: str, size_bytes: int) -> Iterator[Prepared]:
    """Two workers, and two deployments: one that computes for each tensor, and one that only hands it on."""
    import torch

    import tvm_split

    class Sender(torch.nn.Module):
        def __init__(self, products: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(products))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.mean(1, keepdim=True).expand(1, size_bytes // 4) + 1.0

    class Receiver(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :16] + 1.0

    x = np.zeros((1, FEATURES), np.float32)
    split = {"machine-a": ["0"], "machine-b": ["1"]}
    with contextlib.ExitStack() as until_end:
        workers = until_end.enter_context(tvm_split.Cluster.local(2))
        # The same workers, as a cluster whose links have a transport.
        endpoints = workers.endpoints()
        machines = tuple(tvm_split.Machine(name, 1, endpoint=endpoints[name]) for name in workers.machine_names)
        link = tvm_split.Link(*workers.machine_names, transport=transport)
        cluster = tvm_split.Cluster("remote", machines, (link,))

        def deployed(products: int) -> tvm_split.Deployment:
            module = torch.nn.Sequential(Sender(products), Receiver()).eval()
            model = tvm_split.load_model(module, (torch.from_numpy(x),))
            bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split), verify=False)
            return until_end.enter_context(tvm_split.deploy(bundle, cluster))

        computing, quick = deployed(SIZES[size_bytes]), deployed(0)

        def measure(what: str, seconds: float) -> Figures:
            if what == "idle":
                return {"cores_used": processor_seconds(lambda: time.sleep(seconds)) / seconds}
            stream(computing, x, seconds)
            latency = latency_seconds(computing)
            arrivals: list[float] = []
            used = processor_seconds(lambda: arrivals.extend(stream(quick, x, seconds)))
            per_second = (len(arrivals) - FILL) / (arrivals[-1] - arrivals[FILL - 1])
            return {
                "latency_seconds": latency,
                "bytes_per_second": size_bytes * per_second,
                "processor_seconds": used / len(arrivals),
            }

        yield Prepared(measure)


def stream(deployment: Any, x: np.ndarray, seconds: float) -> list[float]:
    """When the results of a stream came that was fed for so long."""
    end = time.perf_counter() + seconds

    def fed() -> Iterator[tuple[np.ndarray]]:
        count = 0
        while count < 3 * FILL or time.perf_counter() < end:
            yield (x,)
            count += 1

    return [time.perf_counter() for _ in deployment.stream(fed())]


def latency_seconds(deployment: Any) -> float:
    """From the end of the first stage's computing to the begin of the second's: the median of the latest ones."""
    first, second = (stage.name for stage in deployment.stages)
    begins, ends = {}, {}
    for event in deployment.trace():
        if event.kind == "compute" and event.stage == first:
            begins[event.sequence] = event.end_nanoseconds
        elif event.kind == "compute" and event.stage == second:
            ends[event.sequence] = event.start_nanoseconds
    return statistics.median((ends[each] - begins[each]) * 1e-9 for each in begins.keys() & ends.keys())


def processor_seconds(run: Any) -> float:
    """What this process's children use of the processor while ``run`` runs."""
    before = _children_seconds()
    run()
    return _children_seconds() - before


def _children_seconds() -> float:
    """By the scheduler's own count in nanoseconds, of all threads."""
    import psutil

    used = 0
    for child in psutil.Process().children(recursive=True):
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end at any time
                used += int((thread / "schedstat").read_text().split()[0])
    return used * 1e-9


# What a hop could cost at best, without the project: two processes on the cores of two workers.

MEMCPY, MEMORY, UNIX, TCP = RAW = ("memcpy", "memory, unix socket", "unix socket", "tcp socket")
SLOTS = 3
WARM_UP, FEWEST = 10, 40
"""Messages whose processor time does not count, and how many there are at least."""
WORD = struct.Struct("<q")
"""When a message left, in nanoseconds of the host's clock; 0 is the end."""
MATRIX = np.ones((256, 256), np.float32)
COMPUTING_SECONDS = 0.002
"""For each message of the latency's stream, so that the receiver waits for it."""


class RawSender:
    """``payload``, for so many seconds again and again; computes before each message."""

    def __init__(self, size_bytes: int, seconds: float, computing_seconds: float) -> None:
        self.payload = np.arange(size_bytes, dtype=np.uint32).astype(np.uint8)
        self.count = 0
        self._computed_seconds = 0.0
        self._end, self._computing_seconds = time.perf_counter() + seconds, computing_seconds
        self._begun = time.process_time()

    def has_next(self) -> bool:
        """Compute for the next message; false at the end."""
        if self.count >= FEWEST and time.perf_counter() > self._end:
            return False
        if self.count == WARM_UP:
            self._begun, self._computed_seconds = time.process_time(), 0.0
        start = time.process_time()
        while time.process_time() - start < self._computing_seconds:
            MATRIX @ MATRIX
        self._computed_seconds += time.process_time() - start
        self.count += 1
        return True

    @property
    def processor_seconds(self) -> float:
        """For one message, without the computing."""
        return (time.process_time() - self._begun - self._computed_seconds) / (self.count - WARM_UP)


def copy(sender: RawSender, slots: Sequence[np.ndarray]) -> dict[str, float]:
    latencies, first = [], time.monotonic_ns()
    while sender.has_next():
        start = time.monotonic_ns()
        slots[sender.count % SLOTS][:] = sender.payload
        latencies.append(time.monotonic_ns() - start)
    return {**_figures(latencies, time.monotonic_ns() - first), "processor_seconds": sender.processor_seconds}


def send(sender: RawSender, connection: socket.socket, slots: Sequence[np.ndarray], is_shared: bool) -> None:
    """To memory that the receiver sees, if that is shared, else through the socket."""
    while sender.has_next():
        word = WORD.pack(time.monotonic_ns())
        if is_shared:
            if sender.count > SLOTS:
                connection.recv(1)
            slots[sender.count % SLOTS][:] = sender.payload
            connection.sendall(word)
        else:
            sent = connection.sendmsg([word, sender.payload.data])
            connection.sendall(sender.payload.data[sent - WORD.size :])
    connection.sendall(WORD.pack(0))


def receive(connection: socket.socket, slots: Sequence[np.ndarray], is_shared: bool, results: Connection) -> None:
    """Sends its figures when the sender ends."""
    begun, first, latencies = 0.0, 0, []
    word = bytearray(WORD.size)
    while connection.recv_into(word, 0, socket.MSG_WAITALL) and (start := WORD.unpack(word)[0]):
        if not is_shared:
            connection.recv_into(slots[len(latencies) % SLOTS], 0, socket.MSG_WAITALL)
        latencies.append(time.monotonic_ns() - start)
        first = first or start
        if len(latencies) == WARM_UP:
            begun = time.process_time()
        if is_shared:
            with contextlib.suppress(BrokenPipeError):  # the sender has ended
                connection.send(b"c")
    used = (time.process_time() - begun) / (len(latencies) - WARM_UP)
    results.send({**_figures(latencies, time.monotonic_ns() - first), "processor_seconds": used})


def _figures(latencies: Sequence[int], nanoseconds: int) -> dict[str, float]:
    return {
        "latency_seconds": statistics.median(latencies) * 1e-9,
        "per_second": len(latencies) / nanoseconds * 1e9,
    }


def connected(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind != TCP:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        answering, _ = listener.accept()
    for end in (calling, answering):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return calling, answering


def raw_stream(kind: str, sender: RawSender, core: int) -> dict[str, float]:
    """The figures of one way; ``processor_seconds`` are those of both sides."""
    size = sender.payload.nbytes
    block = np.frombuffer(mmap.mmap(-1, max(SLOTS * size, mmap.PAGESIZE)), np.uint8)
    slots = [block[slot * size :][:size] for slot in range(SLOTS)]
    if kind == MEMCPY:
        return copy(sender, slots)
    is_shared, (here, there) = kind == MEMORY, connected(kind)
    results, sent = multiprocessing.Pipe(duplex=False)

    def as_receiver() -> None:
        here.close()
        os.sched_setaffinity(0, {core})
        with there:
            receive(there, slots, is_shared, sent)

    process = multiprocessing.get_context("fork").Process(target=as_receiver, daemon=True)
    process.start()
    there.close()
    with here:
        send(sender, here, slots, is_shared)
        figures: dict[str, float] = results.recv()
    process.join()
    return {**figures, "processor_seconds": figures["processor_seconds"] + sender.processor_seconds}


@contextmanager
def raw(kind: str, size_bytes: int, cores: Sequence[int]) -> Iterator[Prepared]:
    os.sched_setaffinity(0, {cores[0]})

    def measure(what: str, seconds: float) -> Figures:
        beside = raw_stream(kind, RawSender(size_bytes, seconds, COMPUTING_SECONDS), cores[1])
        streamed = raw_stream(kind, RawSender(size_bytes, seconds, 0.0), cores[1])
        return {
            "latency_seconds": beside["latency_seconds"],
            "bytes_per_second": streamed["per_second"] * size_bytes,
            "processor_seconds": beside["processor_seconds"],
        }

    yield Prepared(measure)


def hops(size_bytes: int, setup: Setup) -> Sequence[Side]:
    cores, seconds = sorted(os.sched_getaffinity(0))[:2], float(setup.options.values.get("seconds", 0.5))
    made = [
        setup.side(transport, hop, checkout, transport=transport, size_bytes=size_bytes)
        for transport in TRANSPORTS
        for checkout in setup.checkouts
    ]
    made += [
        setup.side(kind, raw, environment={"OPENBLAS_NUM_THREADS": "1"}, kind=kind, size_bytes=size_bytes, cores=cores)
        for kind in RAW
    ]
    return [
        Side(side.name, partial(side.measure, what="hop", seconds=seconds), checkout=side.checkout) for side in made
    ]


def idle(setup: Setup) -> Sequence[Side]:
    """The cores that two deployments use while nothing is asked of them."""
    made = []
    for transport in TRANSPORTS:
        for checkout in setup.checkouts:
            process = setup.begin(hop, checkout, transport=transport, size_bytes=1_000)
            process.ready()
            process.measure(what="hop", seconds=0.2)
            measure = partial(process.measure, what="idle", seconds=IDLE_SECONDS)
            made.append(Side(transport, measure, checkout=checkout.label))
    return made


def subjects(options: Options) -> Mapping[str, MakeSides]:
    return {**{f"{size:,} bytes": partial(hops, size) for size in SIZES}, "idle": idle}


CASE = Case(
    doc="One hop between two workers by each transport, beside copying and sockets; and what an idle deployment uses. "
    "--set seconds=0.5: of each stream.",
    subjects=subjects,
    ratios=tuple(
        Ratio(key, transport, over)
        for transport in TRANSPORTS
        for key, over in (("latency_seconds", UNIX), ("bytes_per_second", MEMCPY), ("processor_seconds", UNIX))
    ),
)
