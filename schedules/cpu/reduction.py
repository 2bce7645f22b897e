"""Schedule reductions that are not contractions: image windows, softmax, norms, mean, sums.

A window, over blocked or plain channels, is summed within one vector of outputs. In other reductions all stages of a
row (its maximum, its sum of exponentials, its quotient) run while the row is in the first-level cache. Threads share
the rows.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from schedules.blocks import Block, blocks_of, finished_block, new_schedule
from schedules.cpu.elementwise import SMALLEST_PARALLEL, schedule_spatial_block, split_vector
from schedules.traits import Traits


def schedule_pooling(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule ``[pad ->] one reduction [-> elementwise ...]`` with at least one spatial axis: windows, sums, means."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or sum(block.is_reduction for block in blocks) != 1:
        return None
    position = next(index for index, block in enumerate(blocks) if block.is_reduction)
    anchor, tail = blocks[position], blocks[position + 1 :]
    if anchor.spatial == 0:
        return None
    for block in blocks[:position]:
        if _pads_innermost_axis(block):
            schedule_spatial_block(schedule, block, traits)
        else:
            schedule.compute_inline(block.handle)
    finished = finished_block(schedule, anchor, tail)
    if finished is None:
        return None
    outer, vector = split_vector(schedule, schedule.get_loops(finished), traits)
    if vector is not None:
        schedule.vectorize(vector)
    fused = schedule.fuse(*outer)
    if anchor.iterations >= SMALLEST_PARALLEL:
        schedule.parallel(fused)
    schedule.compute_at(anchor.handle, fused, preserve_unit_loops=True)
    schedule.set_scope(anchor.handle, 0, "local")
    loops = schedule.get_loops(anchor.handle)
    reduction = loops[-(len(anchor.extents) - anchor.spatial) :]
    if vector is not None:
        lane = loops[-len(reduction) - 1]
        schedule.reorder(*reduction, lane)
        schedule.vectorize(lane)
    initial = schedule.decompose_reduction(anchor.handle, reduction[0])
    if vector is not None:
        schedule.vectorize(schedule.get_loops(initial)[-1])
    return schedule.mod["main"]


def _pads_innermost_axis(block: Block) -> bool:
    """Whether the block pads the innermost axis, so that one vector has lanes inside and outside the image.

    If such a block is inlined, each lane becomes a branch. Measured on a grouped 3 x 3 convolution of 128 plain
    channels, 56 x 56: 9.4 ms inlined, 2.0 ms as a separate block.
    """
    reads = block.statement.reads
    return len(reads) == 1 and int(reads[0].source.shape[-1]) != block.output_shape[-1]


def schedule_reduction(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule all blocks under the last block's outer loops; the function must have one output."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or not any(block.is_reduction for block in blocks):
        return None
    last = blocks[-1]
    if last.is_reduction and sum(block.is_reduction for block in blocks) == 1:
        # This reduces all elements to one value; `schedule_pooling` takes sums with more than one result.
        for block in blocks[:-1]:
            schedule.compute_inline(block.handle)
        return schedule.mod["main"]
    common = min(last.spatial, *(block.spatial for block in blocks if block.is_reduction))
    # A reduction's kept dimensions of extent 1 are its last iterators; they are not loops to share.
    rows = 0
    while rows < common and all(block.extents[rows] == last.extents[rows] for block in blocks if block.is_reduction):
        rows += 1
    if rows == 0 or (last.is_reduction and rows == last.spatial):
        return None
    row = schedule.fuse(*schedule.get_loops(last.handle)[:rows])
    remaining = [last]
    for block in reversed(blocks[:-1]):
        if block.is_reduction or len(schedule.get_consumers(block.handle)) > 1 or _precedes_reduction(schedule, block):
            schedule.compute_at(block.handle, row, preserve_unit_loops=True)
            remaining.append(block)
        else:
            schedule.compute_inline(block.handle)
    if sum(block.iterations for block in blocks) >= SMALLEST_PARALLEL:
        schedule.parallel(row)
    for block in remaining:
        _vectorize_in_row(schedule, block, traits)
    return schedule.mod["main"]


def _precedes_reduction(schedule: s_tir.Schedule, block: Block) -> bool:
    """Whether a block is stored for later stages, not recomputed in each: exponentials and reciprocals are costly."""
    return block.iterations == 1 or bool(schedule.get_producers(block.handle))


def _vectorize_in_row(schedule: s_tir.Schedule, block: Block, traits: Traits) -> None:
    """Vectorize the rest of the block inside the row loop, where whole vectors fit."""
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
