"""Compare a compiled network with its source for unusual values, which normal random numbers hardly contain."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rpc_runtime.program.program import Program
from tvm_split.compiler.build_cache import key_of
from tvm_split.compiler.difference import TOLERANCES, difference
from tvm_split.compiler.rounding import has_error_of_source
from tvm_split.compiler.targets import host_target
from tvm_split.model import Model
from tvm_split.placement.plan import Plan

_VALUES = (0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 2.5, -2.5, 30.0, -30.0, 1e3, -1e3)
"""Zeros, subnormal numbers, ties of rounding, and values where exponential functions over- or underflow.

Larger ones and infinities are left out: they hide other values in sums, and NaN may differ (see docs/models.md).
"""

_TOLERANCE = 1e-2
"""The tolerance for unusual values, coarser than others: large values amplify rounding errors before a softmax."""


def _with_unusual_values(inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...] | None:
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


def _differs(actual: np.ndarray, expected: np.ndarray) -> str:
    """Return how a float32 output differs from the source's finite values; empty if it does not, or is not float32."""
    if expected.dtype != np.float32:
        return ""
    finite = np.isfinite(expected)
    count = np.count_nonzero(~np.isfinite(actual[finite]))
    if count:
        return f"{count} values are NaN or infinite that are finite in the source"
    gap = difference(actual[finite], expected[finite], _TOLERANCE)
    return "" if gap.is_within else f"by {gap.largest:.3g}"


Compared = tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]
"""Inputs and the source's outputs for them."""


def unusual_values(
    model: Model, plan: Plan, inputs: Sequence[np.ndarray], tolerances: Mapping[str, float]
) -> Compared | None:
    """Return inputs with unusual values and the source's outputs for them; None if the source rejects them.

    None also if no input is float32, or if the network computes in another precision anywhere.
    """
    unusual = _with_unusual_values(inputs)
    is_float32 = set(tolerances.values()) <= {TOLERANCES["float32"]} and plan.precision == "float32"
    if model.reference is None or unusual is None or not is_float32:
        return None
    try:
        return unusual, model.reference.outputs(unusual)
    except Exception:  # the source may reject such values
        return None


def key_of_unusual(model: Model, plan: Plan, compared: Sequence[np.ndarray], program: Program) -> str:
    """Return the key under which the warnings of `how_unusual_differs` are kept; ``compared`` are in- and outputs.

    Only these warnings are kept; the ordinary comparison is made each time. Computing with subnormal numbers is slow:
    in a second start of ResNet-50 it took a fifth of the time.
    """
    arrays = [hashlib.sha256(array.tobytes()).hexdigest() for array in compared]
    libraries = sorted({stage.library.sha256 for stage in program.stages})
    names = [tensor.name for tensor in model.outputs]
    return key_of([host_target(1)], unusual=[model.digest, plan.precision, arrays, libraries, names, host_target(1)])


def how_unusual_differs(model: Model, unusual: Compared, actual: Sequence[np.ndarray]) -> Iterator[str]:
    """Yield the warnings of outputs that differ for unusual values: no errors, since networks may amplify these."""
    inputs, expected = unusual
    for place, tensor in enumerate(model.outputs):
        how = _differs(actual[place], expected[place])
        if how and not has_error_of_source(model.reference, place, inputs, actual[place], expected[place]):
            yield (
                f"for inputs with unusual values (zeros, 1e-40, ±30, ±1000) output {tensor.name!r} differs from the "
                f"source: {how}. If your inputs have such values, give them as example_inputs, which names the layer"
            )
