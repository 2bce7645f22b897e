"""Depthwise convolution over blocked channels: a row of pixels of one channel block in registers."""

from __future__ import annotations

from tvm import tirx

from schedules.blocks import new_schedule
from schedules.cpu.contraction import LoopRoles, Tiling, find_parts, schedule_contraction
from schedules.cpu.register_tile import dividing_tile
from schedules.traits import Traits

FAMILY = "depthwise_conv2d_blocked"


def schedule_depthwise_conv2d(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Anchor iterators: n, channel block, h, w, lane | kh, kw."""
    schedule = new_schedule(function)
    parts = find_parts(schedule, FAMILY)
    if parts is None:
        return None
    extents = parts.anchor.extents
    tiling = Tiling(
        tile=dividing_tile(extents[3], 1, traits), chunk=None, group=1, blocks_outermost=True, unroll=extents[-1]
    )
    roles = LoopRoles(batch=(0,), blocks=1, height=2, rows=3, lanes=4, reduction=(5, 6))
    schedule_contraction(schedule, parts, roles, tiling, traits)
    return schedule.mod["main"]
