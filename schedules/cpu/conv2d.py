"""Direct convolution over blocked channels: one row of output pixels times one or more channel blocks in registers.

Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.
"""

from __future__ import annotations

from tvm import tirx

from schedules.blocks import new_schedule
from schedules.cpu.contraction import LoopRoles, find_parts, schedule_contraction
from schedules.cpu.register_tile import dividing_tile
from schedules.traits import Traits

FAMILY = "conv2d_blocked"
# Weights below this stay in the second-level cache of one core next to a few rows of the image: then threads share rows
# of the image and each reads all weights; above, threads share channels and each reads the whole image.
LARGEST_SHARED_WEIGHTS_BYTES = 768 * 1024


def schedule_conv2d(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Anchor iterators: n, channel block, h, w, lane | input channel block, kh, kw[, input lane]."""
    schedule = new_schedule(function)
    parts = find_parts(schedule, FAMILY)
    if parts is None:
        return None
    extents = parts.anchor.extents
    tile = dividing_tile(extents[3], extents[1], traits)
    weights_bytes = 4 * extents[1] * extents[4]
    for extent in extents[5:]:
        weights_bytes *= extent
    roles = LoopRoles(blocks=1, rows=3, lanes=4, outer=(0, 2), reduction=tuple(range(5, len(extents))))
    schedule_contraction(
        schedule,
        parts,
        roles,
        tile,
        traits,
        blocks_outermost=weights_bytes > LARGEST_SHARED_WEIGHTS_BYTES,
        unroll_innermost=4 if extents[-1] % 4 == 0 else 1,
    )
    return schedule.mod["main"]
