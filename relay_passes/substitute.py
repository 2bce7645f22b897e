"""Replace variables in an expression, so that its type is inferred anew from what replaces them."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.global_info import VDevice


def substitute(expression: relax.Expr, replacements: Mapping[str, relax.Expr]) -> relax.Expr:
    """The expression with each variable whose name is in ``replacements`` replaced.

    The types of calls and tuples are inferred anew: shapes stay as they are, but devices are those of the
    replacements.
    """
    return _Substitution(replacements).visit_expr(expression)


def without_device(value_type: relax.Type) -> relax.Type:
    """The same shapes and dtypes, on no device in particular."""
    return on_device(value_type, None)


def on_device(value_type: relax.Type, device: VDevice | None) -> relax.Type:
    """The same shapes and dtypes on a device."""
    if isinstance(value_type, relax.TensorType):
        return relax.TensorType(value_type.shape, value_type.dtype, device)
    if isinstance(value_type, relax.TupleType):
        return relax.TupleType([on_device(field, device) for field in value_type.fields])
    return value_type


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
