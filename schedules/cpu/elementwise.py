"""Everything that only moves or maps elements: arithmetic, transposes, concatenation, gathers, padding, casts.

Threads share the outer loops, vectors take the innermost one.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from tvm_split.schedules.blocks import Block, inline_into_outputs, new_schedule
from tvm_split.schedules.traits import Traits

# Mapping this many elements takes 3 microseconds on one core: less than waking the threads.
SMALLEST_PARALLEL = 16384


def schedule_elementwise(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """A function without reductions: intermediate blocks are inlined, each output is one parallel vector loop."""
    schedule = new_schedule(function)
    kept = inline_into_outputs(schedule, function)
    if kept is None:
        return None
    for block in kept:
        schedule_spatial_block(schedule, block, traits)
    return schedule.mod["main"]


def schedule_spatial_block(schedule: s_tir.Schedule, block: Block, traits: Traits) -> None:
    """Parallel over the outer loops, vectors over the innermost."""
    loops = schedule.get_loops(block.handle)
    if not loops:
        return
    innermost = block.extents[-1]
    lane = None
    outer = loops[:-1]
    width = vector_width(innermost, traits)
    if width is not None:
        outer_lane, lane = schedule.split(loops[-1], [None, width])
        outer = [*outer, outer_lane]
    elif len(loops) == 1:
        outer = []
    if outer and block.iterations >= SMALLEST_PARALLEL:
        schedule.parallel(schedule.fuse(*outer))
    if lane is not None:
        schedule.vectorize(lane)


def vector_width(extent: int, traits: Traits) -> int | None:
    """The widest power of two up to one vector that divides ``extent``; None below half a vector: LLVM does better."""
    for width in (traits.lanes, traits.lanes // 2):
        if width > 1 and extent % width == 0:
            return width
    return None
