"""Kernels that measure a processor's two peaks (multiply-adds in registers, memory bandwidth), and a minimal kernel.

A network of minimal kernels measures the overhead besides computing. No kernel takes less time than its operations at
peak FLOP/s or its bytes at peak bandwidth, whichever is longer (Williams, Waterman, Patterson: Roofline, 2009). Both
peak kernels divide their work among ``threads`` threads. All kernels are already scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import te, tirx
from tvm.target import Target

from schedules.apply import IS_SCHEDULED, SCHEDULE_ATTRIBUTE
from schedules.blocks import new_schedule
from schedules.traits import traits_of

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
