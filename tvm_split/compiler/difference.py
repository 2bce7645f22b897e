"""Compare arrays with those of the source framework, with tolerances by dtype."""

from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from tvm import relax

from relay_passes.ir import bindings_of, used_variables
from tvm_split.placement.problem import Precision

TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""The largest difference allowed, as a share of the largest magnitude of the reference.

They allow another order of summation through a deep network: hundreds of layers of float32 (24 bits) lose
about 1e-6 a layer at worst, float16 (11 bits) and bfloat16 (8 bits) correspondingly more.
"""


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of two arrays, its limit, and the largest magnitude of the reference."""

    largest: float
    allowed: float
    magnitude: float = 0.0

    @property
    def share(self) -> float:
        """The difference as a share of the magnitude."""
        return self.largest / self.magnitude if self.magnitude else self.largest

    @property
    def is_within(self) -> bool:
        return self.largest <= self.allowed


def difference(
    actual: np.ndarray, expected: np.ndarray, tolerance: float | None = None, precision: Precision = "float32"
) -> Difference:
    """Compare floating-point arrays with a tolerance relative to the largest finite reference value, others exactly.

    ``tolerance`` replaces the dtype's. A coarser ``precision`` of the computation raises the tolerance to its own.
    Arrays of different shapes or dtypes have an infinite difference.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Difference(float("inf"), 0.0)
    if tolerance is None:
        tolerance = TOLERANCES.get(str(expected.dtype), 0.0)
    if tolerance and precision != "float32":
        tolerance = max(tolerance, TOLERANCES[precision])
    actual_values, expected_values = actual.astype(np.float64), expected.astype(np.float64)
    equal = (actual_values == expected_values) | (np.isnan(actual_values) & np.isnan(expected_values))
    if equal.all():
        return Difference(0.0, 0.0)
    gap = np.abs(actual_values[~equal] - expected_values[~equal])
    largest = float("inf") if np.isnan(gap).any() else float(gap.max())
    finite = expected_values[np.isfinite(expected_values)]
    magnitude = float(np.abs(finite).max(initial=0.0))
    return Difference(largest, tolerance * magnitude, magnitude)


def tolerances_of(function: relax.Function) -> dict[str, float]:
    """Return the tolerance of every floating-point tensor that ``function`` binds, by the name of its variable.

    The coarsest dtype in a value's computation counts: networks of mixed precision convert half precision to float32,
    but the lost bits do not come back. The dtypes of inputs and weights do not count: both sides have the same values.
    """
    rounding: dict[str, float] = {}
    tolerances: dict[str, float] = {}
    for binding in bindings_of(function):
        tolerance = TOLERANCES.get(str(getattr(binding.var.ty, "dtype", "")), 0.0)
        before = (rounding.get(used.name, 0.0) for used in used_variables(binding.value))
        rounding[binding.var.name] = max(tolerance, *before, 0.0)
        if tolerance:
            tolerances[binding.var.name] = rounding[binding.var.name]
    return tolerances
