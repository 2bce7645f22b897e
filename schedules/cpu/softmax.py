"""Lower softmax and log_softmax over any axis to TE: the last axis in rows, other axes in columns of vectors.

This module also schedules the columns. A group of neighbouring columns goes through all stages together. Neighbouring
columns fill vectors, and a group is so small that the values kept between stages (exponentials) stay in the first-level
cache.
"""

from functools import partial
from math import prod
from typing import Any

from tvm import relax, s_tir, te, tirx
from tvm.relax import BlockBuilder

from schedules.blocks import ANCHOR, anchors_of, blocks_of, new_schedule
from schedules.cpu.elementary import exp
from schedules.cpu.elementwise import SMALLEST_PARALLEL
from schedules.cpu.normalization import fits, reduce_rows, reshaped
from schedules.cpu.register_tile import divisors
from schedules.relax_tools import default_legalization, static_shape
from schedules.traits import Traits, vector_width

COLUMNS = "columns"
KEPT_BYTES = 16 * 1024


def softmax(x: te.Tensor, logarithm: bool, traits: Traits) -> te.Tensor:
    """Return the softmax of x over the last axis, computed in float32; with ``logarithm``, the log-softmax.

    Softmax computes the exponentials once and divides them by their sum.
    """
    *rows, extent = (int(value) for value in x.shape)
    lanes, shape = traits.lanes, tuple(rows)

    def read(row: tuple[Any, ...], k: Any) -> Any:
        return x[(*row, k)].astype("float32")

    largest = reduce_rows(shape, extent, read, te.max, lanes, "row_maximum")
    powers = te.compute(x.shape, lambda *i: exp(read(i[:-1], i[-1]) - largest[i[:-1]]), name="row_exp")
    total = reduce_rows(shape, extent, lambda row, k: powers[(*row, k)], te.sum, lanes, "row_sum")
    if not logarithm:
        return te.compute(x.shape, lambda *i: (powers[i] / total[i[:-1]]).astype(x.dtype), name="softmax")
    logarithms = te.compute(shape, lambda *row: tirx.log(total[row]), name="row_logarithm")

    def element(*i: Any) -> Any:
        return (read(i[:-1], i[-1]) - largest[i[:-1]] - logarithms[i[:-1]]).astype(x.dtype)

    return te.compute(x.shape, element, name="log_softmax")


def softmax_of_columns(x: te.Tensor, logarithm: bool) -> te.Tensor:
    """Return the softmax of x [O, K, I] over the middle axis, in float32; with ``logarithm``, the log-softmax.

    `schedule_columns` schedules it.
    """
    outer, extent, inner = (int(value) for value in x.shape)
    axes = [te.reduce_axis((0, extent), name="k") for _ in range(2)]

    def read(o: Any, k: Any, i: Any) -> Any:
        return x[o, k, i].astype("float32")

    largest = te.compute((outer, inner), lambda o, i: te.max(read(o, axes[0], i), axis=axes[0]), name="column_maximum")
    powers = te.compute(x.shape, lambda o, k, i: exp(read(o, k, i) - largest[o, i]), name="column_exp")
    total = te.compute((outer, inner), lambda o, i: te.sum(powers[o, axes[1], i], axis=axes[1]), name="column_sum")
    one = tirx.const(1.0, "float32")
    last = te.compute(
        (outer, inner),
        lambda o, i: tirx.log(total[o, i]) if logarithm else one / total[o, i],
        name="column_logarithm" if logarithm else "column_inverse",
    )

    def element(o: Any, k: Any, i: Any) -> Any:
        value = read(o, k, i) - largest[o, i] - last[o, i] if logarithm else powers[o, k, i] * last[o, i]
        return value.astype(x.dtype)

    name = "log_softmax" if logarithm else "softmax"
    return te.compute(x.shape, element, name=name, attrs={ANCHOR: COLUMNS})


def legalize_softmax(builder: BlockBuilder, call: relax.Call, traits: Traits) -> relax.Expr:
    """Lower softmax or log_softmax of float32 or float16; symbolic shapes and other dtypes are left to TVM."""
    name = call.op.name.rsplit(".", 1)[-1]
    logarithm = name == "log_softmax"
    shape = static_shape(call.args[0])
    if shape is None or not fits(shape, call):
        return default_legalization(builder, call)
    axis = int(call.attrs.axis) % len(shape)
    inner = prod(shape[axis + 1 :])
    if inner == 1:
        leading = shape[:axis] if axis == len(shape) - 1 else (prod(shape[:axis]),)
        rows = reshaped(builder, call.args[0], (*leading, shape[axis]))
        compute = partial(softmax, logarithm=logarithm, traits=traits)
    else:
        rows = reshaped(builder, call.args[0], (prod(shape[:axis]), shape[axis], inner))
        compute = partial(softmax_of_columns, logarithm=logarithm)
    return reshaped(builder, builder.call_te(compute, rows, primfunc_name_hint=name), shape)


def schedule_columns(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule `softmax_of_columns`, some columns at a time; None for other functions.

    Iterators of reductions: outer, column | k; of the result: outer, k, column; between them: outer[, k], column.
    """
    if COLUMNS not in anchors_of(function):
        return None
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or blocks[-1].anchor != COLUMNS:
        return None
    last = blocks[-1]
    outer, steps, columns = schedule.get_loops(last.handle)
    width = columns_at_a_time(last.extents[1], last.extents[2], traits)
    column_outer, column = schedule.split(columns, [None, width])
    schedule.reorder(outer, column_outer, steps, column)
    turn = schedule.fuse(outer, column_outer)
    if sum(block.iterations for block in blocks) >= SMALLEST_PARALLEL:
        schedule.parallel(turn)
    for block in reversed(blocks[:-1]):
        schedule.compute_at(block.handle, turn, preserve_unit_loops=True)
    lanes = vector_width(width, traits)
    for block in blocks:
        loops = schedule.get_loops(block.handle)[1:]
        if block.is_reduction:
            loops = [loops[-1], *loops[:-1]]
            schedule.reorder(*loops)
        _vectorize(schedule, block.handle, lanes)
        if block.is_reduction:
            _vectorize(schedule, schedule.decompose_reduction(block.handle, loops[0]), lanes)
    return schedule.mod["main"]


def _vectorize(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, lanes: int | None) -> None:
    if lanes is not None:
        schedule.vectorize(schedule.split(schedule.get_loops(block)[-1], [None, lanes])[1])


def columns_at_a_time(steps: int, columns: int, traits: Traits) -> int:
    """Return the number of columns per group: whole vectors whose values fit the cache.

    If vectors do not divide the columns, all are one group, since LLVM does better then.
    """
    whole = [count for count in divisors(columns) if count % traits.lanes == 0]
    fitting = [count for count in whole if 4 * count * steps <= KEPT_BYTES]
    return max(fitting) if fitting else min(whole, default=columns)
