"""Lower Winograd convolution over blocked channels to TE, for groups of rows of tiles.

The blocks are ``pad -> input rows -> input -> product (the anchor) -> sums -> output rows -> output -> store``. A tile
is ``outputs`` x ``outputs`` results of one channel block. A group is ``rows`` x ``columns`` tiles of one image, and
holds all values between the pixels it reads and its results. A group's tiles are padded to whole register tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from schedules.blocks import ANCHOR
from schedules.cpu.register_tile import padded_extent
from schedules.cpu.winograd.transform import TAPS, transformed_input, transformed_output
from schedules.traits import Traits

FAMILY = "winograd"
STAGED = "tvm_split.winograd_staged"
"""Annotation of the anchor: 1 if its three steps are separate loops, 0 if they are one loop over groups."""
COLUMNS = "tvm_split.winograd_columns"
"""Annotation of the anchor: the number of adjacent tiles in a row of a group."""


@dataclass(frozen=True)
class Winograd:
    """The sizes of a Winograd convolution, which a cost rule chooses.

    A tile has ``outputs`` x ``outputs`` results (2 or 4). A group has ``rows`` x ``columns`` tiles of one image. With
    ``staged``, input transform, products and output transform are separate parallel loops; memory holds all images'
    values between them, and a group is an image. Otherwise one parallel loop over groups does all three, and the values
    between them stay in its cache.
    """

    outputs: int
    rows: int
    columns: int
    staged: bool


def winograd_conv2d(
    data: te.Tensor, weight: te.Tensor, padding: list[int], choice: Winograd, traits: Traits
) -> te.Tensor:
    """Convolve data [N, I/i, H, W, i] with a 3 x 3 kernel, stride and dilation 1; the result is [N, O/o, H', W', o].

    ``weight`` is [tile, tile, O/o, I/i, i, o], made by `transformed_kernel`; ``padding`` is top, left, bottom, right.
    """
    batch, channels, height, width, input_lanes = (int(extent) for extent in data.shape)
    size, _, blocks, _, _, lanes = (int(extent) for extent in weight.shape)
    outputs = choice.outputs
    out_h = height + padding[0] + padding[2] - TAPS + 1
    out_w = width + padding[1] + padding[3] - TAPS + 1
    rows, columns = choice.rows, choice.columns
    groups_across = -(-out_w // (outputs * columns))
    groups = -(-out_h // (outputs * rows)) * groups_across
    tiles = rows * columns
    padded_tiles = padded_extent(tiles, blocks, traits)
    zero = tirx.const(0, data.dtype)

    def padded(n: Any, g: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        h = g // groups_across * (outputs * rows) + y - padding[0]
        w = g % groups_across * (outputs * columns) + x - padding[1]
        inside = tirx.all(h >= 0, h < height, w >= 0, w < width)
        return tirx.if_then_else(inside, data[n, c, h, w, lane], zero)

    image = te.compute(
        (batch, groups, channels, outputs * rows + TAPS - 1, outputs * columns + TAPS - 1, input_lanes),
        padded,
        name="pad",
    )

    def input_rows(n: Any, g: Any, c: Any, t: Any, i: Any, x: Any, lane: Any) -> Any:
        top, left = t // columns * outputs, t % columns * outputs
        values = [image[n, g, c, top + k, left + x, lane] for k in range(size)]
        return _one_of(i, size, lambda row: transformed_input(outputs, row, values))

    # The tiles that pad a register tile repeat the last one; their products are never read.
    by_rows = te.compute(
        (batch, groups, channels, padded_tiles, size, size, input_lanes),
        lambda n, g, c, t, i, x, lane: input_rows(n, g, c, tirx.min(t, tiles - 1), i, x, lane),
        name="input_rows",
    )

    def transformed(n: Any, g: Any, i: Any, j: Any, c: Any, t: Any, lane: Any) -> Any:
        values = [by_rows[n, g, c, t, i, k, lane] for k in range(size)]
        return _one_of(j, size, lambda row: transformed_input(outputs, row, values))

    factors = te.compute(
        (batch, groups, size, size, channels, padded_tiles, input_lanes), transformed, name="transformed_input"
    )
    reduce_block = te.reduce_axis((0, channels), name="ic")
    reduce_lane = te.reduce_axis((0, input_lanes), name="il")
    product = te.compute(
        (batch, groups, size, size, blocks, padded_tiles, lanes),
        lambda n, g, i, j, o, t, lane: te.sum(
            factors[n, g, i, j, reduce_block, t, reduce_lane] * weight[i, j, o, reduce_block, reduce_lane, lane],
            axis=[reduce_block, reduce_lane],
        ),
        name="winograd",
        attrs={ANCHOR: FAMILY, STAGED: int(choice.staged), COLUMNS: columns},
    )
    sums = te.compute(product.shape, lambda *index: product[index], name="sums")

    def output_rows(n: Any, g: Any, o: Any, t: Any, a: Any, j: Any, lane: Any) -> Any:
        values = [sums[n, g, k, j, o, t, lane] for k in range(size)]
        return _one_of(a, outputs, lambda row: transformed_output(outputs, row, values))

    by_output_rows = te.compute((batch, groups, blocks, tiles, outputs, size, lanes), output_rows, name="output_rows")

    def tile(n: Any, g: Any, o: Any, t: Any, a: Any, b: Any, lane: Any) -> Any:
        values = [by_output_rows[n, g, o, t, a, k, lane] for k in range(size)]
        return _one_of(b, outputs, lambda row: transformed_output(outputs, row, values))

    finished = te.compute((batch, groups, blocks, tiles, outputs, outputs, lanes), tile, name="transformed_output")

    def stored(n: Any, o: Any, h: Any, w: Any, lane: Any) -> Any:
        row, column = h % (outputs * rows), w % (outputs * columns)
        g = h // (outputs * rows) * groups_across + w // (outputs * columns)
        t = row // outputs * columns + column // outputs
        return finished[n, g, o, t, row % outputs, column % outputs, lane]

    return te.compute((batch, blocks, out_h, out_w, lanes), stored, name="store")


def _one_of(index: Any, count: int, expression: Callable[[int], Any]) -> Any:
    """Select ``expression(index)`` of ``count`` cases; loops over the index are unrolled, so that one case remains."""
    chosen = expression(count - 1)
    for case in reversed(range(count - 1)):
        chosen = tirx.Select(index == case, expression(case), chosen)
    return chosen
