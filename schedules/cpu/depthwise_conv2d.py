"""Depthwise convolution over blocked channels: a row of pixels of one channel block in registers."""

from __future__ import annotations

from tvm_split.schedules.cpu.contraction import LoopRoles, Tiling
from tvm_split.schedules.cpu.register_tile import dividing_tile, divisors
from tvm_split.schedules.cpu.tiling_space import contraction_template
from tvm_split.schedules.traits import Traits

FAMILY = "depthwise_conv2d_blocked"
GROUP_BYTES = 32 * 1024


def roles_of(extents: tuple[int, ...]) -> LoopRoles:
    """Anchor iterators: n, channel block, h, w, lane | kh, kw."""
    return LoopRoles(batch=(0,), blocks=1, height=2, rows=3, lanes=4, reduction=(5, 6))


def choose_tiling(extents: tuple[int, ...], traits: Traits) -> Tiling:
    """Sizes for an anchor of these extents; `Tiling` says what they mean."""
    # Padding the whole image first costs as much as the convolution, which does only nine multiply-adds an element.
    row_bytes = 4 * extents[3] * extents[4]
    group = max((rows for rows in divisors(extents[2]) if rows * row_bytes <= GROUP_BYTES), default=1)
    return Tiling(
        tile=dividing_tile(extents[3], 1, traits),
        chunk=None,
        group=group,
        prepare_inside=True,
        blocks_outermost=True,
        unroll=extents[-1],
    )


DEPTHWISE_CONV2D = contraction_template("depthwise_conv2d", FAMILY, roles_of, choose_tiling, chunks=False)
