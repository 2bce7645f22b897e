"""Rewriting every Relax function of a module, call by call."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator


class ModuleMutator(PyExprMutator):  # type: ignore[misc]
    """Applies a mutator to every Relax function of a module."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.module = module

    def transform(self) -> tvm.IRModule:
        for variable, function in self.module.functions_items():
            if isinstance(function, relax.Function):
                self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()
