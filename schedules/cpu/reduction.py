"""Reductions that are no contraction: softmax, norms, mean, sums.

All stages of a row (its maximum, its sum of exponentials, its quotient) run while the row is in the first-level cache;
threads share the rows.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from tvm_split.schedules.blocks import Block, blocks_of, new_schedule
from tvm_split.schedules.cpu.elementwise import SMALLEST_PARALLEL, split_vector
from tvm_split.schedules.traits import Traits


def schedule_reduction(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Every block under the common outer loops of the last one; the function must have one output."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or not any(block.is_reduction for block in blocks):
        return None
    last = blocks[-1]
    if last.is_reduction and sum(block.is_reduction for block in blocks) == 1:
        # One value of all elements: sums that leave more than one are windows to `schedule_pooling`.
        for block in blocks[:-1]:
            schedule.compute_inline(block.handle)
        return schedule.mod["main"]
    common = min(last.spatial, *(block.spatial for block in blocks if block.is_reduction))
    # Kept dimensions of extent 1 come last in a reduction's iterators: they are no loops to share.
    rows = 0
    while rows < common and all(block.extents[rows] == last.extents[rows] for block in blocks if block.is_reduction):
        rows += 1
    if rows == 0 or (last.is_reduction and rows == last.spatial):
        return None
    row = schedule.fuse(*schedule.get_loops(last.handle)[:rows])
    kept = [last]
    for block in reversed(blocks[:-1]):
        if block.is_reduction or len(schedule.get_consumers(block.handle)) > 1 or _precedes_reduction(schedule, block):
            schedule.compute_at(block.handle, row, preserve_unit_loops=True)
            kept.append(block)
        else:
            schedule.compute_inline(block.handle)
    if sum(block.iterations for block in blocks) >= SMALLEST_PARALLEL:
        schedule.parallel(row)
    for block in kept:
        _vectorize_in_row(schedule, block, traits)
    return schedule.mod["main"]


def _precedes_reduction(schedule: s_tir.Schedule, block: Block) -> bool:
    """Computed once and kept for later stages, rather than again in each: exponentials and reciprocals are dear."""
    return block.iterations == 1 or bool(schedule.get_producers(block.handle))


def _vectorize_in_row(schedule: s_tir.Schedule, block: Block, traits: Traits) -> None:
    """Vectors for what is left of the block inside the row loop, where whole vectors fit."""
    loops = schedule.get_loops(block.handle)[1:]
    count = len(block.kinds) - block.spatial
    spatial, reduction = loops[: len(loops) - count], loops[len(loops) - count :]
    outer, lane = split_vector(schedule, spatial, traits)
    if lane is None:
        return
    if reduction:
        schedule.reorder(*outer, *reduction, lane)
    schedule.vectorize(lane)
    if reduction:
        initial = schedule.decompose_reduction(block.handle, reduction[0])
        schedule.vectorize(schedule.get_loops(initial)[-1])
