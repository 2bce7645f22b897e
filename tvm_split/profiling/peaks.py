"""Kernels that measure a processor's two peaks: multiply-adds in registers, and memory bandwidth.

No kernel takes less time than its operations at peak FLOP/s or its bytes at peak bandwidth, whichever is longer
(Williams, Waterman, Patterson: Roofline, 2009). Both kernels divide their work among ``threads`` threads, and are
already scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from tvm import te, tirx
from tvm.target import Target

from rpc_runtime.program.measurements import TimedKernel, TimingEffort
from rpc_runtime.program.program import TensorSpec
from schedules.apply import IS_SCHEDULED, SCHEDULE_ATTRIBUTE
from schedules.blocks import new_schedule
from schedules.traits import traits_of
from tvm_split.compiler.stage import Kernel
from tvm_split.compiler.targets import tvm_target
from tvm_split.profiling.kernels import KernelCall, TargetCode, kernel_digest, symbol

RULE = "peak"
# Two multiply-adds start per cycle and take four cycles: 12 independent sums hide that latency and fit 16 registers.
SUMS = 12

EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.0)
"""Effort of timing both kernels: only a number of rounds, since each call takes milliseconds."""


def peak_code(target: Mapping[str, Any], threads: int) -> TargetCode:
    """Return the two kernels for a CPU target, and none for a GPU.

    One kernel sets the FLOP/s peak, the other the bandwidth.
    """
    if target["kind"] == "cuda":
        return TargetCode(target, (), dict, 0, frozenset())
    built_for = tvm_target(target)
    kernels = multiply_add_kernel(built_for, threads), memory_read_kernel(built_for, threads)
    functions = {call.digest: function for call, function in kernels}
    return TargetCode(target, tuple(call for call, _ in kernels), lambda: functions, 0, frozenset())


def multiply_add_kernel(target: Target, threads: int, steps: int = 2_000_000) -> tuple[KernelCall, tirx.PrimFunc]:
    """A kernel that computes ``sum = sum * c + x`` ``steps`` times per thread for each of `SUMS` vectors."""
    lanes = traits_of(target).lanes
    horner = te.comm_reducer(
        lambda total, value: total * tirx.const(0.999, "float32") + value,
        lambda dtype: tirx.const(0, dtype),
        name="horner",
    )
    x = te.placeholder((SUMS, lanes), name="x")
    step = te.reduce_axis((0, steps), name="step")
    sums = te.compute((threads, SUMS, lanes), lambda _, u, lane: horner(x[u, lane], axis=step), name="sums")
    return _in_registers(x, sums, operations=2.0 * threads * SUMS * lanes * steps)


def memory_read_kernel(target: Target, threads: int, mebibytes: int = 256) -> tuple[KernelCall, tirx.PrimFunc]:
    """A kernel in which each thread sums its part of an array that is larger than almost all caches."""
    lanes = traits_of(target).lanes
    length = mebibytes * 1024 * 1024 // 4 // threads // (SUMS * lanes)
    shape = (threads, length, SUMS, lanes)
    x = te.placeholder(shape, name="x")
    step = te.reduce_axis((0, length), name="step")
    sums = te.compute((threads, SUMS, lanes), lambda t, u, lane: te.sum(x[t, step, u, lane], axis=step), name="sums")
    return _in_registers(x, sums, moved_bytes=4 * prod(shape))


def _in_registers(
    x: te.Tensor, sums: te.Tensor, operations: float = 0.0, moved_bytes: int = 0
) -> tuple[KernelCall, tirx.PrimFunc]:
    """Schedule one thread per outermost index of ``sums``; it keeps its sums in registers for the whole reduction."""
    schedule = new_schedule(te.create_prim_func([x, sums]))
    block = schedule.get_sblock("sums")
    written = schedule.cache_write(block, 0, "local")
    thread, vector, lane, step = schedule.get_loops(block)
    schedule.reorder(thread, step, vector, lane)
    schedule.reverse_compute_at(written, thread, preserve_unit_loops=True)
    schedule.parallel(thread)
    schedule.unroll(vector)
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(block, step)
    for handle in (initial, written):
        *_, outer, inner = schedule.get_loops(handle)
        schedule.unroll(outer)
        schedule.vectorize(inner)
    function = schedule.mod["main"].without_attr("global_symbol")
    function = function.with_attr(SCHEDULE_ATTRIBUTE, RULE).with_attr(IS_SCHEDULED, True)
    digest = kernel_digest(function)
    arguments = tuple(TensorSpec("", tuple(map(int, tensor.shape)), "float32") for tensor in (x, sums))
    timed = TimedKernel(symbol(digest), arguments, frozenset(), 1)
    return KernelCall(Kernel(symbol(digest), (), RULE, "", operations, moved_bytes), digest, timed, (), ()), function
