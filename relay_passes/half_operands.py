"""Half operands: convolutions and matrix products multiply in half precision and accumulate in float32.

    c = conv2d(x, w)  ──▶  x_half = astype(x, "float16")
                           w_half = astype(w, "float16")
                           c = conv2d(x_half, w_half, out_dtype="float32")

Everything else stays in float32, so only the operands of these operations are rounded, as for tensor cores
(Micikevicius and others: Mixed Precision Training, 2018). A value with several such readers is rounded once.

Requires: a normalised function ``main``.
Ensures: the operations of `MULTIPLYING` with two float32 operands have operands of the half type. Their names and
result types are unchanged. New variables are named after the value that they round. `OTHERS` stay in float32.
"""

from typing import Any

import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.ir import call_like, free_name, main_function, names_of, operator_name, rewrite_main

MULTIPLYING = ("relax.matmul", *(f"relax.nn.conv{axes}d{end}" for axes in (1, 2, 3) for end in ("", "_transpose")))
OTHERS = ("relax.einsum", "relax.nn.attention", "relax.nn.attention_bias")
"""Multiplying operators that are left in float32, because they accumulate in the type of their operands."""


@tvm.transform.module_pass(opt_level=0, name="HalfOperands")
class HalfOperands:
    """Round the operands of convolutions and matrix products in ``main``.

    ``rounded`` maps the name of each new variable to the name of the first operation that reads it.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.rounded: dict[str, str] = {}

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        halves: dict[Any, relax.Var] = {}
        used_names = set(names_of(main_function(module)))

        def half_of(operand: relax.Expr, reader: str, place: str, builder: relax.BlockBuilder) -> relax.Var:
            key = operand.name if isinstance(operand, relax.Var) else (reader, place)
            if key not in halves:
                hint = f"{operand.name if isinstance(operand, relax.Var) else f'{reader}_{place}'}_{self._dtype}"
                rounded = relax.op.astype(operand, self._dtype)
                halves[key] = builder.emit(rounded, name_hint=free_name(hint, used_names))
                self.rounded[halves[key].name] = reader
            return halves[key]

        def replacement(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
            if operator_name(expression) not in MULTIPLYING:
                return None
            if any(str(getattr(operand.ty, "dtype", "")) != "float32" for operand in expression.args):
                return None
            operands = [
                half_of(operand, name, place, builder)
                for operand, place in zip(expression.args, ("left", "right"), strict=True)
            ]
            return builder.emit(call_like(expression, operands, out_dtype="float32"), name_hint=name)

        return rewrite_main(module, replacement)
