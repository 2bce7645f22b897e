"""Kernels that measure the peaks of a CPU: multiply-adds in registers, and memory bandwidth."""

from collections.abc import Mapping
from math import prod
from typing import Any

from tvm import te, tirx
from tvm.target import Target

from relay_passes.content_names import content_name
from rpc_runtime.program.measurements import TimedKernel, TimingEffort
from rpc_runtime.program.specs import TensorSpec
from schedules.blocks import new_schedule
from schedules.template import IS_SCHEDULED, SCHEDULE_ATTRIBUTE
from schedules.traits import traits_of
from tvm_split.compiler.stage import Kernel
from tvm_split.compiler.targets import tvm_target
from tvm_split.profiling.kernels import KernelCall, TargetCode

PEAK_RULE = "peak"
SUMS = 12
"""Independent sums of a thread. They hide the 4 cycles of a multiply-add, of which 2 start a cycle, in 16 registers."""
STEPS = 2_000_000
"""Multiply-adds to each sum."""
READ_BYTES = 256 * 1024 * 1024
"""Size of the array that is read: larger than almost all caches."""
PEAK_EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.0)
"""Effort of timing both kernels: only a number of rounds, since each call takes milliseconds."""


def peak_code(target: Mapping[str, Any], threads: int) -> TargetCode:
    """Return two kernels that measure a CPU's peaks, multiply-adds in registers and memory bandwidth; none for a GPU.

    No kernel takes less time than its operations at peak FLOP/s or its bytes at peak bandwidth, whichever is longer
    (Williams, Waterman, Patterson: Roofline, 2009). Both divide their work among ``threads`` threads.
    """
    if target["kind"] == "cuda":
        return TargetCode(target, (), dict, 0, frozenset())
    built_for = tvm_target(target)
    kernels = _multiply_add_kernel(built_for, threads), _memory_read_kernel(built_for, threads)
    functions = {call.digest: function for call, function in kernels}
    return TargetCode(target, tuple(call for call, _ in kernels), lambda: functions, 0, frozenset())


def _multiply_add_kernel(target: Target, threads: int) -> tuple[KernelCall, tirx.PrimFunc]:
    """A kernel that computes ``sum = sum * c + x`` `STEPS` times per thread for each of `SUMS` vectors."""
    lanes = traits_of(target).lanes
    horner = te.comm_reducer(
        lambda total, value: total * tirx.const(0.999, "float32") + value,
        lambda dtype: tirx.const(0, dtype),
        name="horner",
    )
    x = te.placeholder((SUMS, lanes), name="x")
    step = te.reduce_axis((0, STEPS), name="step")
    sums = te.compute((threads, SUMS, lanes), lambda _, u, lane: horner(x[u, lane], axis=step), name="sums")
    return _in_registers(x, sums, operations=2.0 * threads * SUMS * lanes * STEPS)


def _memory_read_kernel(target: Target, threads: int) -> tuple[KernelCall, tirx.PrimFunc]:
    """A kernel in which each thread sums its part of an array of `READ_BYTES`."""
    lanes = traits_of(target).lanes
    length = READ_BYTES // 4 // threads // (SUMS * lanes)
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
    function = function.with_attr(SCHEDULE_ATTRIBUTE, PEAK_RULE).with_attr(IS_SCHEDULED, True)
    name = content_name(PEAK_RULE, function)
    arguments = tuple(TensorSpec("", tuple(map(int, tensor.shape)), "float32") for tensor in (x, sums))
    kernel = Kernel(name, (), PEAK_RULE, "", operations, moved_bytes)
    return KernelCall(kernel, TimedKernel(name, arguments, frozenset(), 1), (), ()), function
