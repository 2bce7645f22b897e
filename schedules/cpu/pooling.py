"""Pooling windows over blocked or plain channels: one vector of outputs at a time, the window inside."""

from __future__ import annotations

from tvm import tirx

from schedules.blocks import blocks_of, inline_into_last, new_schedule
from schedules.cpu.elementwise import SMALLEST_PARALLEL, vector_width
from schedules.traits import Traits


def schedule_pooling(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """``[pad ->] one reduction [-> elementwise ...]`` over at least one spatial axis: windows, sums, means."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or sum(block.is_reduction for block in blocks) != 1:
        return None
    position = next(index for index, block in enumerate(blocks) if block.is_reduction)
    anchor, tail = blocks[position], blocks[position + 1 :]
    if anchor.spatial == 0:
        return None
    for block in blocks[:position]:
        schedule.compute_inline(block.handle)
    last = inline_into_last(schedule, tail) if tail else anchor
    if tail and (len(last.extents) != anchor.spatial or last.extents != anchor.extents[: anchor.spatial]):
        return None
    loops = schedule.get_loops(last.handle)[: anchor.spatial]
    width = vector_width(anchor.extents[anchor.spatial - 1], traits)
    outer = loops
    if width is not None:
        lane_outer, lane = schedule.split(loops[-1], [None, width])
        outer = [*loops[:-1], lane_outer]
        if tail:
            schedule.vectorize(lane)
    fused = schedule.fuse(*outer)
    if anchor.iterations >= SMALLEST_PARALLEL:
        schedule.parallel(fused)
    if tail:
        schedule.compute_at(anchor.handle, fused, preserve_unit_loops=True)
        schedule.set_scope(anchor.handle, 0, "local")
    all_loops = schedule.get_loops(anchor.handle)
    reduction = all_loops[-(len(anchor.extents) - anchor.spatial) :]
    if width is not None:
        lane = all_loops[-len(reduction) - 1]
        if lane != fused:
            schedule.reorder(*reduction, lane)
            schedule.vectorize(lane)
    initial = schedule.decompose_reduction(anchor.handle, reduction[0])
    if width is not None:
        schedule.vectorize(schedule.get_loops(initial)[-1])
    return schedule.mod["main"]
