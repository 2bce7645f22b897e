"""Reductions that are no contraction: softmax, norms, mean, sums.

All stages of a row (its maximum, its sum of exponentials, its quotient) run while the row is in the first-level cache;
threads share the rows.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from tvm_split.schedules.blocks import Block, blocks_of, new_schedule
from tvm_split.schedules.cpu.elementwise import SMALLEST_PARALLEL, vector_width
from tvm_split.schedules.traits import Traits


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
    while rows < common and all(block.extents[rows] == last.extents[rows] for block in blocks if block.is_reduction):
        rows += 1
    if last.is_reduction and rows == last.spatial:
        return _single(schedule, blocks, traits)
    if rows == 0:
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
    extents = [int(schedule.get(loop).extent) for loop in spatial]
    if not spatial or extents[-1] == 1:
        return
    width = vector_width(extents[-1], traits)
    if width is None:
        return
    outer, lane = schedule.split(spatial[-1], [None, width])
    if reduction:
        schedule.reorder(*spatial[:-1], outer, *reduction, lane)
    schedule.vectorize(lane)
    if reduction:
        initial = schedule.decompose_reduction(block.handle, reduction[0])
        schedule.vectorize(schedule.get_loops(initial)[-1])


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
