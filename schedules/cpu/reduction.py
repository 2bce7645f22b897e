"""Reductions that are no contraction: softmax, norms, mean, sums.

All stages of a row (its maximum, its sum of exponentials, its quotient) run while the row is in the first-level cache;
threads share the rows.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from schedules.blocks import Block, blocks_of, new_schedule
from schedules.cpu.elementwise import SMALLEST_PARALLEL, vector_width
from schedules.traits import Traits


def schedule_reduction(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Every block under the common outer loops of the last one; the function must have one output."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or not any(block.is_reduction for block in blocks):
        return None
    last = blocks[-1]
    common = min(last.spatial, *(block.spatial for block in blocks if block.is_reduction))
    # Kept dimensions of extent 1 come last in a reduction's iterators: they are no loops to share.
    rows = 0
    while rows < common and all(
        block.extents[rows] == last.extents[rows] for block in blocks if block.is_reduction
    ):
        rows += 1
    if last.is_reduction and rows == last.spatial:
        return _single(schedule, blocks, traits)
    if rows == 0:
        return None
    loops = schedule.get_loops(last.handle)
    row = schedule.fuse(*loops[:rows])
    for block in reversed(blocks[:-1]):
        if block.is_reduction or len(schedule.get_consumers(block.handle)) > 1:
            schedule.compute_at(block.handle, row, preserve_unit_loops=True)
        else:
            schedule.compute_inline(block.handle)
    if sum(block.iterations for block in blocks) >= SMALLEST_PARALLEL:
        schedule.parallel(row)
    return schedule.mod["main"]


def _single(schedule: s_tir.Schedule, blocks: list[Block], traits: Traits) -> tirx.PrimFunc | None:
    """The last block is the only reduction: threads share its output, vectors its innermost output axis."""
    last = blocks[-1]
    if any(block.is_reduction for block in blocks[:-1]):
        return None
    for block in blocks[:-1]:
        schedule.compute_inline(block.handle)
    schedule_single_reduction(schedule, last, traits)
    return schedule.mod["main"]


def schedule_single_reduction(schedule: s_tir.Schedule, block: Block, traits: Traits) -> None:
    loops = schedule.get_loops(block.handle)
    spatial, reduction = loops[: block.spatial], loops[block.spatial :]
    if not spatial:
        return
    width = vector_width(block.extents[block.spatial - 1], traits)
    outer = spatial
    if width is not None:
        lane_outer, lane = schedule.split(spatial[-1], [None, width])
        outer = [*spatial[:-1], lane_outer]
        schedule.reorder(*outer, *reduction, lane)
        schedule.vectorize(lane)
    fused = schedule.fuse(*outer)
    if block.iterations >= SMALLEST_PARALLEL:
        schedule.parallel(fused)
    initial = schedule.decompose_reduction(block.handle, reduction[0])
    if width is not None:
        schedule.vectorize(schedule.get_loops(initial)[-1])
