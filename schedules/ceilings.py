"""The two ceilings of a processor, as kernels to measure, multiply-adds in registers and reading memory; and one that
does next to nothing, of which a network is made to measure what else that takes.

No kernel is faster than the longer of its operations over the first and its bytes over the second (Williams, Waterman,
Patterson: Roofline, 2009). Both kernels share their work among ``threads`` threads and come scheduled.
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
# Two multiply-adds start per cycle and take four: 12 independent sums hide that, and fit 16 registers.
SUMS = 12


@dataclass(frozen=True)
class CeilingKernel:
    """A PrimFunc from one float32 tensor to another; a call does ``amount`` operations or reads as many bytes."""

    function: tirx.PrimFunc
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    amount: float


def multiply_add_kernel(target: Target, threads: int, steps: int = 2_000_000) -> CeilingKernel:
    """``sum = sum * c + x``, ``steps`` times, on every thread for as many sums as registers hold: operations."""
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
    """Sums down a long array, of which every thread has its share: bytes read, from beyond all but huge caches."""
    lanes = traits_of(target).lanes
    length = mebibytes * 1024 * 1024 // 4 // threads // (SUMS * lanes)
    x = te.placeholder((threads, length, SUMS, lanes), name="x")
    step = te.reduce_axis((0, length), name="step")
    sums = te.compute((threads, SUMS, lanes), lambda t, u, lane: te.sum(x[t, step, u, lane], axis=step), name="sums")
    shape = (threads, length, SUMS, lanes)
    return CeilingKernel(_in_registers(x, sums), shape, (threads, SUMS, lanes), 4.0 * prod(shape))


def smallest_kernel(target: Target) -> CeilingKernel:
    """Adds two vectors to one: the arguments of a layer with weights and a bias, and next to nothing to compute."""
    shape = (traits_of(target).lanes,)
    x, weight, bias = (te.placeholder(shape, name=name) for name in ("x", "weight", "bias"))
    added = te.compute(x.shape, lambda lane: x[lane] + weight[lane] + bias[lane], name="sum")
    schedule = new_schedule(te.create_prim_func([x, weight, bias, added]))
    schedule.vectorize(*schedule.get_loops(schedule.get_sblock("sum")))
    return CeilingKernel(_as_scheduled(schedule.mod["main"]), shape, shape, float(*shape))


def _in_registers(x: te.Tensor, sums: te.Tensor) -> tirx.PrimFunc:
    """A thread for each outermost index of ``sums``, which it keeps in registers over the whole reduction."""
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
    for each in (initial, written):
        *_, outer, inner = schedule.get_loops(each)
        schedule.unroll(outer)
        schedule.vectorize(inner)
    return _as_scheduled(schedule.mod["main"])


def _as_scheduled(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return function.without_attr("global_symbol").with_attr(SCHEDULE_ATTRIBUTE, RULE).with_attr(IS_SCHEDULED, True)
