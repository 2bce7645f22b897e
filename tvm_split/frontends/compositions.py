"""Operators that TVM lacks or gets wrong, composed as torch and ONNX both define them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, numbers_of, shape_of


def shifted(op: Operators, value: relax.Expr, by: relax.Expr, to_the_left: bool) -> relax.Expr:
    """Return ``value`` shifted ``by`` bits, both of one integer dtype, defined for every ``by``.

    For ``by`` below 0, or of at least the dtype's width, the result is 0, or -1 for a negative value shifted to the
    right. TVM's shifts are undefined there, as LLVM's are.
    """
    dtype = dtype_of(value)
    width, is_signed = np.iinfo(dtype).bits, np.iinfo(dtype).min < 0
    shift = op.left_shift if to_the_left else op.right_shift
    bits = numbers_of(by)
    if bits is not None:
        is_inside = (bits >= 0) & (bits < width)
        if is_inside.all():
            return shift(value, by)
        by, inside = constant(np.where(is_inside, bits, 0), dtype), constant(is_inside, "bool")
    else:
        inside = op.less(by, width)
        if is_signed:
            inside = op.logical_and(inside, op.greater_equal(by, 0))
        by = op.where(inside, by, 0)
    nothing = op.right_shift(value, width - 1) if is_signed and not to_the_left else 0
    return op.where(inside, shift(value, by), nothing)


def floor_remainder(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Return the remainder with the divisor's sign, exact for floats; for finite x, x mod inf is x, or inf if x < 0.

    TVM computes x - floor(x / y) · y for floats: NaN for infinite y, and inaccurate for a large quotient.
    """
    if not is_float(dtype_of(left)):
        return op.floor_mod(left, right)
    rest = op.mod(left, right)
    other_sign = op.logical_xor(op.less(rest, 0), op.less(right, 0))
    return op.where(op.logical_and(op.not_equal(rest, 0), other_sign), op.add(rest, right), rest)


def power(op: Operators, base: relax.Expr, exponent: Any, dtype: str) -> relax.Expr:
    """Return ``base`` to the ``exponent`` (an expression or a number), computed and returned in ``dtype``.

    TVM's power takes operands of one float dtype and gives NaN for bases below 0, so integer powers become products.
    """
    numbers = numbers_of(exponent) if isinstance(exponent, relax.Expr) else np.asarray(exponent)
    number = float(numbers.astype("float64").item()) if numbers is not None and numbers.size == 1 else math.nan
    base = op.cast(base, dtype)
    if number.is_integer() and (0 if not is_float(dtype) else -64) <= number <= 64:
        result = _product(op, base, abs(int(number)))
        result = op.divide(1, result) if number < 0 else result
    elif number == 0.5 and is_float(dtype):
        result = op.sqrt(base)
    elif is_float(dtype):
        return op.power(base, op.cast(exponent, dtype))
    else:
        return op.cast(op.round(op.power(op.cast(base, "float64"), op.cast(exponent, "float64"))), dtype)
    shape = np.broadcast_shapes(shape_of(base), numbers.shape if numbers is not None else ())
    return result if list(shape) == shape_of(base) else op.broadcast_to(result, list(shape))


def _product(op: Operators, base: relax.Expr, count: int) -> relax.Expr:
    """The product of ``count`` factors ``base``."""
    if count < 2:
        return base if count else op.full_like(base, 1)
    half = _product(op, base, count // 2)
    square = op.multiply(half, half)
    return op.multiply(square, base) if count % 2 else square


def is_infinite(op: Operators, value: relax.Expr) -> relax.Expr:
    """Whether each element is infinite, of either sign; TVM's isinf does not compile."""
    return op.equal(op.abs(value), math.inf)


def half_to_even(op: Operators, value: relax.Expr) -> relax.Expr:
    """Round floats to integers, halves to even; TVM rounds halves away from zero."""
    below = op.floor(value)
    rest, halved = op.subtract(value, below), op.multiply(below, 0.5)
    is_odd = op.not_equal(op.floor(halved), halved)
    up = op.logical_or(op.greater(rest, 0.5), op.logical_and(op.equal(rest, 0.5), is_odd))
    return op.where(is_infinite(op, value), value, op.add(below, op.astype(up, dtype_of(value))))


def limited(op: Operators, value: relax.Expr, low: Any, high: Any) -> relax.Expr:
    """Clamp ``value`` between two limits, each an expression, a number, or None for no limit."""
    value = value if low is None else op.maximum(value, low)
    return value if high is None else op.minimum(value, high)


def counted_from_front(op: Operators, index: relax.Expr, size: int) -> relax.Expr:
    """Return int64 indices in 0 … size − 1; negative ones count from the end. TVM would read outside the tensor."""
    index = op.cast(index, "int64")
    numbers = numbers_of(index)
    if numbers is not None:
        return constant(np.where(numbers < 0, numbers + size, numbers), "int64")
    return op.where(op.less(index, 0), op.add(index, size), index)


def parts(op: Operators, data: relax.Expr, sizes: Sequence[int], axis: int) -> relax.Expr:
    """Split ``data`` into parts of ``sizes``; TVM's split refuses parts without elements."""
    ends = np.cumsum([0, *sizes]).tolist()
    if 0 not in sizes:
        return op.split(data, ends[1:-1], axis)
    return relax.Tuple([op.strided_slice(data, [axis], [first], [last]) for first, last in itertools.pairwise(ends)])
