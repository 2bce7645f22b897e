"""Products of few rows, a vector times a matrix among them: bound by reading the matrix once.

Neighbouring threads take neighbouring columns, so that each step of the sum reads whole lines of the matrix; the
vector's element is one for all of them. Slices of the sum, which the legalization makes, fill the GPU.
"""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target

from tvm_split.schedules.blocks import find_parts, inline_tail, new_schedule
from tvm_split.schedules.gpu.contraction import finish
from tvm_split.schedules.gpu.families import FEW_ROWS
from tvm_split.schedules.gpu.tile import SMALL_COLUMNS

STEPS = 8
"""Steps of the sum whose loads are under way together."""


def schedule_few_rows(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Anchor iterators: slice, batch, row, column | depth."""
    schedule = new_schedule(function)
    parts = find_parts(schedule, FEW_ROWS)
    if parts is None:
        return None
    anchor = parts.anchor
    for block in parts.preparation:
        schedule.compute_inline(block.handle)
    tail = inline_tail(schedule, anchor, parts.tail)
    part, batch, row, column, depth = schedule.get_loops(anchor.handle)
    column_block, column_thread = schedule.split(column, [None, SMALL_COLUMNS])
    outer, inner = schedule.split(depth, [None, min(STEPS, anchor.extents[-1])])
    schedule.reorder(part, batch, column_block, column_thread, outer, inner, row)
    schedule.bind(schedule.fuse(part, batch, column_block), "blockIdx.x")
    schedule.bind(column_thread, "threadIdx.x")
    schedule.unroll(inner)
    schedule.unroll(row)
    stored = schedule.cache_write(anchor.handle, 0, "local")
    schedule.reverse_compute_at(stored, column_thread, preserve_unit_loops=True)
    finish(schedule, anchor, tail)
    schedule.decompose_reduction(anchor.handle, outer)
    return schedule.mod["main"]
