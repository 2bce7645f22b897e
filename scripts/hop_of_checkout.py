"""One hop between two workers, measured for the checkout whose interpreter runs this file: a partner of `bench_links`.

It imports nothing of the checkout it lies in, so that an older state can be measured beside this one. The hop's sender
holds a tensor and hands it on again and again: no time goes into making it, nor at the other end into reading it.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.session import Session
from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec, WeightSpec
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.build import build_module
from tvm_split.profiling.probe_programs import BUSY_INPUT, ProbePrograms

try:
    from rpc_runtime.program.link_setting import LinkSetting, Transport
except ImportError:  # a state that has gRPC only
    Transport = None

SENDER, RECEIVER = "machine-a", "machine-b"
ENDS = (CLIENT, SENDER, RECEIVER)
FILL = 6
"""Micro-batches of a stream that do not count."""
FEW_PRODUCTS, PARTS = 2, 3
"""Processor time is that of a hop beside a little computing, in so many parts, less what no hop takes in turn."""
TAKEN_BYTES = 64
ROW = np.zeros(BUSY_INPUT, np.float32)


class Hop:
    """Programs whose tensor of some bytes goes from one machine to another, or stays."""

    def __init__(self) -> None:
        self._probes = ProbePrograms(dict.fromkeys(ENDS[1:], platform.machine()))
        self._blobs = BlobFolder.temporary()
        self._tensors: dict[int, tuple[BlobSpec, BlobSpec, WeightSpec]] = {}

    def blob_path(self, sha256: str) -> Path:
        own = self._blobs.path(sha256)
        return own if own.exists() else Path(self._probes.blob_path(sha256))

    def program(self, size_bytes: int, products: int, receiver: str) -> Program:
        """Compute so many products, hand on the tensor, and take it on machine ``receiver``."""
        row, result = (TensorSpec(name, BUSY_INPUT, "float32") for name in ("row", "result"))
        tensor, taken = TensorSpec("tensor", (size_bytes,), "uint8"), TensorSpec("taken", (TAKEN_BYTES,), "uint8")
        if size_bytes not in self._tensors:
            self._tensors[size_bytes] = self._compile(size_bytes)
        hold, take, weight = self._tensors[size_bytes]
        stages: list[StageSpec] = []
        if products:
            busy = self._probes.busy(SENDER, products).stages[0].library
            stages.append(StageSpec(0, "compute", SENDER, (), "cpu", busy, (), (row,), (result,)))
        told = result if products else row
        stages.append(StageSpec(len(stages), "hold", SENDER, (), "cpu", hold, (weight,), (told,), (tensor,)))
        stages.append(StageSpec(len(stages), "take", receiver, (), "cpu", take, (), (tensor,), (taken,)))
        return Program((row,), (taken,), tuple(stages))

    def _compile(self, size_bytes: int) -> tuple[BlobSpec, BlobSpec, WeightSpec]:
        hold, take = relax.BlockBuilder(), relax.BlockBuilder()
        row = relax.Var("row", relax.TensorType(BUSY_INPUT, "float32"))
        tensor = relax.Var("tensor", relax.TensorType((size_bytes,), "uint8"))
        with hold.function("main", [row, tensor]):
            with hold.dataflow():
                result = hold.emit_output(relax.Tuple([tensor]))
            hold.emit_func_output(result)
        with take.function("main", [tensor]):
            with take.dataflow():
                first = take.emit(relax.op.strided_slice(tensor, [0], [0], [TAKEN_BYTES]))
                result = take.emit_output(relax.Tuple([first]))
            take.emit_func_output(result)
        content = np.arange(size_bytes, dtype=np.uint32).astype(np.uint8)
        return self._built(hold), self._built(take), self._blobs.add_weight("held", tvm.runtime.tensor(content))

    def _built(self, builder: relax.BlockBuilder) -> BlobSpec:
        with ScratchFolder("hop") as folder:
            target = {"kind": "llvm", "num-cores": 1}
            return self._blobs.add_file(build_module(builder.get(), target, folder.path / "hop.so", "a hop").library)


class Measurement:
    """Answers `bench_links`, with the workers of one checkout."""

    def __init__(self, workers: LocalWorkers) -> None:
        self._workers = workers
        self._hop = Hop()

    def answer(self, what: str, **request: Any) -> Any:
        if what == "about":
            known = ["grpc"] if Transport is None else [str(each) for each in Transport if each in ("grpc", "shm")]
            return {"checkout": Path(tvm_split.__file__).resolve().parent.parent.name, "transports": known}
        return self._hop_figures(**request) if what == "hop" else self._idle_figures(**request)

    def _opened(self, transport: str, size_bytes: int, products: int, receiver: str) -> Session:
        options: dict[str, Any] = {}
        if Transport is not None:
            setting = LinkSetting(transport=Transport(transport))
            options["links"] = {(a, b): setting for a in ENDS for b in ENDS if a != b}
        program = self._hop.program(size_bytes, products, receiver)
        return Session.open(program, self._workers.endpoints, self._hop.blob_path, **options)

    def _hop_figures(self, transport: str, size_bytes: int, products: int, seconds: float) -> dict[str, float]:
        with self._opened(transport, size_bytes, products, RECEIVER) as pipeline:
            _arrivals(pipeline, seconds)
            latency = _latency_seconds(pipeline)
            computing = max(each.median_compute_seconds for each in pipeline.statistics())
        with (
            self._opened(transport, size_bytes, FEW_PRODUCTS, RECEIVER) as crossing,
            self._opened(transport, size_bytes, FEW_PRODUCTS, SENDER) as staying,
        ):
            parts = [
                _processor_seconds(crossing, seconds / PARTS) - _processor_seconds(staying, seconds / PARTS)
                for _ in range(PARTS)
            ]
        with self._opened(transport, size_bytes, 0, RECEIVER) as pipeline:
            arrivals = _arrivals(pipeline, seconds)
        return {
            "latency_seconds": latency,
            "bytes_per_second": size_bytes * (len(arrivals) - 1) / (arrivals[-1] - arrivals[0]),
            "processor_seconds": statistics.median(parts),
            "computing_seconds": computing,
        }

    def _idle_figures(self, transport: str, seconds: float) -> dict[str, float]:
        """The share of a core that is used while nothing is asked of a deployment that was used before."""
        with self._opened(transport, 1000, 0, RECEIVER) as pipeline:
            _arrivals(pipeline, 0.2)
            time.sleep(1.0)
            before, own, start = pipeline.processor_seconds(), time.process_time(), time.perf_counter()
            time.sleep(seconds)
            passed, own = time.perf_counter() - start, time.process_time() - own
            after = pipeline.processor_seconds()
        shares = {f"{name}_share": (after[name] - before[name]) / passed for name in (SENDER, RECEIVER)}
        return {**shares, "client_share": own / passed}


def _arrivals(pipeline: Session, seconds: float) -> list[float]:
    """When the results of a stream of so many seconds came, but for the first ones."""
    end = time.perf_counter() + seconds

    def rows() -> Iterator[list[np.ndarray]]:
        for number in range(1_000_000):
            if time.perf_counter() > end and number >= 3 * FILL:
                return
            yield [ROW]

    return [time.perf_counter() for _ in pipeline.stream(rows())][FILL:]


def _processor_seconds(pipeline: Session, seconds: float) -> float:
    """Of all workers, for one micro-batch of a stream."""
    before = sum(pipeline.processor_seconds().values())
    count = len(_arrivals(pipeline, seconds)) + FILL
    return (sum(pipeline.processor_seconds().values()) - before) / count


def _latency_seconds(pipeline: Session) -> float:
    """From the sender's having its tensor to the receiver's beginning with it: one host, one clock. The median."""
    begins, ends = {}, {}
    for event in pipeline.trace():
        if event.kind == "compute" and event.stage == "hold":
            begins[event.sequence] = event.end_nanoseconds
        elif event.kind == "compute" and event.stage == "take":
            ends[event.sequence] = event.start_nanoseconds
    return statistics.median((ends[each] - begins[each]) * 1e-9 for each in begins.keys() & ends.keys())


def main() -> None:
    with LocalWorkers([SENDER, RECEIVER]) as workers:
        measurement = Measurement(workers)
        for line in sys.stdin:
            print(json.dumps(measurement.answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
