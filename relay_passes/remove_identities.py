"""Remove identities: operators from importers that compute nothing, or that simpler operators can replace.

    dropout in inference, broadcast or reshape to the same shape   ──▶ their operand
    sum over the axis that a stack has just made                    ──▶ additions

Requires: a normalised function ``main``.
Ensures: none of these operators is left, and every value is unchanged. The last form is the import of ONNX's ``Sum``;
as additions it fuses into the convolution before it, and keeps its operands' layout.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.ir import operator_name, rewrite_main


@tvm.transform.module_pass(opt_level=0, name="RemoveIdentities")
class RemoveIdentities:
    """Remove identities from the function ``main``."""

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        # The expression of each variable, to find the stack before a sum.
        bound: dict[str, relax.Expr] = {}

        def replacement(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
            simpler = _simplified(expression, bound, builder)
            if simpler is not None:
                return simpler
            variable = builder.emit(expression, name_hint=name)
            bound[variable.name] = expression
            return variable

        return relax.transform.DeadCodeElimination(["main"])(rewrite_main(module, replacement))


def _simplified(expression: relax.Expr, bound: dict[str, relax.Expr], builder: relax.BlockBuilder) -> relax.Expr | None:
    """Return a simpler expression of the same value, or None if there is none."""
    if isinstance(expression, relax.TupleGetItem) and expression.index == 0:
        source = _bound_to(expression.tuple_value, bound)
        return source.args[0] if operator_name(source) == "relax.nn.dropout" else None
    operator = operator_name(expression)
    if operator in ("relax.broadcast_to", "relax.reshape"):
        operand = expression.args[0]
        return operand if _shape(expression) is not None and _shape(expression) == _shape(operand) else None
    if operator == "relax.sum" and not expression.attrs.keepdims and expression.attrs.axis is not None:
        stack = _bound_to(expression.args[0], bound)
        if operator_name(stack) == "relax.stack" and [int(axis) for axis in expression.attrs.axis] == [
            int(stack.attrs.axis)
        ]:
            terms = stack.args[0].fields if isinstance(stack.args[0], relax.Tuple) else ()
            if terms:
                total = terms[0]
                for term in terms[1:]:
                    total = builder.emit(relax.op.add(total, term))
                return total
    return None


def _bound_to(expression: relax.Expr, bound: dict[str, relax.Expr]) -> Any:
    """Return the expression of a variable (None for a parameter), or an expression that is no variable itself."""
    return bound.get(expression.name) if isinstance(expression, relax.Var) else expression


def _shape(expression: relax.Expr) -> list[int] | None:
    values = getattr(getattr(expression.ty, "shape", None), "values", None)
    return None if values is None else [int(length) for length in values]
