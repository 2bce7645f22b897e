"""Direct convolution over blocked channels: one row of output pixels times one or more channel blocks in registers.

Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from schedules.blocks import new_schedule
from schedules.cpu.contraction import LoopRoles, Tiling, find_parts, schedule_contraction
from schedules.cpu.register_tile import dividing_tile, divisors
from schedules.traits import Traits

FAMILY = "conv2d_blocked"
# Weights below this stay in the second-level cache of one core next to a few rows of the image: then threads share rows
# of the image and each reads all weights; above, threads share channels and each reads the whole image.
LARGEST_SHARED_WEIGHTS_BYTES = 768 * 1024

# Weights of one tile of channels above this leave the first-level cache between two tiles of pixels ...
LARGEST_ONE_PASS_BYTES = 80 * 1024
# ... so they come in chunks of this, next to the sums of a group of rows of at most that.
CHUNK_BYTES = 20 * 1024
GROUP_BYTES = 16 * 1024
SMALLEST_UNITS = 8
SMALLEST_REUSE = 4
SMALLEST_IMAGE_IN_PARTS_BYTES = 512 * 1024
PADDED_ROWS_BYTES = 512 * 1024


def schedule_conv2d(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Anchor iterators: n, channel block, h, w, lane | input channel block, kh, kw[, input lane]."""
    schedule = new_schedule(function)
    parts = find_parts(schedule, FAMILY)
    if parts is None:
        return None
    extents = parts.anchor.extents
    padded = parts.preparation[0].extents if len(parts.preparation) == 1 else None
    reduction = tuple(range(5, len(extents)))
    roles = LoopRoles(batch=(0,), blocks=1, height=2, rows=3, lanes=4, reduction=reduction)
    schedule_contraction(schedule, parts, roles, choose_tiling(extents, padded, traits), traits)
    return schedule.mod["main"]


def choose_tiling(extents: tuple[int, ...], padded: tuple[int, ...] | None, traits: Traits) -> Tiling:
    """Sizes for an anchor of these extents; `Tiling` says what they mean."""
    tile = dividing_tile(extents[3], extents[1], traits)
    lanes, channels, window = extents[4], extents[5], prod(extents[6:])
    step_bytes = 4 * lanes * tile.blocks * window
    weights_bytes = 4 * lanes * extents[1] * channels * window
    chunk = None
    group = 1
    if step_bytes * channels > LARGEST_ONE_PASS_BYTES:
        fitting = [divisor for divisor in divisors(channels) if divisor * step_bytes <= CHUNK_BYTES]
        chunk = max(fitting, default=1)
        row_bytes = 4 * lanes * tile.blocks * extents[3]
        units = extents[0] * extents[1] // tile.blocks
        group = max(
            (
                rows
                for rows in divisors(extents[2])
                if rows * row_bytes <= GROUP_BYTES and units * (extents[2] // rows) >= SMALLEST_UNITS
            ),
            default=1,
        )
        if group * extents[3] // tile.rows < SMALLEST_REUSE:
            chunk, group = None, 1
    blocks_outermost = weights_bytes > LARGEST_SHARED_WEIGHTS_BYTES
    rows = None if padded is None or chunk is not None or blocks_outermost else _padded_rows(extents, padded)
    return Tiling(
        tile=tile,
        chunk=chunk,
        group=rows or group,
        blocks_outermost=blocks_outermost,
        prepare_inside=rows is not None,
        unroll=4 if extents[-1] % 4 == 0 else 1,
    )


def _padded_rows(extents: tuple[int, ...], padded: tuple[int, ...]) -> int | None:
    """How many rows of output to pad the image for at once; None to pad all of a small image before.

    A padded image that leaves the second-level cache costs a pass through memory: 10 % of VGG-16's second layer.
    """
    row_bytes = 4 * prod(padded[1:]) // padded[2]
    if row_bytes * padded[2] < SMALLEST_IMAGE_IN_PARTS_BYTES:
        return None
    window, height = extents[6], extents[2]
    stride = max((padded[2] - window) // max(height - 1, 1), 1)
    fitting = [
        rows
        for rows in divisors(height)
        if ((rows - 1) * stride + window) * row_bytes <= PADDED_ROWS_BYTES
        and extents[0] * height // rows >= SMALLEST_UNITS
    ]
    best = max(fitting, default=1)
    return best if best > 1 else None
