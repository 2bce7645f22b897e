"""Arithmetic that TVM's operators get wrong at the edges of their range, as torch and ONNX both define it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

Builder = Any
"""A block builder: ``emit`` binds an expression."""


def shifted(builder: Builder, value: relax.Expr, by: relax.Expr, to_the_left: bool) -> relax.Expr:
    """``value`` shifted ``by`` bits, both of one integer dtype: by less than 0, or the width or more, nothing is left.

    Nothing is 0, and -1 for a negative value shifted to the right. TVM's shifts are undefined there, as LLVM's are.
    """
    dtype = str(value.ty.dtype)
    width = np.iinfo(dtype).bits
    operator = relax.op.left_shift if to_the_left else relax.op.right_shift
    if isinstance(by, tvm.ir.GenericConst):
        bits = by.value.numpy()
        is_inside = (bits >= 0) & (bits < width)
        if is_inside.all():
            return builder.emit(operator(value, by))
        by = relax.const(np.where(is_inside, bits, 0).astype(dtype), dtype)
        inside: relax.Expr = relax.const(is_inside, "bool")
    else:
        inside = builder.emit(relax.op.less(by, relax.const(np.asarray(width, dtype), dtype)))
        if np.iinfo(dtype).min < 0:
            is_positive = builder.emit(relax.op.greater_equal(by, relax.const(np.asarray(0, dtype), dtype)))
            inside = builder.emit(relax.op.logical_and(inside, is_positive))
        by = builder.emit(relax.op.where(inside, by, relax.const(np.asarray(0, dtype), dtype)))
    nothing = relax.const(np.asarray(0, dtype), dtype)
    if not to_the_left and np.iinfo(dtype).min < 0:
        nothing = builder.emit(relax.op.right_shift(value, relax.const(np.asarray(width - 1, dtype), dtype)))
    return builder.emit(relax.op.where(inside, builder.emit(operator(value, by)), nothing))


def floor_remainder(builder: Builder, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """The remainder that has the divisor's sign, exact for floats: for a finite x, x mod inf is x, or inf below 0.

    TVM's own is x - floor(x / y) · y for floats, NaN where y is infinite and off where the quotient is large.
    """
    dtype = str(left.ty.dtype)
    if "float" not in dtype:
        return builder.emit(relax.op.floor_mod(left, right))
    zero = relax.const(np.asarray(0).astype(np.dtype(dtype)), dtype)
    rest = builder.emit(relax.op.mod(left, right))
    is_below, divides_below = builder.emit(relax.op.less(rest, zero)), builder.emit(relax.op.less(right, zero))
    other_sign = builder.emit(relax.op.logical_xor(is_below, divides_below))
    is_moved = builder.emit(relax.op.logical_and(builder.emit(relax.op.not_equal(rest, zero)), other_sign))
    return builder.emit(relax.op.where(is_moved, builder.emit(relax.op.add(rest, right)), rest))
