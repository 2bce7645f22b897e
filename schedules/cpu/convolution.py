"""Lower relax.nn.conv2d over blocked channels to TE, and define the templates of its dense and depthwise kernels.

Direct convolution: one row of output pixels times one or more channel blocks in registers (Georganas et al., Anatomy of
High-Performance Deep Learning Convolutions on SIMD Architectures, 2018). Edges are padded to whole register tiles.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from schedules.blocks import ANCHOR
from schedules.cpu.contraction import (
    ALL_AT_ONCE,
    BLOCKS_OUTSIDE,
    PREPARE_INSIDE,
    ROWS_OUTSIDE,
    LoopRoles,
    Tiling,
    contraction_template,
)
from schedules.cpu.register_tile import SMALLEST_ACCUMULATORS, RegisterTile, dividing_tile, divisors, padded_extent
from schedules.relax_tools import FUSABLE, accumulator_dtype, default_convolution, window_of
from schedules.traits import Traits

DENSE, DEPTHWISE = "conv2d_blocked", "depthwise_conv2d_blocked"
# Weights smaller than this stay in a core's second-level cache with a few rows of the image. Then threads share the
# image's rows, and each reads all weights. Otherwise threads share the channels, and each reads the whole image.
LARGEST_SHARED_WEIGHTS_BYTES = 768 * 1024

# If the weights of one tile of channels exceed this, they leave the first-level cache between two tiles of pixels ...
LARGEST_ONE_PASS_BYTES = 80 * 1024
# ... so they are read in chunks of at most CHUNK_BYTES, next to the sums of a group of rows of at most GROUP_BYTES.
CHUNK_BYTES = 20 * 1024
GROUP_BYTES = 16 * 1024
SMALLEST_UNITS = 8
SMALLEST_REUSE = 4
LARGEST_NEAR_GROUP = 4
DEPTHWISE_GROUP_BYTES = 16 * 1024
# Measured: 28 pixels at once take 1.04 to 1.16 times as long as 14, with their sums and weights in 32 registers.
LARGEST_DEPTHWISE_ROWS = 14


def legalize_conv2d(builder: BlockBuilder, call: relax.Call, traits: Traits) -> relax.Expr:
    """Lower conv2d in the layouts that `schedules.cpu.blocked_channels` chooses; other layouts are left to TVM."""
    data, weight = call.args
    if not str(call.attrs.out_layout).endswith("c"):
        return default_convolution(builder, call)
    window = {**window_of(call), "out_dtype": str(call.ty.dtype)}
    groups = int(call.attrs.groups)
    # Depthwise weights have one input channel per group and no input block: OIHW16o.
    depthwise = groups > 1 and len(weight.ty.shape) == 5
    compute = partial(_convolution, **window, traits=traits, groups=groups, depthwise=depthwise)
    name = "depthwise_conv2d" if depthwise else "conv2d"
    return builder.call_te(compute, data, weight, primfunc_name_hint=name, primfunc_attrs=FUSABLE)


def _convolution(
    data: te.Tensor,
    weight: te.Tensor,
    strides: list[int],
    padding: list[int],
    dilation: list[int],
    out_dtype: str,
    traits: Traits,
    groups: int,
    depthwise: bool,
) -> te.Tensor:
    """Return the convolution in TE, over blocked output channels.

    Data is [N, I/i, H, W, i] or [N, I, H, W]; weight is [O/o, I/i, kh, kw, i, o] or [O/o, I, kh, kw, o]. With groups,
    the weight's I is that of one group, and blocks do not cross groups. With ``depthwise`` it is 1.
    """
    batch, sizes = int(data.shape[0]), [int(extent) for extent in data.shape[2:4]]
    blocks, channels, *kernel = (int(extent) for extent in weight.shape[:4])
    lanes = int(weight.shape[-1])
    reach = [step * (extent - 1) + 1 for step, extent in zip(dilation, kernel, strict=True)]
    padded = [size + padding[axis] + padding[axis + 2] for axis, size in enumerate(sizes)]
    out_h, out_w = ((padded[axis] - reach[axis]) // strides[axis] + 1 for axis in (0, 1))
    # Without the sums of many channels, storing only a part of a tile takes longer than a smaller tile.
    is_divided = depthwise and dividing_tile(out_w, 1, traits).rows >= SMALLEST_ACCUMULATORS
    tiled_w = out_w if is_divided else padded_extent(out_w, 1 if depthwise else blocks, traits)
    needed = [(extent - 1) * strides[axis] + reach[axis] for axis, extent in enumerate((out_h, tiled_w))]
    source = _padded(data, padding, *needed) if any(padding) else data
    dtype = accumulator_dtype(out_dtype)
    reduce_h, reduce_w = (te.reduce_axis((0, extent), name=f"k{'hw'[axis]}") for axis, extent in enumerate(kernel))
    reduce_block = [] if depthwise else [te.reduce_axis((0, channels), name="ic")]
    reduce_lane = [] if depthwise or len(data.shape) == 4 else [te.reduce_axis((0, int(data.shape[4])), name="il")]

    def element(n: Any, o: Any, h: Any, w: Any, lane: Any) -> Any:
        row = h * strides[0] + reduce_h * dilation[0]
        # Without padding the columns after the last repeat it; they are never stored.
        w = w if any(padding) or tiled_w == out_w else tirx.min(w, out_w - 1)
        column = w * strides[1] + reduce_w * dilation[1]
        if depthwise:
            value, factor = source[n, o, row, column, lane], weight[o, 0, reduce_h, reduce_w, lane]
        else:
            (input_block,) = reduce_block
            block = input_block if groups == 1 else o // (blocks // groups) * channels + input_block
            value = source[(n, block, row, column, *reduce_lane)]
            factor = weight[(o, input_block, reduce_h, reduce_w, *reduce_lane, lane)]
        return te.sum(value.astype(dtype) * factor.astype(dtype), [*reduce_block, reduce_h, reduce_w, *reduce_lane])

    name, family = ("depthwise_conv2d", DEPTHWISE) if depthwise else ("conv2d", DENSE)
    product = te.compute((batch, blocks, out_h, tiled_w, lanes), element, name=name, attrs={ANCHOR: family})
    shape = (batch, blocks, out_h, out_w, lanes)
    return te.compute(shape, lambda *index: product[index].astype(out_dtype), name="store")


def _padded(data: te.Tensor, padding: list[int], height: int, width: int) -> te.Tensor:
    """Pad data [N, C, H, W(, c)] with zeros to [N, C, height, width(, c)]; return it unchanged if nothing is added."""
    shape = [int(extent) for extent in data.shape]
    top, left = padding[0], padding[1]
    if (top, left, height, width) == (0, 0, shape[2], shape[3]):
        return data

    def element(n: Any, c: Any, h: Any, w: Any, *lane: Any) -> Any:
        inside = tirx.all(h >= top, h < top + shape[2], w >= left, w < left + shape[3])
        return tirx.if_then_else(inside, data[(n, c, h - top, w - left, *lane)], tirx.const(0, data.dtype))

    return te.compute([*shape[:2], height, width, *shape[4:]], element, name="pad")


def _roles(extents: Sequence[int]) -> LoopRoles:
    """Return the loop roles of an anchor's iterators n, channel block, h, w, lane | [input block, ]kh, kw[, lane]."""
    return LoopRoles(batch=(0,), blocks=1, height=2, rows=3, lanes=4, reduction=tuple(range(5, len(extents))))


def _dense_tiling(extents: tuple[int, ...], traits: Traits) -> Tiling:
    tile = dividing_tile(extents[3], extents[1], traits)
    lanes, channels, window = extents[4], extents[5], prod(extents[6:])
    step_bytes = 4 * lanes * tile.blocks * window
    weights_bytes = 4 * lanes * extents[1] * channels * window
    units = extents[0] * extents[1] // tile.blocks
    groups = [rows for rows in divisors(extents[2]) if units * (extents[2] // rows) >= SMALLEST_UNITS] or [1]
    shares_image = weights_bytes > LARGEST_SHARED_WEIGHTS_BYTES
    # Rows that share a tile's weights give the next weights time to come from memory: 256 to 1024 channels of 14 x 14
    # rise from 173 to 193 GFLOP/s. If all weights stay in cache, the rows should stay nearer, but a few rows together
    # read fewer weights: 256 to 512 channels of 28 x 28 rise from 165 to 178.
    chunk: int | str = ALL_AT_ONCE
    group = groups[-1] if shares_image else max(rows for rows in groups if rows <= LARGEST_NEAR_GROUP)
    if step_bytes * channels > LARGEST_ONE_PASS_BYTES:
        row_bytes = 4 * lanes * tile.blocks * extents[3]
        small = max((rows for rows in groups if rows * row_bytes <= GROUP_BYTES), default=1)
        if small * extents[3] // tile.rows >= SMALLEST_REUSE:
            fitting = [divisor for divisor in divisors(channels) if divisor * step_bytes <= CHUNK_BYTES]
            chunk, group = max(fitting, default=1), small
    order = BLOCKS_OUTSIDE if shares_image else ROWS_OUTSIDE
    return Tiling(str(tile), chunk, group, order, unroll=4 if extents[-1] % 4 == 0 else 1)


def _depthwise_tiling(extents: tuple[int, ...], traits: Traits) -> Tiling:
    # Padding the whole image first takes as long as the convolution, which does only nine multiply-adds per element.
    row_bytes = 4 * extents[3] * extents[4]
    group = max((rows for rows in divisors(extents[2]) if rows * row_bytes <= DEPTHWISE_GROUP_BYTES), default=1)
    rows = dividing_tile(extents[3], 1, traits).rows
    if rows > LARGEST_DEPTHWISE_ROWS and rows % 2 == 0:
        rows //= 2
    tile = str(RegisterTile(rows, 1))
    return Tiling(tile, ALL_AT_ONCE, group, BLOCKS_OUTSIDE, unroll=extents[-1], prepare=PREPARE_INSIDE)


CONV2D = contraction_template("conv2d", DENSE, _roles, _dense_tiling)
DEPTHWISE_CONV2D = contraction_template("depthwise_conv2d", DEPTHWISE, _roles, _depthwise_tiling, chunks=False)
