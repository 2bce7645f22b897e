"""Schedule sums, means and extremes of all elements: one block of threads reduces them and combines the results.

Blocks that follow use one thread per element.
"""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.blocks import Block, inline_between, new_schedule
from schedules.gpu.default_rules import in_loops
from schedules.gpu.elementwise import bind_elements
from schedules.gpu.tile import MOST_THREADS


def schedule_whole_reduction(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Schedule functions whose reductions all cover all elements."""
    schedule = new_schedule(in_loops(function))
    remaining = inline_between(schedule, function)
    reductions = [block for block in remaining or () if block.is_reduction]
    if not reductions or any(prod(block.extents[: block.spatial]) != 1 for block in reductions):
        return None
    for block in remaining or ():
        if block.is_reduction:
            _reduce(schedule, block)
        else:
            bind_elements(schedule, block.handle)
    return schedule.mod["main"]


def _reduce(schedule: s_tir.Schedule, block: Block) -> None:
    loop = schedule.fuse(*schedule.get_loops(block.handle)[block.spatial :])
    threads = min(MOST_THREADS, 1 << (block.iterations - 1).bit_length())
    _, thread = schedule.split(loop, [None, threads])
    schedule.bind(thread, "threadIdx.x")
    schedule.bind(schedule.add_unit_loop(schedule.get_loops(block.handle)[0]), "blockIdx.x")
