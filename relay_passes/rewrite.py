"""Rewrite a function binding by binding, with variables replaced: helpers that several passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relay_passes.contract import bindings_of, main_function, returned_fields

Replace = Callable[[str, relax.Expr, relax.BlockBuilder], relax.Expr | None]
"""Returns the replacement of a variable from its name and its expression, or None to bind it unchanged.

Earlier replacements are already made in the expression. The builder may emit further bindings.
"""


def rewrite_main(module: tvm.IRModule, replace: Replace) -> tvm.IRModule:
    """Return the module with ``main`` rewritten as one dataflow block that returns a tuple of variables."""
    function = main_function(module)
    result_name = getattr(function.body.body, "name", "")
    builder = relax.BlockBuilder()
    values: dict[str, relax.Expr] = {}
    with builder.function("main", list(function.params)):
        with builder.dataflow():
            for binding in bindings_of(function):
                name = binding.var.name
                if name != result_name:
                    expression = substitute(binding.value, values)
                    replacement = replace(name, expression, builder)
                    values[name] = builder.emit(expression, name_hint=name) if replacement is None else replacement
            fields = [substitute(each, values) for each in returned_fields(function)]
            # Each result must be a variable, so that it can be sent by name.
            fields = [each if isinstance(each, relax.Var) else builder.emit(each) for each in fields]
            outputs = builder.emit_output(relax.Tuple(fields), name_hint=result_name or "outputs")
        builder.emit_func_output(outputs)
    return with_main(module, builder.get()["main"])


def with_main(module: tvm.IRModule, rewritten: relax.Function) -> tvm.IRModule:
    """Return the module with another ``main``, which keeps the attributes of the old one."""
    attributes = main_function(module).attrs
    updated = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs, global_infos=module.global_infos)
    updated["main"] = rewritten if attributes is None else rewritten.with_attrs(attributes)
    return updated


def substitute(expression: relax.Expr, replacements: Mapping[str, relax.Expr]) -> relax.Expr:
    """Return the expression with each variable whose name is in ``replacements`` replaced.

    The types of calls and tuples are inferred again: shapes are unchanged, devices are those of the replacements.
    """
    return _Substitution(replacements).visit_expr(expression)


def emit_operations(
    builder: relax.BlockBuilder, operations: Iterable[relax.VarBinding], values: dict[str, relax.Expr]
) -> None:
    """Emit bindings under their names with the variables in ``values`` replaced; add the new variables to these."""
    for binding in operations:
        name = binding.var.name
        values[name] = builder.emit(substitute(binding.value, values), name_hint=name)


@mutator
class _Substitution(PyExprMutator):  # type: ignore[misc]
    def __init__(self, replacements: Mapping[str, relax.Expr]) -> None:
        super().__init__()
        self._replacements = replacements

    def visit_var_(self, variable: relax.Var) -> relax.Expr:
        return self._replacements.get(variable.name, variable)

    def visit_dataflow_var_(self, variable: relax.DataflowVar) -> relax.Expr:
        return self._replacements.get(variable.name, variable)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        arguments = [self.visit_expr(argument) for argument in call.args]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    def visit_tuple_(self, expression: relax.Tuple) -> relax.Expr:
        return relax.Tuple([self.visit_expr(field) for field in expression.fields])

    def visit_tuple_getitem_(self, expression: relax.TupleGetItem) -> relax.Expr:
        return relax.TupleGetItem(self.visit_expr(expression.tuple_value), expression.index)


def operator_name(expression: relax.Expr | None) -> str:
    """Return the name of the operator that an expression calls (``relax.add``), or an empty string."""
    if isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op):
        return str(expression.op.name)
    return ""


def is_tensor_constant(expression: relax.Expr) -> bool:
    return isinstance(expression, tvm.ir.GenericConst) and isinstance(expression.value, tvm.runtime.Tensor)


def constant(array: np.ndarray[Any, Any]) -> relax.Expr:
    """Return a constant of the array's dtype; ``relax.const`` without a dtype converts float64 to float32."""
    return relax.const(array, array.dtype.name)
