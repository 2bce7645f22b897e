"""exp, erf, tanh and what is made of them over all of float32: every exponent, zeros, denormals, infinities, NaN."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional
from tvm import relax

from tests.helpers.schedules.properties import exact
from tests.helpers.schedules.schedule_harness import evaluate

SMALLEST_NORMAL = float(np.finfo("float32").tiny)
# Reference, largest relative error, and largest absolute error where a relative one is not promised: results below the
# smallest normal number may be zero, and erf near -1 leaves nothing of gelu's digits.
FUNCTIONS = {
    "exp": (torch.exp, 3e-7, SMALLEST_NORMAL),
    "erf": (torch.erf, 5e-7, SMALLEST_NORMAL),
    "tanh": (torch.tanh, 5e-7, SMALLEST_NORMAL),
    "sigmoid": (torch.sigmoid, 4e-7, SMALLEST_NORMAL),
    "nn.silu": (functional.silu, 5e-7, 100 * SMALLEST_NORMAL),
    "nn.gelu": (functional.gelu, 5e-7, 5e-7),
    "nn.gelu_tanh": (lambda x: functional.gelu(x, approximate="tanh"), 5e-7, 5e-7),
}


def every_exponent():
    """40 numbers of each sign and exponent, the ends of exp's range, and what is no ordinary number."""
    random = np.random.default_rng(0)
    exponents = np.repeat(np.arange(255, dtype="uint32"), 40) << np.uint32(23)
    positive = (exponents | random.integers(0, 1 << 23, exponents.size, dtype="uint32")).view("float32")
    ends = np.concatenate([np.linspace(low, low + 1, 200) for low in (-88, -87.5, 3.5, 7.5, 88, 88.4)])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.72283, 88.72284, -87.33654, 1e-45, -1e-45, 3.4e38, -3.4e38]
    return np.concatenate([positive, -positive, ends, np.array(special)]).astype("float32")


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_all_of_float32(name):
    reference, relative, absolute = FUNCTIONS[name]
    x = every_exponent()
    operator = relax.op
    for part in name.split("."):
        operator = getattr(operator, part)
    actual, _ = evaluate(lambda builder, data: builder.emit(operator(data)), [x])
    with warnings.catch_warnings(action="ignore"):
        expected = reference(exact(x)).numpy()
        rounded = expected.astype("float32")
        assert np.array_equal(np.isnan(actual), np.isnan(rounded)), x[np.isnan(actual) != np.isnan(rounded)]
        assert np.array_equal(np.isinf(actual), np.isinf(rounded)), x[np.isinf(actual) != np.isinf(rounded)]
        finite = np.isfinite(rounded)
        error = np.abs(actual.astype("float64") - expected)[finite]
        excess = error / (relative * np.abs(expected[finite]) + absolute)
    worst = int(excess.argmax())
    assert excess[worst] <= 1, f"at {x[finite][worst]}: {actual[finite][worst]} for {expected[finite][worst]}"
