"""Schedule depthwise convolutions and pooling windows, which are small sums: one output per thread.

Neighbouring threads take neighbouring columns of the image, so that the loads of a window's element are contiguous.
Windows overlap in the first-level cache. The sum stays in a register until all following operations are applied.
"""

from math import prod

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.blocks import Block, anchors_of, blocks_of, finished_block, new_schedule
from schedules.gpu.default_rules import bind_elements, uses
from schedules.gpu.tile import DEPTHWISE

LARGEST_WINDOW = 64
"""The largest window that one thread sums alone; longer sums are reductions, which threads share."""


def schedule_depthwise_conv2d(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Schedule a convolution with one input channel per output, from its anchor; None for other functions."""
    if DEPTHWISE not in anchors_of(function):
        return None
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    return None if blocks is None else _windows(schedule, blocks)


def schedule_pooling(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Schedule ``[pad ->] one short reduction [-> elementwise ...]`` over a sliding window; None for all others."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None:
        return None
    reductions = [block for block in blocks if block.is_reduction]
    if len(reductions) != 1:
        return None
    anchor = reductions[0]
    if prod(anchor.extents[anchor.spatial :]) > LARGEST_WINDOW or not _slides(anchor):
        return None
    return _windows(schedule, blocks)


def _windows(schedule: s_tir.Schedule, blocks: list[Block]) -> tirx.PrimFunc | None:
    position = next(index for index, block in enumerate(blocks) if block.is_reduction)
    anchor, tail = blocks[position], blocks[position + 1 :]
    if anchor.spatial == 0 or any(block.is_reduction for block in tail):
        return None
    for block in blocks[:position]:
        schedule.compute_inline(block.handle)
    finished = finished_block(schedule, anchor, tail)
    if finished is None:
        return None
    thread = bind_elements(schedule, finished)
    schedule.compute_at(anchor.handle, thread, preserve_unit_loops=True)
    schedule.set_scope(anchor.handle, 0, "local")
    reduction = schedule.get_loops(anchor.handle)[-(len(anchor.extents) - anchor.spatial) :]
    # The sum's start stays a condition on the first element, which unrolling resolves. A schedule cannot move it out if
    # an image's rows do not end with a block of threads.
    for loop in reduction:
        schedule.unroll(loop)
    return schedule.mod["main"]


def _slides(block: Block) -> bool:
    """Return whether an index of what the block reads depends on both a spatial and a reduction iterator."""
    spatial = [iterator.var for iterator in block.statement.iter_vars[: block.spatial]]
    reduction = [iterator.var for iterator in block.statement.iter_vars[block.spatial :]]
    indices = [bounds.min for region in block.statement.reads for bounds in region.region]
    return any(
        any(uses(index, variable) for variable in spatial) and any(uses(index, variable) for variable in reduction)
        for index in indices
    )
