"""Schedule sums, means and extremes of all elements: many blocks of threads reduce parts, one combines the results.

    kernel of all blocks:   each thread reduces elements that are as far apart as there are threads
    kernel of one block:    its threads reduce those results, and then combine their own results

If one block of threads reduces the elements as fast, there is only the second kernel. Blocks that follow use one thread
per element.
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
"""Elements that one block of threads reduces in about the time needed to start a second kernel."""
SHORTEST_PART = 8 * THREADS


def schedule_whole_reduction(function: tirx.PrimFunc, target: Target, shortest: int = 0) -> tirx.PrimFunc | None:
    """Schedule functions whose reductions all cover all elements, if the longest has at least ``shortest`` elements."""
    schedule = new_schedule(in_loops(function))
    remaining = inline_between(schedule, function)
    reductions = [block for block in remaining or () if block.is_reduction]
    if not reductions or any(prod(block.extents[: block.spatial]) != 1 for block in reductions):
        return None
    if max(block.iterations for block in reductions) < shortest:
        return None
    processors = gpu_of(target).processors
    for block in remaining or ():
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
        if len(block.statement.writes) == 1:  # argmax and argmin write two buffers, which registers cannot hold
            schedule.reverse_compute_at(schedule.cache_write(of_parts, 0, "local"), thread)
        loop = schedule.get_loops(block.handle)[-1]
    _, thread = schedule.split(loop, [None, threads])
    schedule.bind(thread, "threadIdx.x")
    schedule.bind(schedule.add_unit_loop(schedule.get_loops(block.handle)[0]), "blockIdx.x")


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
