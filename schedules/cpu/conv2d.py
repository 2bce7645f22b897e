"""Direct convolution over blocked channels: one row of output pixels times one or more channel blocks in registers.

Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.
"""

from __future__ import annotations

from math import prod

from tvm_split.schedules.cpu.contraction import LoopRoles, Tiling
from tvm_split.schedules.cpu.register_tile import dividing_tile, divisors
from tvm_split.schedules.cpu.tiling_space import contraction_template
from tvm_split.schedules.traits import Traits

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
LARGEST_NEAR_GROUP = 4


def roles_of(extents: tuple[int, ...]) -> LoopRoles:
    """Anchor iterators: n, channel block, h, w, lane | input channel block, kh, kw[, input lane]."""
    return LoopRoles(batch=(0,), blocks=1, height=2, rows=3, lanes=4, reduction=tuple(range(5, len(extents))))


def choose_tiling(extents: tuple[int, ...], traits: Traits) -> Tiling:
    """Sizes for an anchor of these extents; `Tiling` says what they mean."""
    tile = dividing_tile(extents[3], extents[1], traits)
    lanes, channels, window = extents[4], extents[5], prod(extents[6:])
    step_bytes = 4 * lanes * tile.blocks * window
    weights_bytes = 4 * lanes * extents[1] * channels * window
    units = extents[0] * extents[1] // tile.blocks
    groups = [rows for rows in divisors(extents[2]) if units * (extents[2] // rows) >= SMALLEST_UNITS] or [1]
    shares_image = weights_bytes > LARGEST_SHARED_WEIGHTS_BYTES
    # Rows that share a tile's weights give the next ones time to come from memory: 256 to 1024 channels of 14 x 14 rise
    # from 173 to 193 GFLOP/s. Where all weights stay in cache it is the rows that should stay nearer, but a few
    # together read fewer weights: 256 to 512 channels of 28 x 28 rise from 165 to 178.
    chunk, group = None, groups[-1] if shares_image else max(rows for rows in groups if rows <= LARGEST_NEAR_GROUP)
    if step_bytes * channels > LARGEST_ONE_PASS_BYTES:
        row_bytes = 4 * lanes * tile.blocks * extents[3]
        small = max((rows for rows in groups if rows * row_bytes <= GROUP_BYTES), default=1)
        if small * extents[3] // tile.rows >= SMALLEST_REUSE:
            fitting = [divisor for divisor in divisors(channels) if divisor * step_bytes <= CHUNK_BYTES]
            chunk, group = max(fitting, default=1), small
    return Tiling(
        tile=tile,
        chunk=chunk,
        group=group,
        blocks_outermost=shares_image,
        unroll=4 if extents[-1] % 4 == 0 else 1,
    )


CONV2D = contraction_template("conv2d", FAMILY, roles_of, choose_tiling)
