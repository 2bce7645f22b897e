"""Measured peaks of a processor: multiply-adds and bytes read per second; and a network's overhead per weight.

Kernels that measure a processor's two peaks (multiply-adds in registers, memory bandwidth), and a minimal kernel.

A network of minimal kernels measures the overhead besides computing. No kernel takes less time than its operations at
peak FLOP/s or its bytes at peak bandwidth, whichever is longer (Williams, Waterman, Patterson: Roofline, 2009). Both
peak kernels divide their work among ``threads`` threads. All kernels are already scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.target import Target

from relay_passes.one_at_a_time import one_at_a_time
from rpc_runtime.program.measurements import NETWORK, KernelSet, TimedKernel, TimingEffort
from rpc_runtime.program.program import BlobSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from schedules.apply import IS_SCHEDULED, SCHEDULE_ATTRIBUTE
from schedules.blocks import new_schedule
from schedules.traits import traits_of
from tvm_split.compiler.build_cache import BlobFolder
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import target_text, tvm_target
from tvm_split.profiling.kernels import kernel_digest, symbol

RULE = "ceiling"
# Two multiply-adds start per cycle and take four cycles: 12 independent sums hide that latency and fit 16 registers.
SUMS = 12


@dataclass(frozen=True)
class CeilingKernel:
    """A float32 PrimFunc and its shapes; ``amount`` is the number of operations, or of bytes read, per call."""

    function: tirx.PrimFunc
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    amount: float


def multiply_add_kernel(target: Target, threads: int, steps: int = 2_000_000) -> CeilingKernel:
    """A kernel that computes ``sum = sum * c + x`` ``steps`` times per thread, for as many sums as fit the registers.

    ``amount`` counts floating-point operations.
    """
    lanes = traits_of(target).lanes
    horner = te.comm_reducer(
        lambda total, value: total * tirx.const(0.999, "float32") + value,
        lambda dtype: tirx.const(0, dtype),
        name="horner",
    )
    x = te.placeholder((SUMS, lanes), name="x")
    step = te.reduce_axis((0, steps), name="step")
    sums = te.compute((threads, SUMS, lanes), lambda _, u, lane: horner(x[u, lane], axis=step), name="sums")
    return CeilingKernel(
        _in_registers(x, sums), (SUMS, lanes), (threads, SUMS, lanes), 2.0 * threads * SUMS * lanes * steps
    )


def memory_read_kernel(target: Target, threads: int, mebibytes: int = 256) -> CeilingKernel:
    """A kernel in which each thread sums its part of an array that is larger than almost all caches.

    ``amount`` counts the bytes read.
    """
    lanes = traits_of(target).lanes
    length = mebibytes * 1024 * 1024 // 4 // threads // (SUMS * lanes)
    x = te.placeholder((threads, length, SUMS, lanes), name="x")
    step = te.reduce_axis((0, length), name="step")
    sums = te.compute((threads, SUMS, lanes), lambda t, u, lane: te.sum(x[t, step, u, lane], axis=step), name="sums")
    shape = (threads, length, SUMS, lanes)
    return CeilingKernel(_in_registers(x, sums), shape, (threads, SUMS, lanes), 4.0 * prod(shape))


def smallest_kernel(target: Target) -> CeilingKernel:
    """A kernel that adds two vectors to a third: the arguments of a layer with weights and bias, almost no work."""
    shape = (traits_of(target).lanes,)
    x, weight, bias = (te.placeholder(shape, name=name) for name in ("x", "weight", "bias"))
    added = te.compute(x.shape, lambda lane: x[lane] + weight[lane] + bias[lane], name="sum")
    schedule = new_schedule(te.create_prim_func([x, weight, bias, added]))
    schedule.vectorize(*schedule.get_loops(schedule.get_sblock("sum")))
    return CeilingKernel(_as_scheduled(schedule.mod["main"]), shape, shape, float(*shape))


def _in_registers(x: te.Tensor, sums: te.Tensor) -> tirx.PrimFunc:
    """Schedule one thread per outermost index of ``sums``; it keeps its sums in registers for the whole reduction."""
    schedule = new_schedule(te.create_prim_func([x, sums]))
    block = schedule.get_sblock("sums")
    written = schedule.cache_write(block, 0, "local")
    thread, which, lane, step = schedule.get_loops(block)
    schedule.reorder(thread, step, which, lane)
    schedule.reverse_compute_at(written, thread, preserve_unit_loops=True)
    schedule.parallel(thread)
    schedule.unroll(which)
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(block, step)
    for handle in (initial, written):
        *_, outer, inner = schedule.get_loops(handle)
        schedule.unroll(outer)
        schedule.vectorize(inner)
    return _as_scheduled(schedule.mod["main"])


def _as_scheduled(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return function.without_attr("global_symbol").with_attr(SCHEDULE_ATTRIBUTE, RULE).with_attr(IS_SCHEDULED, True)


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
