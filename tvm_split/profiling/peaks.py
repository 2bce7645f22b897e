"""Measured peaks of a processor: multiply-adds and bytes read per second; and a network's overhead per weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from relay_passes.one_at_a_time import one_at_a_time
from rpc_runtime.program.measurements import NETWORK, KernelSet, TimedKernel, TimingEffort
from rpc_runtime.program.program import BlobSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from schedules.ceilings import CeilingKernel, memory_read_kernel, multiply_add_kernel, smallest_kernel
from tvm_split.compiler.build_cache import BlobFolder
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import target_text, tvm_target
from tvm_split.profiling.kernels import kernel_digest, symbol

CALLS, WEIGHTS = 64, 2
EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.0)


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of float32 operations (a multiplication and an addition are two) and of reading memory.

    ``seconds_per_weight`` is the overhead of a network over its kernels, per weight: every micro-batch passes each
    weight to the network, which checks it.
    """

    operations_per_second: float
    bytes_per_second: float
    seconds_per_weight: float = 0.0


@dataclass(frozen=True)
class CeilingCode:
    """Kernels to time, by digest: multiply-add and memory-read kernels at the peak rates, then a network of small ones.

    ``amounts`` are the operations and the bytes of one call of the first two. The network has `CALLS` kernels that do
    nearly nothing; the last entry is one such kernel alone.
    """

    target: Mapping[str, Any]
    module: tvm.IRModule
    kernels: Mapping[str, TimedKernel]
    amounts: tuple[float, float]

    def build(self, blobs: BlobFolder) -> BlobSpec:
        with ScratchFolder("build") as folder:
            path = folder.path / "ceilings.so"
            StageCompiler(self.target).build(self.module, path, "the library of the machine's ceilings")
            return blobs.add_file(path)

    def kernel_set(self, machine: str, library: BlobSpec) -> KernelSet:
        return KernelSet(machine, "cpu", library, tuple(self.kernels.values()), 0, target_text(self.target))

    def ceilings(self, seconds: Mapping[str, float]) -> Ceilings:
        """Return the peaks from the seconds of each kernel, by digest."""
        adding, reading, network, kernel = (seconds[digest] for digest in self.kernels)
        operations, read = self.amounts
        return Ceilings(operations / adding, read / reading, max(0.0, network / CALLS - kernel) / WEIGHTS)


def ceiling_code(target: Mapping[str, Any], threads: int) -> CeilingCode:
    """Return the peak kernels for a CPU target; GPUs are not supported."""
    built_for = tvm_target(target)
    adding, reading = multiply_add_kernel(built_for, threads), memory_read_kernel(built_for, threads)
    smallest = smallest_kernel(built_for)
    digests = {kernel_digest(ceiling_kernel.function): ceiling_kernel for ceiling_kernel in (adding, reading, smallest)}
    module = _network(smallest)
    for digest, kernel in digests.items():
        module[symbol(digest)] = kernel.function.with_attr("global_symbol", symbol(digest))
    vector = smallest.input_shape
    kernels = {
        digest: _timed(symbol(digest), (kernel.input_shape, kernel.output_shape), 1)
        for digest, kernel in digests.items()
        if kernel is not smallest
    }
    # The single kernel comes last, so that its code and memory are as warm as in the network.
    (*_, digest) = digests
    kernels |= {
        f"{CALLS} times {digest}": _timed(NETWORK, [vector] * (1 + CALLS * WEIGHTS), 0),
        digest: _timed(symbol(digest), [vector] * (2 + WEIGHTS), 1),
    }
    return CeilingCode(target, module, kernels, (adding.amount, reading.amount))


@one_at_a_time
def _network(kernel: CeilingKernel) -> tvm.IRModule:
    """Return a network of `CALLS` calls of a kernel, one after the other, each with its own weights."""
    builder = relax.BlockBuilder()
    name = symbol(kernel_digest(kernel.function))
    function = builder.add_func(kernel.function.with_attr("global_symbol", name), name)
    vector = relax.TensorType(kernel.input_shape, "float32")
    x, *weights = (relax.Var(f"vector_{place}", vector) for place in range(1 + CALLS * WEIGHTS))
    with builder.function(NETWORK, [x, *weights]):
        with builder.dataflow():
            value = x
            for place in range(0, len(weights), WEIGHTS):
                call_weights = weights[place : place + WEIGHTS]
                value = builder.emit(relax.call_tir(function, (value, *call_weights), vector))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def _timed(function: str, shapes: Sequence[tuple[int, ...]], results: int) -> TimedKernel:
    return TimedKernel(function, tuple(TensorSpec("", shape, "float32") for shape in shapes), frozenset(), results)
