"""Compare a compiled network with its source for unusual values, which normal random numbers hardly contain."""

from collections.abc import Sequence

import numpy as np

from tvm_split.compiler.difference import difference

_VALUES = (0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 2.5, -2.5, 30.0, -30.0, 1e3, -1e3)
"""Zeros, subnormal numbers, ties of rounding, and values where exponential functions over- or underflow.

Larger ones and infinities are left out: they hide other values in sums, and NaN may differ (see docs/models.md).
"""

_TOLERANCE = 1e-2
"""The tolerance for unusual values, coarser than others: large values amplify rounding errors before a softmax."""


def with_unusual_values(inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...] | None:
    """Return copies of the inputs with unusual values at some positions of float32 arrays; None without float32 arrays.

    Arrays of other dtypes, which may be indices or masks, are unchanged.
    """
    if all(array.dtype != np.float32 for array in inputs):
        return None
    changed = tuple(np.array(array, order="C") for array in inputs)
    for array in changed:
        if array.dtype == np.float32:
            places = array.reshape(-1)[1::4][: 8 * len(_VALUES)]
            places[:] = np.resize(_VALUES, places.size)
    return changed


def differs(actual: np.ndarray, expected: np.ndarray) -> str:
    """Return how a float32 output differs from the source's finite values; empty if it does not, or is not float32."""
    if expected.dtype != np.float32:
        return ""
    finite = np.isfinite(expected)
    count = np.count_nonzero(~np.isfinite(actual[finite]))
    if count:
        return f"{count} values are NaN or infinite that are finite in the source"
    gap = difference(actual[finite], expected[finite], _TOLERANCE)
    return "" if gap.is_within else f"by {gap.largest:.3g}"
