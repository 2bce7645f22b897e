"""Depthwise convolution over blocked channels: a row of pixels of one channel block in registers."""

from __future__ import annotations

from tvm import tirx

from schedules.blocks import new_schedule
from schedules.cpu.contraction import LoopRoles, Tiling, find_parts, schedule_contraction
from schedules.cpu.register_tile import dividing_tile, divisors
from schedules.traits import Traits

FAMILY = "depthwise_conv2d_blocked"
GROUP_BYTES = 32 * 1024


def schedule_depthwise_conv2d(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Anchor iterators: n, channel block, h, w, lane | kh, kw."""
    schedule = new_schedule(function)
    parts = find_parts(schedule, FAMILY)
    if parts is None:
        return None
    extents = parts.anchor.extents
    # Padding the whole image first costs as much as the convolution, which does only nine multiply-adds an element.
    row_bytes = 4 * extents[3] * extents[4]
    group = max((rows for rows in divisors(extents[2]) if rows * row_bytes <= GROUP_BYTES), default=1)
    tiling = Tiling(
        tile=dividing_tile(extents[3], 1, traits),
        chunk=None,
        group=group,
        prepare_inside=True,
        blocks_outermost=True,
        unroll=extents[-1],
    )
    roles = LoopRoles(batch=(0,), blocks=1, height=2, rows=3, lanes=4, reduction=(5, 6))
    schedule_contraction(schedule, parts, roles, tiling, traits)
    return schedule.mod["main"]
