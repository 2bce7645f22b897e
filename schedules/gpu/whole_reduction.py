"""Sums, means and extremes of all elements: blocks of threads for parts, and one for what these found.

    kernel of all blocks:   each thread reduces elements that are as far apart as there are threads
    kernel of one block:    its threads reduce what those found, and then together what each of them has

A reduction whose elements one block of threads gets through as fast has the second step alone. What follows is computed
by one thread an element.
"""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.blocks import Block, inline_between, new_schedule
from schedules.gpu.default_rules import in_loops
from schedules.gpu.elementwise import bind_elements
from schedules.gpu.tile import MOST_THREADS, gpu_of

THREADS = 256
LONG = 1 << 14
"""Elements that one block of threads reduces in about the time that a second kernel takes to start."""
SHORTEST_PART = 8 * THREADS


def schedule_whole_reduction(function: tirx.PrimFunc, target: Target, shortest: int = 0) -> tirx.PrimFunc | None:
    """Functions all of whose reductions are of all elements, the longest of them of at least ``shortest``."""
    schedule = new_schedule(in_loops(function))
    kept = inline_between(schedule, function)
    reductions = [block for block in kept or () if block.is_reduction]
    if not reductions or any(prod(block.extents[: block.spatial]) != 1 for block in reductions):
        return None
    if max(block.iterations for block in reductions) < shortest:
        return None
    processors = gpu_of(target).processors
    for block in kept or ():
        if block.is_reduction:
            _reduce(schedule, block, processors)
        else:
            bind_elements(schedule, block.handle)
    return schedule.mod["main"]


def _reduce(schedule: s_tir.Schedule, block: Block, processors: int) -> None:
    loop = schedule.fuse(*schedule.get_loops(block.handle)[block.spatial :])
    threads = min(MOST_THREADS, _power_of_two(block.iterations))
    if block.iterations >= LONG:
        parts = _power_of_two(min(processors, block.iterations // SHORTEST_PART))
        _, loop = schedule.split(loop, [None, parts * THREADS])
        of_parts = schedule.rfactor(loop, 0)
        *_, steps, thread = schedule.get_loops(of_parts)
        schedule.reorder(thread, steps)
        part, thread = schedule.split(thread, [parts, THREADS])
        schedule.bind(part, "blockIdx.x")
        schedule.bind(thread, "threadIdx.x")
        if len(block.statement.writes) == 1:  # what finds places writes two, and cannot have them in registers
            schedule.reverse_compute_at(schedule.cache_write(of_parts, 0, "local"), thread)
        loop = schedule.get_loops(block.handle)[-1]
    _, thread = schedule.split(loop, [None, threads])
    schedule.bind(thread, "threadIdx.x")
    schedule.bind(schedule.add_unit_loop(schedule.get_loops(block.handle)[0]), "blockIdx.x")


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
