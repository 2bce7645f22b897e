"""The matrices and transforms of Winograd's short convolutions: fewer products, but additions before and after.

``outputs`` neighbouring results of a filter of 3 taps come from a product of polynomials, which is determined by its
values at ``outputs + 2`` points (Toom, Cook; Winograd 1980): ``output [(weight w) * (input x)]``, with as many products
as points. In two dimensions a tile of 4 x 4 outputs takes 36 products where the definition takes 144 (Lavin, Gray: Fast
Algorithms for Convolutional Neural Networks, 2015).

The points determine the error. 0, +-3/4, +-3/2 and infinity give an error of 1.8e-6 of the output's range, measured
against float64 over 128 channels; the usual 0, +-1, +-2 give 7.8e-6. Powers of both sets up to the third are exact in
float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.polynomial.polynomial import polyfromroots

TAPS = 3
POINT_PAIRS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.75, 1.5)}
"""The points by outputs: each stands for itself and its negative. Zero and infinity are always included."""


def tile_size(outputs: int) -> int:
    """Return the number of inputs per axis for ``outputs`` results, which is also the number of products per axis."""
    return outputs + TAPS - 1


def input_matrix(outputs: int) -> np.ndarray:
    """Return the input transform, [tile, tile] in float64: row ``i`` gives the ``i``-th factor of the products.

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
    """Return the weight transform, [tile, 3] in float64: filter values at the points, over Lagrange's denominators."""
    points = np.array(_points(outputs))
    denominators = [np.prod(point - np.delete(points, row)) for row, point in enumerate(points)]
    return np.vstack([np.vander(points, TAPS, increasing=True) / np.array(denominators)[:, None], [0.0, 0.0, 1.0]])


def output_matrix(outputs: int) -> np.ndarray:
    """Return the output transform, [outputs, tile] in float64: powers of the points; infinity has only the highest."""
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
    """Return row ``row`` of `input_matrix` times the values, which can be added and multiplied by a float.

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
    """Return row ``row`` of `output_matrix` times the values, from sums and differences at opposite points."""
    matrix = output_matrix(outputs)
    pairs = range(1, len(values) - 1, 2)
    if row % 2 == 0:
        terms = [values[first] + values[first + 1] for first in pairs]
    else:
        terms = [values[first] - values[first + 1] for first in pairs]
    weights = [float(matrix[row, first]) for first in pairs]
    return combined([matrix[row, 0], *weights, matrix[row, -1]], [values[0], *terms, values[-1]])


def combined(weights: Sequence[float] | np.ndarray, values: Sequence[Any]) -> Any:
    """Return the weighted sum of the values, without terms of weight zero and multiplications by one."""
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
