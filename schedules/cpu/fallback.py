"""The fallback schedule, correct for every PrimFunc: each block is parallel over its outer spatial loops."""

from __future__ import annotations

from tvm import s_tir, tirx

from schedules.blocks import new_schedule
from schedules.cpu.elementwise import SMALLEST_PARALLEL
from schedules.traits import Traits


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
