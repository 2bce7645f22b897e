"""Decide whether rounding alone explains why outputs differ from the source's.

A quantised network may round a tie either way, and later layers amplify one step to many, so that correct outputs
differ. Each region between roundings is therefore computed from the source's own integers, and its results may be one
step apart. An ill-conditioned network amplifies float32's rounding errors. Its outputs may be as far from those in
float64 as the source's are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import main_function, new_function, operations_of, returned_fields, substitute
from tvm_split.compiler.stage import StageCompiler, code_of
from tvm_split.compiler.targets import tvm_target

_ROUNDED = ("int8", "uint8", "int16", "uint16")
TIMES_THE_SOURCE = 16.0
"""The largest ratio of the compiled network's error to the source's that rounding explains.

A sum of some hundred numbers one after the other has about ten times the error of torch's pairwise sum.
"""
_LARGEST_ERROR = 0.1
"""The largest error that rounding explains, as a share of the largest magnitude; above, outputs prove nothing."""


def has_error_of_source(
    reference: Any, place: int, inputs: Sequence[np.ndarray], actual: np.ndarray, expected: np.ndarray
) -> bool:
    """Whether output ``place`` has at most `TIMES_THE_SOURCE` times the error of the source, both against float64.

    False if the output is not float32, or the source cannot be computed in float64.
    """
    if expected.dtype != np.float32:
        return False
    try:
        precise = reference.precise(inputs)[place]
    except Exception:  # not every source can be computed in float64
        return False
    finite = np.isfinite(precise)
    if not np.array_equal(finite, np.isfinite(actual)) or not np.array_equal(finite, np.isfinite(expected)):
        return False
    error, error_of_source = (
        np.abs(values[finite] - precise[finite]).max(initial=0.0) for values in (actual, expected)
    )
    limit = min(TIMES_THE_SOURCE * error_of_source, _LARGEST_ERROR * np.abs(precise[finite]).max(initial=0.0))
    return bool(error <= limit)


def rounded(module: tvm.IRModule) -> dict[str, relax.Var]:
    """Return the variables of quantised numbers by name, in execution order."""
    bound = [binding.var for binding in operations_of(main_function(module))]
    return {variable.name: variable for variable in bound if str(getattr(variable.ty, "dtype", "")) in _ROUNDED}


def by_regions(
    module: tvm.IRModule, target: Mapping[str, Any], known: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the rounded variables and the outputs, by code for ``target``, each from the ``known`` values before it.

    ``known`` has the function's inputs and the source's rounded values by name; the result is in execution order.
    """
    function = main_function(module)
    cuts = {name: relax.Var(f"{name}_known", var.ty) for name, var in rounded(module).items() if name in known}
    outputs = [field for field in returned_fields(function) if getattr(field, "name", "") not in cuts]

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        values: dict[str, relax.Expr] = {}
        results = []
        for binding in operations_of(function):
            name = binding.var.name
            values[name] = builder.emit(substitute(binding.value, values), name_hint=name)
            if name in cuts:
                results.append(values[name])
                values[name] = cuts[name]
        return results + [substitute(output, values) for output in outputs]

    divided = new_function("regions", [*function.params, *cuts.values()], emit)
    lowered = StageCompiler(target).lower(divided)["name"]
    machine = relax.VirtualMachine(code_of(lowered, tvm_target(target)), tvm.cpu())
    names = [*(parameter.name for parameter in function.params), *cuts]
    results = machine["main"](*[tvm.runtime.tensor(known[name]) for name in names])
    keys = [*cuts, *(getattr(output, "name", "") for output in outputs)]
    return {key: result.numpy() for key, result in zip(keys, results, strict=True)}
