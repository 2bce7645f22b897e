"""Arithmetic with defined edge cases, or more accurate than TVM's; results have the operands' dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, numbers_of, wide


def divided(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Divide like XLA: integers round towards zero; x / 0 has all bits set, and the minimum / -1 is itself."""
    dtype = dtype_of(left)
    if is_float(dtype) or _divides(right):
        return op.divide(left, right)
    is_signed = np.iinfo(dtype).min < 0
    quotient = op.divide(left, _divisor(op, right))
    if is_signed:
        quotient = op.where(op.equal(right, -1), op.negative(left), quotient)
    return op.where(op.equal(right, 0), constant(-1 if is_signed else np.iinfo(dtype).max, dtype), quotient)


def remainder(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Return the remainder with the dividend's sign; of an integer by 0 it is the dividend, as in XLA."""
    if is_float(dtype_of(left)) or _divides(right):
        return op.mod(left, right)
    return op.where(op.equal(right, 0), left, op.mod(left, _divisor(op, right)))


def _divides(right: relax.Expr) -> bool:
    """Whether ``right`` is a constant without 0 and -1; division of integers by these can end the process."""
    numbers = numbers_of(right)
    return numbers is not None and not np.isin(numbers.astype("int64"), (0, -1)).any()


def _divisor(op: Operators, right: relax.Expr) -> relax.Expr:
    """Replace 0 in ``right`` by 1, and -1 as well, since the minimum of a signed dtype / -1 overflows."""
    is_unsafe = op.equal(right, 0)
    if np.iinfo(dtype_of(right)).min < 0:
        is_unsafe = op.logical_or(is_unsafe, op.equal(right, -1))
    return op.where(is_unsafe, 1, right)


def converted(op: Operators, operand: relax.Expr, dtype: str) -> relax.Expr:
    """Convert to ``dtype`` like XLA: floats to integers round towards zero and saturate, and NaN becomes 0."""
    source = dtype_of(operand)
    if dtype == "bool" and source != "bool":
        return op.not_equal(operand, constant(0, source))
    if not is_float(source) or is_float(dtype) or dtype == "bool":
        return op.cast(operand, dtype)
    limits = np.iinfo(dtype)
    value = op.cast(operand, wide(source))
    is_below, is_above = op.less_equal(value, float(limits.min)), op.greater_equal(value, float(limits.max))
    is_inside = op.logical_and(op.greater(value, float(limits.min)), op.less(value, float(limits.max)))
    result = op.cast(op.where(is_inside, value, 0), dtype)
    return op.where(is_above, constant(limits.max, dtype), op.where(is_below, constant(limits.min, dtype), result))


def less_precise(op: Operators, operand: relax.Expr, exponent_bits: int, mantissa_bits: int) -> relax.Expr:
    """Round ``operand`` to a float of so many bits; supported are bfloat16's, and at least the operand's own."""
    dtype = dtype_of(operand)
    own = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}[dtype]
    if exponent_bits >= own[0] and mantissa_bits >= own[1]:
        return operand
    if dtype == "float32" and (exponent_bits, mantissa_bits) == (8, 7):
        return op.cast(op.cast(operand, "bfloat16"), dtype)
    raise ModelImportError(
        f"it rounds {dtype} to {exponent_bits} bits of exponent and {mantissa_bits} of mantissa; "
        "of types of less precision only bfloat16's 8 and 7 can be imported, from float32"
    )


def exp_minus_one(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Return exp(x) - 1; for abs(x) < 0.5 by Taylor's series, since the subtraction would lose x's digits."""
    dtype = dtype_of(operand)
    x = op.cast(operand, wide(dtype))
    series: Any = op.full_like(x, 1)
    for count in range(16 if dtype == "float64" else 9, 1, -1):
        series = op.add(op.multiply(op.multiply(x, 1 / count), series), 1)
    is_small = op.less(op.abs(x), 0.5)
    return op.cast(op.where(is_small, op.multiply(x, series), op.subtract(op.exp(x), 1)), dtype)


def log_one_plus(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Return log(1 + x); for abs(x) < 0.5 by the series of 2 artanh(x / (2 + x)) (Abramowitz and Stegun, 4.1.27)."""
    dtype = dtype_of(operand)
    x = op.cast(operand, wide(dtype))
    is_small = op.less(op.abs(x), 0.5)
    near = op.where(is_small, x, 0)
    ratio = op.divide(near, op.add(near, 2))
    odd = [2 / (2 * count + 1) for count in range(18 if dtype == "float64" else 8)]
    series = op.multiply(ratio, polynomial(op, op.multiply(ratio, ratio), odd[::-1]))
    return op.cast(op.where(is_small, series, op.log(op.add(x, 1))), dtype)


def erfc(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Return the complementary error function, with a relative error up to 1.2e-7.

    Press et al., Numerical Recipes, 6.2 (erfcc): a Chebyshev fit in t = 1 / (1 + |x| / 2). In double precision it is
    used only for x > 2, where 1 - erf(x) is less accurate.
    """
    dtype = dtype_of(operand)
    x = op.cast(operand, wide(dtype))
    size = op.abs(x)
    t = op.divide(1, op.add(op.multiply(size, 0.5), 1))
    exponent = op.subtract(polynomial(op, t, _ERFC), op.multiply(size, size))
    beyond = op.multiply(t, op.exp(exponent))
    result = op.where(op.less(x, 0), op.subtract(2, beyond), beyond)
    if dtype == "float64":
        result = op.where(op.greater(x, 2), result, op.subtract(1, op.erf(x)))
    return op.cast(result, dtype)


_ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def polynomial(op: Operators, x: relax.Expr, factors: tuple[float, ...] | list[float]) -> relax.Expr:
    """Evaluate a polynomial by Horner's rule; the coefficient of the highest power is first."""
    result: Any = op.full_like(x, factors[0])
    for factor in factors[1:]:
        result = op.add(op.multiply(result, x), factor)
    return result
