"""Tolerances for comparing values with the source: by a value's dtype and the dtypes that it was computed from."""

from __future__ import annotations

from tvm import relax

from relay_passes.ir import bindings_of, used_variables

TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""The largest difference allowed, as a share of the largest magnitude of the reference.

They allow another order of summation through a deep network: hundreds of layers of float32 (24 bits) lose
about 1e-6 a layer at worst, float16 (11 bits) and bfloat16 (8 bits) correspondingly more.
"""


def tolerances_of(function: relax.Function) -> dict[str, float]:
    """The tolerance of every floating-point tensor that ``function`` binds, by the name of its variable.

    The coarsest dtype in a value's computation counts: networks of mixed precision convert half precision to float32,
    but the lost bits do not come back. The dtypes of inputs and weights do not count: both sides have the same values.
    """
    rounding: dict[str, float] = {}
    found: dict[str, float] = {}
    for binding in bindings_of(function):
        own = TOLERANCES.get(str(getattr(binding.var.ty, "dtype", "")), 0.0)
        before = (rounding.get(used.name, 0.0) for used in used_variables(binding.value))
        rounding[binding.var.name] = max(own, *before, 0.0)
        if own:
            found[binding.var.name] = rounding[binding.var.name]
    return found
