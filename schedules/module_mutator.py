"""What the Relax rewrites before lowering share: a mutator over a module's functions, and reading convolutions."""

from __future__ import annotations

import itertools
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

CONV1D, CONV2D = "relax.nn.conv1d", "relax.nn.conv2d"
PLAIN_LAYOUTS = {CONV1D: ("NCW", "OIW", "NCW"), CONV2D: ("NCHW", "OIHW", "NCHW")}


ORIGINS_ATTRIBUTE = "tvm_split.origins"
"""Attribute of a Relax function: for variables that the passes of this room have added, the one each stands for."""


def origins_of(function: relax.Function) -> dict[str, str]:
    """For each added variable's name the name of the variable that was there before."""
    origins = {} if function.attrs is None else function.attrs.get(ORIGINS_ATTRIBUTE, {})
    return {str(name): str(origin) for name, origin in origins.items()}


class ModuleMutator(PyExprMutator):  # type: ignore[misc]
    """Applies a mutator to every Relax function of a module; subclasses need TVM's ``@mutator`` too.

    ``name`` is that of the variable whose value is being rewritten.
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
        """A binding before that of the variable being rewritten; it stands for this one, or for another ``origin``."""
        origin = origin or self.name
        free = (f"{origin}_{word}{number or ''}" for number in itertools.count())
        variable = self.builder_.emit(expression, name_hint=next(name for name in free if name not in self._taken))
        self._taken.add(variable.name)
        self._origins[variable.name] = self._origins.get(origin, origin)
        return variable


def operator_of(expression: Any) -> str:
    """The name of the operator that an expression calls (``relax.add``), or an empty string."""
    if isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op):
        return str(expression.op.name)
    return ""


def is_plain(call: relax.Call) -> bool:
    """Whether a convolution's data, weight and result are in the layouts that frontends make."""
    layouts = tuple(str(getattr(call.attrs, name)) for name in ("data_layout", "kernel_layout", "out_layout"))
    return layouts == PLAIN_LAYOUTS.get(operator_of(call))


def window_of(call: relax.Call) -> dict[str, Any]:
    """A convolution's strides, padding, dilation and dtype as keywords for making another."""
    attributes = call.attrs
    return {
        "strides": [int(value) for value in attributes.strides],
        "padding": [int(value) for value in attributes.padding],
        "dilation": [int(value) for value in attributes.dilation],
        "out_dtype": attributes.out_dtype,
    }
