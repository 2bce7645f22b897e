"""Schedule functions that only move or map elements: arithmetic, transposes, concatenation, gathers, padding, casts.

Threads share the outer loops; the innermost loop is vectorized. The fallback, correct for every PrimFunc, only shares
the outer loops of each block.
"""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV

from schedules.blocks import Block, inline_into_outputs, new_schedule
from schedules.traits import Traits

# Mapping this many elements takes 3 microseconds on one core, which is less than waking the threads.
SMALLEST_PARALLEL = 16384


def schedule_elementwise(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule a function without reductions: inline intermediate blocks, make each output one parallel vector loop."""
    schedule = new_schedule(function)
    remaining = inline_into_outputs(schedule, function)
    if remaining is None:
        return None
    for block in remaining:
        schedule_spatial_block(schedule, block, traits)
    return schedule.mod["main"]


def schedule_spatial_block(schedule: s_tir.Schedule, block: Block, traits: Traits) -> None:
    """Make a block's outer loops parallel and vectorize the innermost."""
    loops = schedule.get_loops(block.handle)
    outer, lane = split_vector(schedule, loops, traits)
    if lane is None:
        outer = loops[:-1]
    if outer and block.iterations >= SMALLEST_PARALLEL:
        schedule.parallel(schedule.fuse(*outer))
    if lane is not None:
        schedule.vectorize(lane)


def split_vector(schedule: s_tir.Schedule, loops: list[LoopRV], traits: Traits) -> tuple[list[LoopRV], LoopRV | None]:
    """Split a vector loop off the innermost loop; return the other loops and it, or None if vectors do not divide."""
    width = vector_width(int(schedule.get(loops[-1]).extent), traits) if loops else None
    if width is None:
        return loops, None
    outer, lane = schedule.split(loops[-1], [None, width])
    return [*loops[:-1], outer], lane


def vector_width(extent: int, traits: Traits) -> int | None:
    """The widest power of two up to one vector that divides ``extent``; None below half a vector: LLVM does better."""
    for width in (traits.lanes, traits.lanes // 2):
        if width > 1 and extent % width == 0:
            return width
    return None


def schedule_fallback(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Make each block's outer loops parallel; blocks where this fails (scans, scatters, symbolic shapes) are kept."""
    schedule = new_schedule(function)
    try:
        children = schedule.get_child_blocks(schedule.get_sblock("root"))
    except Exception:
        return None
    for block in children:
        attempt = schedule.copy()
        try:
            _parallel(attempt, block)
        except Exception:  # noqa: S112  (TVM has one error class; the block simply stays serial)
            continue
        schedule = attempt
    return schedule.mod["main"]


def _parallel(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> None:
    loops = schedule.get_loops(block)
    iterators = schedule.get(block).iter_vars
    if len(loops) != len(iterators):
        return
    spatial: list[s_tir.schedule.LoopRV] = []
    iterations = 1
    for loop, iterator in zip(loops, iterators, strict=True):
        extent = schedule.get(loop).extent
        iterations *= int(extent) if isinstance(extent, tirx.IntImm) else SMALLEST_PARALLEL
        if iterator.iter_type == tirx.IterVar.DataPar and len(spatial) == loops.index(loop):
            spatial.append(loop)
    if spatial and iterations >= SMALLEST_PARALLEL:
        schedule.parallel(schedule.fuse(*spatial))
