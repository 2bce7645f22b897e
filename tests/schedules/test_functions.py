"""Functions of the C library, over all numbers of a dtype, in vectors and alone; expected values are torch's."""

import warnings

import numpy as np
import pytest
import torch
from tvm import relax

from tests.helpers.schedules.schedule_harness import evaluate

NAMES = ["acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "sinh", "tan", "tanh"]


def numbers(dtype: str) -> np.ndarray:
    """Numbers of both signs over all exponents, ordinary ones, and what is no ordinary number."""
    limits = np.finfo(dtype)
    powers = np.exp2(np.arange(limits.minexp + 1, limits.maxexp, 7, dtype=dtype))
    positive = np.concatenate([powers, 1.37 * powers[:-1], np.linspace(0.01, 30, 96), np.linspace(0.9, 1.1, 21)])
    special = [0.0, np.inf, np.nan, 1e-20, 1e-7, limits.max, limits.smallest_subnormal]
    positive = np.concatenate([positive, special]).astype(dtype)
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_all_numbers(name: str, dtype: str) -> None:
    x = numbers(dtype)
    x = np.concatenate([x, x[: -len(x) % 16]])  # whole vectors
    actual, _ = evaluate(lambda builder, data: builder.emit(getattr(relax.op, name)(data)), [x])
    with warnings.catch_warnings(action="ignore"):
        exact = getattr(torch, name)(torch.from_numpy(x).double()).numpy()
        expected = exact.astype(dtype)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(actual[~finite], expected[~finite])
        tolerance = 6 * np.finfo(dtype).eps * np.abs(exact[finite]) + np.finfo(dtype).tiny
        wrong = ~(np.abs(actual[finite].astype("float64") - exact[finite]) <= tolerance)
    assert not wrong.any(), f"{name} of {x[finite][wrong][:5]}: {actual[finite][wrong][:5]}"
    zero = x == 0
    np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(expected[zero]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_numbers(name: str, dtype: str) -> None:
    x = np.array([0.5, -0.25, 1e-7, 0.75, -0.0, 0.9], dtype)
    actual, _ = evaluate(lambda builder, data: builder.emit(getattr(relax.op, name)(data)), [x])
    expected = getattr(torch, name)(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(actual, expected, rtol=6 * np.finfo(dtype).eps)
