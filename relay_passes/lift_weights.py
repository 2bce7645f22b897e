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
from tvm.relax.expr_functor import PyExprMutator, mutator

from relay_passes.ir import main_function, with_main

LARGEST_EMBEDDED_BYTES = 64


def lift_weights(module: tvm.IRModule) -> tuple[tvm.IRModule, tuple[tvm.runtime.Tensor, ...]]:
    """Return the module with the large constants of ``main`` as parameters, and their values in the same order."""
    function = main_function(module)
    lifter = _Lifter()
    body = lifter.visit_expr(function.body)
    parameters = [*function.params, *lifter.parameters]
    lifted = relax.Function(parameters, body, function.ret_ty, function.is_pure, function.attrs)
    return with_main(module, lifted), tuple(lifter.weights)


@mutator
class _Lifter(PyExprMutator):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[relax.Var] = []
        self.weights: list[tvm.runtime.Tensor] = []
        self._lifted: dict[tuple[int, str], relax.Var] = {}

    def visit_generic_const_(self, constant: tvm.ir.GenericConst) -> relax.Expr:
        tensor = constant.value
        if not isinstance(tensor, tvm.runtime.Tensor):
            return constant
        if 0 < tensor.numel() * np.dtype(str(tensor.dtype)).itemsize <= LARGEST_EMBEDDED_BYTES:
            return constant
        # Tensors without elements may share an address, so the type is part of the key.
        key = (tensor.data_ptr(), str(constant.ty))
        if key not in self._lifted:
            self._lifted[key] = relax.Var(f"weight_{len(self.weights)}", constant.ty)
            self.parameters.append(self._lifted[key])
            self.weights.append(tensor)
        return self._lifted[key]
