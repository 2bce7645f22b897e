"""Replace variables in an expression, so that its type is inferred anew from what replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator


def substitute(expression: relax.Expr, replacements: Mapping[str, relax.Expr]) -> relax.Expr:
    """The expression with each variable whose name is in ``replacements`` replaced.

    The types of calls and tuples are inferred anew: shapes stay as they are, but devices are those of the
    replacements.
    """
    return _Substitution(replacements).visit_expr(expression)


def emit_operations(
    builder: relax.BlockBuilder, operations: Iterable[relax.VarBinding], values: dict[str, relax.Expr]
) -> None:
    """Emit bindings under their names, on ``values`` in place of the variables of these names; adds what they bind."""
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
