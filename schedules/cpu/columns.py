"""Reductions over an axis that is not the last: some neighbouring columns at a time, through all their stages.

Columns next to each other fill vectors; those of one turn are so few that what is kept between stages (their
exponentials) stays in the first-level cache.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from tvm_split.schedules.blocks import blocks_of, new_schedule
from tvm_split.schedules.cpu.elementwise import SMALLEST_PARALLEL, vector_width
from tvm_split.schedules.cpu.register_tile import divisors
from tvm_split.schedules.traits import Traits

FAMILY = "columns"
KEPT_BYTES = 16 * 1024


def schedule_columns(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Iterators of reductions: outer, column | k; of the result: outer, k, column; between them: outer[, k], column."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or blocks[-1].anchor != FAMILY:
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
    """As many as whole vectors hold and the cache keeps; all where vectors do not divide them: LLVM does better."""
    whole = [count for count in divisors(columns) if count % traits.lanes == 0]
    fitting = [count for count in whole if 4 * count * steps <= KEPT_BYTES]
    return max(fitting) if fitting else min(whole, default=columns)
