"""A mutator over a module's functions for the Relax rewrites before lowering; it records added variables' origins."""

from __future__ import annotations

import itertools

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

ORIGINS_ATTRIBUTE = "tvm_split.origins"
"""Attribute of a Relax function: maps each variable that this package's passes added to the variable it stands for."""


def origins_of(function: relax.Function) -> dict[str, str]:
    """Map the name of each added variable to the name of the original variable."""
    origins = {} if function.attrs is None else function.attrs.get(ORIGINS_ATTRIBUTE, {})
    return {str(name): str(origin) for name, origin in origins.items()}


class ModuleMutator(PyExprMutator):  # type: ignore[misc]
    """A mutator that is applied to every Relax function of a module; subclasses also need TVM's ``@mutator``.

    ``name`` is the name of the variable whose value is being rewritten.
    """

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.module = module
        self.name = ""
        self._origins: dict[str, str] = {}
        self._taken: set[str] = set()

    def transform(self) -> tvm.IRModule:
        for variable, function in self.module.functions_items():
            if isinstance(function, relax.Function):
                self._origins = origins_of(function)
                self._taken = {binding.var.name for block in function.body.blocks for binding in block.bindings}
                self._taken |= {parameter.name for parameter in function.params}
                rewritten = self.visit_expr(function).with_attr(ORIGINS_ATTRIBUTE, self._origins)
                self.builder_.update_func(variable, rewritten)
        return self.builder_.get()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.name = binding.var.name
        super().visit_var_binding_(binding)

    def emit_beside(self, expression: relax.Expr, word: str, origin: str | None = None) -> relax.Var:
        """Emit a binding before the variable being rewritten; it stands for that variable or for a given ``origin``."""
        origin = origin or self.name
        free = (f"{origin}_{word}{number or ''}" for number in itertools.count())
        variable = self.builder_.emit(expression, name_hint=next(name for name in free if name not in self._taken))
        self._taken.add(variable.name)
        self._origins[variable.name] = self._origins.get(origin, origin)
        return variable
