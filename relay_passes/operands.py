"""Read and replace the tensor operands of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from relay_passes.rewrite import is_tensor_constant, operator_name

CONVOLUTIONS = {
    f"relax.nn.{name}": getattr(relax.op.nn, name)
    for name in ("conv1d", "conv2d", "conv3d", "conv1d_transpose", "conv2d_transpose", "conv3d_transpose")
}
_ATTRIBUTES = (
    "strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout", "out_dtype",
)  # fmt: skip


def shape_of(expression: relax.Expr) -> tuple[int, ...]:
    """Return the lengths of a tensor's axes; for a tuple, those of its first field."""
    kind = expression.ty
    while isinstance(kind, relax.TupleType):
        kind = kind.fields[0]
    return tuple(int(length) for length in kind.shape.values)


def leaves_of(value: relax.Expr) -> tuple[relax.Expr, ...]:
    """Return the variables and constants that an operation reads, including those in tuples, in order."""
    if isinstance(value, relax.Var) or is_tensor_constant(value):
        return (value,)
    if isinstance(value, relax.TupleGetItem):
        return leaves_of(value.tuple_value)
    inner = value.args if isinstance(value, relax.Call) else value.fields if isinstance(value, relax.Tuple) else ()
    return tuple(leaf for each in inner for leaf in leaves_of(each))


def with_leaves(value: relax.Expr, leaves: Sequence[relax.Expr]) -> relax.Expr:
    """Return the operation on other variables and constants, in the order of `leaves_of`, with types inferred again."""
    remaining = iter(leaves)

    def rebuilt(part: relax.Expr) -> relax.Expr:
        if isinstance(part, relax.Var) or is_tensor_constant(part):
            return next(remaining)
        if isinstance(part, relax.TupleGetItem):
            return relax.TupleGetItem(rebuilt(part.tuple_value), part.index)
        if isinstance(part, relax.Tuple) and leaves_of(part):
            return relax.Tuple([rebuilt(each) for each in part.fields])
        if isinstance(part, relax.Call):
            return relax.Call(part.op, [rebuilt(each) for each in part.args], part.attrs, part.ty_args)
        return part

    return rebuilt(value)


def convolution_like(call: relax.Call, operands: Sequence[relax.Expr], **changed: Any) -> relax.Expr:
    """Return the same convolution on other operands, with the attributes in ``changed``."""
    operator = operator_name(call)
    names = (*_ATTRIBUTES, *["output_padding"] * operator.endswith("_transpose"))
    return CONVOLUTIONS[operator](*operands, **{name: getattr(call.attrs, name) for name in names} | changed)
