"""Lower Winograd convolution over blocked channels to TE, for groups of rows of tiles.

The blocks are ``pad -> input rows -> input -> product (the anchor) -> sums -> output rows -> output -> store``. A tile
is ``outputs`` x ``outputs`` results of one channel block. A group is ``rows`` x ``columns`` tiles of one image, and
holds all values between the pixels it reads and its results. A group's tiles are padded to whole register tiles.

The matrices and transforms of Winograd's short convolutions: fewer products, but additions before and after.

``outputs`` neighbouring results of a filter of 3 taps come from a product of polynomials, which is determined by its
values at ``outputs + 2`` points (Toom, Cook; Winograd 1980): ``output [(weight w) * (input x)]``, with as many products
as points. In two dimensions a tile of 4 x 4 outputs takes 36 products where the definition takes 144 (Lavin, Gray: Fast
Algorithms for Convolutional Neural Networks, 2015).

The points determine the error. 0, +-3/4, +-3/2 and infinity give an error of 1.8e-6 of the output's range, measured
against float64 over 128 channels; the usual 0, +-1, +-2 give 7.8e-6. Powers of both sets up to the third are exact in
float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial.polynomial import polyfromroots
from tvm import te, tirx

from schedules.blocks import ANCHOR
from schedules.cpu.register_tile import padded_extent
from schedules.traits import Traits

TAPS = 3
# Each point stands for itself and its negative; zero and infinity are always included. 2 outputs have one pair, 4 have
# two.
POINT_PAIRS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.75, 1.5)}


def tile_size(outputs: int) -> int:
    """The input values per axis that a tile of ``outputs`` results needs; also the number of its products."""
    return outputs + TAPS - 1


def input_matrix(outputs: int) -> np.ndarray:
    """The input transform, [tile, tile] in float64: row ``i`` gives the ``i``-th factor of the products.

    Rows are in the order 0, p, -p, q, -q, infinity. They are Lagrange's polynomials without their denominators.
    """
    points = _points(outputs)
    size = tile_size(outputs)
    matrix = np.zeros((size, size))
    for row in range(len(points)):
        matrix[row, : size - 1] = polyfromroots([*points[:row], *points[row + 1 :]])
    matrix[-1] = polyfromroots(points)
    return matrix


def weight_matrix(outputs: int) -> np.ndarray:
    """The weight transform, [tile, 3] in float64: the filter's values at the points, over Lagrange's denominators."""
    points = np.array(_points(outputs))
    denominators = [np.prod(point - np.delete(points, row)) for row, point in enumerate(points)]
    return np.vstack([np.vander(points, TAPS, increasing=True) / np.array(denominators)[:, None], [0.0, 0.0, 1.0]])


def output_matrix(outputs: int) -> np.ndarray:
    """The output transform, [outputs, tile] in float64: powers of the points; infinity has only the highest power."""
    matrix = np.vander([*_points(outputs), 0.0], outputs, increasing=True).T
    matrix[:, -1] = 0.0
    matrix[-1, -1] = 1.0
    return matrix


def transformed_kernel(kernel: np.ndarray, outputs: int) -> np.ndarray:
    """Transform a kernel [O/o, I/i, 3, 3, i, o] to [tile, tile, O/o, I/i, i, o] in its dtype, computed in float64."""
    matrix, size = weight_matrix(outputs), tile_size(outputs)
    blocks, lanes = kernel.shape[:2], kernel.shape[4:]
    taps = kernel.transpose(2, 3, 0, 1, 4, 5).reshape(TAPS * TAPS, -1).astype("float64")
    values: np.ndarray = (np.kron(matrix, matrix) @ taps).astype(kernel.dtype)
    return values.reshape(size, size, *blocks, *lanes)


def transformed_input(outputs: int, row: int, values: Sequence[Any]) -> Any:
    """Row ``row`` of `input_matrix` times the values, which can be added and multiplied by a float.

    The rows of a point and its negative have equal even parts and opposite odd parts. They are written as sum and
    difference of the same two expressions, so that the compiler computes these once.
    """
    matrix = input_matrix(outputs)
    if row in (0, len(values) - 1):
        return combined(matrix[row], values)
    first = row - (row - 1) % 2
    even = np.where(np.arange(len(values)) % 2 == 0, matrix[first], 0.0)
    sums = combined(even, values), combined(matrix[first] - even, values)
    return sums[0] + sums[1] if row == first else sums[0] - sums[1]


def transformed_output(outputs: int, row: int, values: Sequence[Any]) -> Any:
    """Row ``row`` of `output_matrix` times the values, from sums and differences of the values at opposite points."""
    matrix = output_matrix(outputs)
    pairs = range(1, len(values) - 1, 2)
    if row % 2 == 0:
        terms = [values[first] + values[first + 1] for first in pairs]
    else:
        terms = [values[first] - values[first + 1] for first in pairs]
    weights = [float(matrix[row, first]) for first in pairs]
    return combined([matrix[row, 0], *weights, matrix[row, -1]], [values[0], *terms, values[-1]])


def combined(weights: Sequence[float] | np.ndarray, values: Sequence[Any]) -> Any:
    """The weighted sum of the values, without terms of weight zero and multiplications by one."""
    total: Any = None
    for weight, value in zip(weights, values, strict=True):
        factor = float(weight)
        if factor == 0.0:
            continue
        if total is None:
            total = value if factor == 1.0 else value * factor
        elif factor == 1.0:
            total = total + value
        elif factor == -1.0:
            total = total - value
        else:
            total = total + value * factor
    return total


def _points(outputs: int) -> list[float]:
    return [0.0, *(sign * point for point in POINT_PAIRS[outputs] for sign in (1.0, -1.0))]


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
