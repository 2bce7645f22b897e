"""Remove identities: operators that importers emit and that compute nothing, or less than they seem to.

    dropout in inference, broadcast or reshape to the same shape   ──▶ their operand
    sum over the axis that a stack has just made                    ──▶ additions

Requires: a normalised function ``main``.
Ensures: none of these operators is left, and every value is what it was. The last form is how ONNX's ``Sum`` is
imported; as additions it fuses into the convolution before it, and keeps its operands' layout.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.contract import bindings_of, main_function, returned_fields
from relay_passes.substitute import substitute


@tvm.transform.module_pass(opt_level=0, name="RemoveIdentities")
class RemoveIdentities:
    """Remove identities from the function ``main``."""

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        function = main_function(module)
        result_name = getattr(function.body.body, "name", "")
        builder = relax.BlockBuilder()
        values: dict[str, relax.Expr] = {}
        # What each variable was bound to, after substitution: to see a sum's stack.
        bound: dict[str, relax.Expr] = {}
        with builder.function("main", list(function.params)):
            with builder.dataflow():
                for binding in bindings_of(function):
                    if binding.var.name == result_name:
                        continue
                    expression = substitute(binding.value, values)
                    simpler = _simplified(expression, bound, builder)
                    if simpler is None:
                        simpler = builder.emit(expression, name_hint=binding.var.name)
                        bound[simpler.name] = expression
                    values[binding.var.name] = simpler
                fields = [substitute(each, values) for each in returned_fields(function)]
                outputs = builder.emit_output(relax.Tuple(fields), name_hint=result_name or "outputs")
            builder.emit_func_output(outputs)
        updated = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs, global_infos=module.global_infos)
        updated["main"] = builder.get()["main"].with_attrs(function.attrs)
        return relax.transform.DeadCodeElimination(["main"])(updated)


def _simplified(
    expression: relax.Expr, bound: dict[str, relax.Expr], builder: relax.BlockBuilder
) -> relax.Expr | None:
    """What an expression equals, or None if it has to be computed."""
    if isinstance(expression, relax.TupleGetItem) and expression.index == 0:
        source = _bound_to(expression.tuple_value, bound)
        return source.args[0] if _operator(source) == "relax.nn.dropout" else None
    operator = _operator(expression)
    if operator in ("relax.broadcast_to", "relax.reshape"):
        operand = expression.args[0]
        return operand if _shape(expression) is not None and _shape(expression) == _shape(operand) else None
    if operator == "relax.sum" and not expression.attrs.keepdims and expression.attrs.axis is not None:
        stack = _bound_to(expression.args[0], bound)
        if _operator(stack) == "relax.stack" and [int(each) for each in expression.attrs.axis] == [int(stack.attrs.axis)]:
            terms = stack.args[0].fields if isinstance(stack.args[0], relax.Tuple) else ()
            if terms:
                total = terms[0]
                for term in terms[1:]:
                    total = builder.emit(relax.op.add(total, term))
                return total
    return None


def _operator(expression: relax.Expr | None) -> str:
    if isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op):
        return str(expression.op.name)
    return ""


def _bound_to(expression: relax.Expr, bound: dict[str, relax.Expr]) -> relax.Expr | None:
    return bound.get(expression.name) if isinstance(expression, relax.Var) else expression


def _shape(expression: relax.Expr) -> list[int] | None:
    values = getattr(getattr(expression.ty, "shape", None), "values", None)
    return None if values is None else [int(length) for length in values]
