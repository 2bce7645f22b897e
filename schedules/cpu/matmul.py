"""Matrix multiplication with the right operand packed in column blocks (``[N / lanes, K, lanes]``)."""

from __future__ import annotations

from tvm import tirx

from schedules.blocks import new_schedule
from schedules.cpu.contraction import LoopRoles, find_parts, schedule_contraction
from schedules.cpu.register_tile import dividing_tile
from schedules.traits import Traits

FAMILY = "matmul_packed"


def schedule_matmul(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Anchor iterators: batch ..., column block, m, lane | k."""
    schedule = new_schedule(function)
    parts = find_parts(schedule, FAMILY)
    if parts is None:
        return None
    extents = parts.anchor.extents
    count = len(extents)
    tile = dividing_tile(extents[-3], extents[-4], traits)
    roles = LoopRoles(
        blocks=count - 4, rows=count - 3, lanes=count - 2, outer=tuple(range(count - 4)), reduction=(count - 1,)
    )
    schedule_contraction(
        schedule,
        parts,
        roles,
        tile,
        traits,
        blocks_outermost=False,
        unroll_innermost=4 if extents[-1] % 4 == 0 else 1,
    )
    return schedule.mod["main"]
