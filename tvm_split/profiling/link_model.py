"""Probes of links: programs that pass tensors of given sizes over the real runtime, and lines through their times."""

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from tvm import relax

from relay_passes.ir import new_function
from relay_passes.one_at_a_time import ONE_AT_A_TIME
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.stage import StageCompiler
from tvm_split.placement.profile import StreamingCost

DISAGREEMENT = 2.0
"""Largest ratio between two undisturbed measurements of the same transfer."""
SMALLEST_BYTES = 64
SECOND_BYTES = 64 * 1024
"""Second probed size: small enough for a link of some 100 kB/s, large enough to estimate larger tensors."""
LEAST_LARGEST_BYTES = 1024 * 1024
"""Lower limit of the largest probed size; below it, the fixed cost per tensor hides the bandwidth."""
LARGEST_BYTES = 16 * 1024 * 1024
WORTHWHILE_SECONDS = 0.12
"""Longest transfer with which a slow link is probed, in seconds."""
MOST_OVER_ARRIVED = 4.0
"""Limit of a link's bandwidth, relative to the rate at which its largest tensors arrived."""
CLOCK_SECONDS = 1e-9
"""Resolution of clocks, in seconds."""
WAKE_UP_SECONDS = 2e-4
"""Difference in seconds between two transfers that is always noise: the variation of thread wake-ups."""


@dataclass(frozen=True)
class LinkSample:
    """Times of tensors of one size on a link.

    ``single_seconds`` is the usual time of a single tensor, from the end of compute at the source to the start of
    compute at the destination. ``stream_seconds`` is the time per tensor in a stream, or None. On a link with the
    client, ``processor_seconds`` is the CPU time that the machine takes to receive a tensor and send one, and
    ``client_seconds`` that of the client.
    """

    size_bytes: int
    single_seconds: float
    stream_seconds: float | None
    processor_seconds: float = 0.0
    client_seconds: float = 0.0


@dataclass(frozen=True)
class ProbedLink:
    """Samples of a link in ascending order of size; ``measured_at`` is in seconds since 1970."""

    measured_at: float
    samples: tuple[LinkSample, ...]
    transport: str


def are_close(first: float, second: float) -> bool:
    """Whether the times of two transfers are equal within noise."""
    return abs(first - second) <= WAKE_UP_SECONDS or max(first, second) <= DISAGREEMENT * min(first, second)


def probe_sizes(tensor_sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return the three sizes to probe for tensors of ``tensor_sizes``; powers of two, so that few differ."""
    largest = 2 ** math.ceil(math.log2(max(max(tensor_sizes, default=1), 1)))
    return SMALLEST_BYTES, SECOND_BYTES, min(max(largest, LEAST_LARGEST_BYTES), LARGEST_BYTES)


def worthwhile_size(size_bytes: int, samples: Sequence[LinkSample]) -> int | None:
    """Return ``size_bytes``, or a smaller size if that would take too long; None if it would add no information."""
    if len(samples) < 2:
        return size_bytes
    before, last = samples[-2:]
    seconds_per_byte = max(0.0, last.single_seconds - before.single_seconds) / (last.size_bytes - before.size_bytes)
    while last.single_seconds + (size_bytes - last.size_bytes) * seconds_per_byte > WORTHWHILE_SECONDS:
        size_bytes //= 2
        if size_bytes <= last.size_bytes:
            return None
    return size_bytes


def fitted_line(samples: Sequence[LinkSample]) -> tuple[float, float]:
    """Return latency (seconds) and bandwidth (bytes per second) of at least two samples in ascending order of size.

    The bandwidth is the lower of two: that of a single tensor, whose copies follow each other, and that of a stream,
    which a network may slow down after a while. The latency is that of the smallest tensor.
    """
    smallest, largest = samples[0], samples[-1]
    # The median of the slopes between all pairs (Theil–Sen estimator) is robust against one disturbed sample.
    slope = statistics.median(
        (larger.single_seconds - smaller.single_seconds) / (larger.size_bytes - smaller.size_bytes)
        for smaller, larger in combinations(samples, 2)
    )
    seconds_per_byte = slope = max(slope, 0.0)
    streamed = [sample for sample in samples if sample.stream_seconds is not None]
    for smaller, larger in pairwise(streamed[-2:]):
        rise = (larger.stream_seconds or 0.0) - (smaller.stream_seconds or 0.0)
        seconds_per_byte = max(seconds_per_byte, rise / (larger.size_bytes - smaller.size_bytes))
    # If a small tensor was disturbed, the slope to a large one may be near 0. That is noise, not bandwidth: limit it.
    arrived = largest.single_seconds if largest.stream_seconds is None else largest.stream_seconds
    seconds_per_byte = max(seconds_per_byte, max(arrived / MOST_OVER_ARRIVED, CLOCK_SECONDS) / largest.size_bytes)
    return max(smallest.single_seconds - smallest.size_bytes * slope, 0.0), 1 / seconds_per_byte


def transfer_cost(to_machine: ProbedLink, from_machine: ProbedLink) -> StreamingCost:
    """Return the CPU time that a transfer takes at both ends, from the probes of a machine's links with the client.

    In each probe both ends receive a tensor and send one. One of these tensors has the probed size, the other is small.
    """
    both = to_machine.samples, from_machine.samples
    machine_cost = _line([[(sample.size_bytes, sample.processor_seconds) for sample in samples] for samples in both])
    client_cost = _line([[(sample.size_bytes, sample.client_seconds) for sample in samples] for samples in both])
    return StreamingCost(*machine_cost, *client_cost)


def _line(series: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Return the seconds per tensor and per byte.

    ``series`` have (bytes, seconds for a tensor of that size and a small one), in ascending order.
    """
    per_byte = statistics.fmean(
        (most - least) / (largest - smallest) for (smallest, least), *_, (largest, most) in series
    )
    return statistics.fmean(samples[0][1] / 2 for samples in series), max(per_byte, 0.0)


class ProbePrograms:
    """Compiles pass-through stages for any processor of an architecture, once per architecture and pair of sizes."""

    def __init__(self, architectures: Mapping[str, str], gpus: Mapping[str, Mapping[str, Any]]) -> None:
        """``architectures`` (such as ``x86_64``) are by machine; ``gpus`` has TVM targets of machines with a GPU."""
        self._architectures = architectures
        self._gpus = gpus
        self._blobs = BlobFolder.temporary()
        self._libraries: dict[tuple[str, int, int], BlobSpec] = {}

    def blob_path(self, sha256: str) -> Path:
        return self._blobs.path(sha256)

    def chain(self, machines: Sequence[str], sizes_bytes: Sequence[int], *, on_gpus: bool = False) -> Program:
        """Return a program from the client over the machines and back.

        ``sizes_bytes`` are the sizes of the tensors before, between and after the machines.

        Raises:
            CompileError: there is no linker here for a machine's architecture, or no code can be made for its GPU.
        """
        tensors = [TensorSpec(f"tensor {place}", (size,), "uint8") for place, size in enumerate(sizes_bytes)]
        stages = tuple(
            StageSpec(
                place,
                f"pass {place}",
                machine,
                (),
                "cuda" if on_gpus else "cpu",
                self._library(machine, *sizes_bytes[place : place + 2], on_gpu=on_gpus),
                (),
                (tensors[place],),
                (tensors[place + 1],),
            )
            for place, machine in enumerate(machines)
        )
        return Program((tensors[0],), (tensors[-1],), stages)

    @ONE_AT_A_TIME  # links are probed in several threads
    def _library(self, machine: str, input_bytes: int, output_bytes: int, *, on_gpu: bool) -> BlobSpec:
        target = dict(self._gpus[machine]) if on_gpu else _cpu_target(self._architectures[machine])
        key = (repr(sorted(target.items())), input_bytes, output_bytes)
        if key not in self._libraries:
            with ScratchFolder("build") as folder:
                library, compiler = folder.path / "pass.so", StageCompiler(target)
                scheduled = compiler.lower(_passing(input_bytes, output_bytes))["name"]
                compiler.build(scheduled, library, "the stage of a probe")
                self._libraries[key] = self._blobs.add_file(library)
        return self._libraries[key]


def _passing(input_bytes: int, output_bytes: int) -> relax.Function:
    """Return a function that returns the first bytes of its input, or its first byte repeated, all inverted.

    The bytes are inverted, because otherwise a result of equal size would be a view, which the runtime copies.
    """
    tensor = relax.Var("tensor", relax.TensorType((input_bytes,), "uint8"))

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        count = output_bytes if input_bytes >= output_bytes else 1
        passed = builder.emit(relax.op.strided_slice(tensor, [0], [0], [count]))
        if count < output_bytes:
            passed = builder.emit(relax.op.broadcast_to(passed, (output_bytes,)))
        return [builder.emit(relax.op.bitwise_not(passed))]

    return new_function("probe", [tensor], emit)


def _cpu_target(architecture: str) -> dict[str, Any]:
    target: dict[str, Any] = {"kind": "llvm", "num-cores": 1}
    if architecture != platform.machine():
        target["mtriple"] = f"{architecture}-linux-gnu"
    return target
