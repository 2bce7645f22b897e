"""Lift weights: turn the constants of a stage into parameters, so that code and weights are sent separately.

Requires: a module whose ``main`` holds the stage, after all folding, so that weights are prepacked.
Ensures: every constant of more than `LARGEST_EMBEDDED_BYTES` bytes is a parameter behind the stage's inputs, each
distinct tensor once. Smaller ones stay in the code, since sending them separately would cost more. Constants without
elements are parameters too, since TVM cannot load a library that contains one.
"""

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import tvm
from tvm import relax
from tvm_ffi import structural_map

from relay_passes.ir import main_function, with_main

LARGEST_EMBEDDED_BYTES = 64


def lift_weights(module: tvm.IRModule) -> tuple[tvm.IRModule, tuple[tvm.runtime.Tensor, ...]]:
    """Return the module with the large constants of ``main`` as parameters, and their values in the same order."""
    function = main_function(module)
    weights: list[tvm.runtime.Tensor] = []
    lifted: dict[tuple[int, str], relax.Var] = {}

    def lift(constant: tvm.ir.GenericConst) -> relax.Expr:
        tensor = constant.value
        if not isinstance(tensor, tvm.runtime.Tensor):
            return constant
        if 0 < tensor.numel() * np.dtype(str(tensor.dtype)).itemsize <= LARGEST_EMBEDDED_BYTES:
            return constant
        # Tensors without elements may share an address, so the type is part of the key.
        key = (tensor.data_ptr(), str(constant.ty))
        if key not in lifted:
            lifted[key] = relax.Var(f"weight_{len(weights)}", constant.ty)
            weights.append(tensor)
        return lifted[key]

    body = structural_map(function.body, (tvm.ir.GenericConst, lift))
    parameters = [*function.params, *lifted.values()]
    main = relax.Function(parameters, body, function.ret_ty, function.is_pure, function.attrs)
    return with_main(module, main), tuple(weights)
