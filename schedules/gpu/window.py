"""Small sums for each output: depthwise convolutions and pooling windows, one output a thread.

Neighbouring threads take neighbouring columns of the image, so that the loads of a window's element are side by side;
windows overlap in the first-level cache. The sum stays in a register until everything behind it is applied.
"""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.blocks import Block, blocks_of, inline_into_last, new_schedule
from schedules.gpu.elementwise import bind_elements
from schedules.gpu.families import DEPTHWISE

LARGEST_WINDOW = 64
"""Elements of a window that one thread adds up alone; longer sums are reductions, which threads share."""
SMALLEST_IMAGE = 1024
"""Fewer outputs leave the GPU idle with one thread each."""


def schedule_depthwise_conv2d(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """The anchor that the legalization of convolutions makes where each output has one input channel."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or not any(block.anchor == DEPTHWISE for block in blocks):
        return None
    return _windows(schedule, blocks)


def schedule_pooling(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """``[pad ->] one short reduction [-> elementwise ...]`` over many outputs, neighbours along a spatial axis."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None:
        return None
    reductions = [block for block in blocks if block.is_reduction]
    if len(reductions) != 1:
        return None
    outputs = prod(reductions[0].extents[: reductions[0].spatial])
    if outputs < SMALLEST_IMAGE or reductions[0].iterations // outputs > LARGEST_WINDOW:
        return None
    return _windows(schedule, blocks)


def _windows(schedule: s_tir.Schedule, blocks: list[Block]) -> tirx.PrimFunc | None:
    position = next(index for index, block in enumerate(blocks) if block.is_reduction)
    anchor, tail = blocks[position], blocks[position + 1 :]
    if anchor.spatial == 0 or any(block.is_reduction for block in tail):
        return None
    for block in blocks[:position]:
        schedule.compute_inline(block.handle)
    if tail:
        last = inline_into_last(schedule, tail)
        if last.extents != anchor.extents[: anchor.spatial]:
            return None
        finished = last.handle
    else:
        finished = schedule.cache_write(anchor.handle, 0, "local")
    thread = bind_elements(schedule, finished, vectorize=False)
    schedule.compute_at(anchor.handle, thread, preserve_unit_loops=True)
    schedule.set_scope(anchor.handle, 0, "local")
    reduction = schedule.get_loops(anchor.handle)[-(len(anchor.extents) - anchor.spatial) :]
    for loop in reduction:
        schedule.unroll(loop)
    schedule.decompose_reduction(anchor.handle, reduction[0])
    return schedule.mod["main"]
