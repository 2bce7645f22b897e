"""Convert elementwise operations, whose operands broadcast."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.compositions import (
    erfc,
    exp_minus_one,
    half_to_even,
    in_wide,
    is_infinite,
    limited,
    log_one_plus,
    polynomial,
    power,
    shifted,
    sign,
)
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import COMPARISONS, Operators, constant, dtype_of, is_float, numbers_of, wide
from tvm_split.frontends.stablehlo.conversions import HloCall
from tvm_split.frontends.stablehlo.modules import comparison, integer

Elementwise = Callable[..., relax.Expr]


def elementwise(op: Operators, call: HloCall, change: Elementwise) -> relax.Expr:
    """Convert an elementwise operation; ``change`` takes the operators and the operands, which broadcast."""
    return change(op, *call.operands)


def _named(name: str) -> Elementwise:
    return lambda op, *operands: getattr(op, name)(*operands)


def _of_numbers(name: str, of_booleans: str) -> Elementwise:
    """Return operator ``name``, but ``of_booleans`` for booleans, which StableHLO also adds and multiplies."""

    def change(op: Operators, *operands: relax.Expr) -> relax.Expr:
        return getattr(op, of_booleans if dtype_of(operands[0]) == "bool" else name)(*operands)

    return change


def _shift(op: Operators, operand: relax.Expr, by: relax.Expr, to_the_left: bool = False, logical: bool = False) -> Any:
    dtype = dtype_of(operand)
    if not logical:
        return shifted(op, operand, by, to_the_left)
    unsigned = dtype if dtype.startswith("u") else f"u{dtype}"
    return op.cast(shifted(op, op.cast(operand, unsigned), op.cast(by, unsigned), False), dtype)


def _half_away_from_zero(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Round halves away from zero; TVM's round depends on the target."""
    size = op.abs(operand)
    below = op.floor(size)
    is_up = op.greater_equal(op.subtract(size, below), 0.5)
    return op.multiply(op.sign(operand), op.where(is_up, op.add(below, 1), below))


@in_wide
def _cube_root(op: Operators, operand: relax.Expr) -> relax.Expr:
    return op.multiply(op.sign(operand), op.power(op.abs(operand), 1 / 3))


@in_wide
def _erf_inverse(op: Operators, x: relax.Expr) -> relax.Expr:
    """Return the inverse error function in single precision, as in XLA.

    Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011).
    """
    w = op.negative(op.log(op.multiply(op.subtract(1, x), op.add(x, 1))))
    is_central = op.less(w, 5)
    centre = op.subtract(w, 2.5)
    tail = op.subtract(op.sqrt(w), 3)
    result = op.where(is_central, polynomial(op, centre, _CENTRE), polynomial(op, tail, _TAIL))
    ends = op.multiply(op.sign(x), math.inf)
    return op.where(op.equal(op.abs(x), 1), ends, op.multiply(result, x))


_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _is_infinite(op: Operators, operand: relax.Expr, of_sign: float = 0) -> relax.Expr:
    return op.equal(operand, of_sign * math.inf) if of_sign else is_infinite(op, operand)


def _divided(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Divide like XLA: integers round towards zero; x / 0 has all bits set, and the minimum / -1 is itself."""
    dtype = dtype_of(left)
    if is_float(dtype) or _divides(right):
        return op.divide(left, right)
    is_signed = np.iinfo(dtype).min < 0
    quotient = op.divide(left, _divisor(op, right))
    if is_signed:
        quotient = op.where(op.equal(right, -1), op.negative(left), quotient)
    return op.where(op.equal(right, 0), constant(-1 if is_signed else np.iinfo(dtype).max, dtype), quotient)


def _remainder(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
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


def _converted(op: Operators, operand: relax.Expr, dtype: str) -> relax.Expr:
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


_UNARY: dict[str, Elementwise] = {
    **{name: _named(name) for name in ("abs", "log", "tanh", "sqrt", "rsqrt", "floor", "ceil")},
    "negate": _named("negative"),
    "exponential": _named("exp"),
    "logistic": _named("sigmoid"),
    "sine": _named("sin"),
    "cosine": _named("cos"),
    # TVM lacks these in half precision, or computes them inaccurately.
    "tan": in_wide(_named("tan")),
    "sign": sign,
    "round_nearest_afz": _half_away_from_zero,
    "round_nearest_even": half_to_even,
    "not": _of_numbers("bitwise_not", "logical_not"),
    "cbrt": _cube_root,
    "exponential_minus_one": exp_minus_one,
    "log_plus_one": log_one_plus,
    "is_finite": lambda op, x: op.less(op.abs(x), math.inf),
    "chlo.erfc": erfc,
    "chlo.erf_inv": _erf_inverse,
    "chlo.square": lambda op, x: op.multiply(x, x),
    "chlo.is_inf": _is_infinite,
    "chlo.is_pos_inf": partial(_is_infinite, of_sign=1),
    "chlo.is_neg_inf": partial(_is_infinite, of_sign=-1),
    **{
        f"chlo.{name}": in_wide(_named(name))
        for name in ("acos", "asin", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "tan", "erf")
    },
}

_BINARY: dict[str, Elementwise] = {
    "add": _of_numbers("add", "logical_or"),
    "subtract": _named("subtract"),
    "multiply": _of_numbers("multiply", "logical_and"),
    "divide": _divided,
    "remainder": _remainder,
    "maximum": _of_numbers("maximum", "logical_or"),
    "minimum": _of_numbers("minimum", "logical_and"),
    "power": lambda op, base, exponent: power(op, base, exponent, dtype_of(base)),
    "atan2": _named("atan2"),
    **{name: _of_numbers(f"bitwise_{name}", f"logical_{name}") for name in ("and", "or", "xor")},
    "shift_left": partial(_shift, to_the_left=True),
    "shift_right_arithmetic": _shift,
    "shift_right_logical": partial(_shift, logical=True),
    "select": lambda op, choice, left, right: op.where(choice, left, right),
    "clamp": lambda op, low, x, high: limited(op, x, low, high),
}


def _compare(op: Operators, call: HloCall) -> relax.Expr:
    (left, right), direction = call.source.operands, comparison(call.source)
    left_value, right_value = call.operands
    if left == right and is_float(dtype_of(left_value)) and direction in ("EQ", "NE"):
        # JAX tests for NaN by x != x, but TVM simplifies x == x to true.
        is_nan = op.isnan(op.cast(left_value, wide(dtype_of(left_value))))
        return is_nan if direction == "NE" else op.logical_not(is_nan)
    return getattr(op, COMPARISONS[direction.lower()])(left_value, right_value)


def _reduce_precision(op: Operators, call: HloCall) -> relax.Expr:
    """Round to a float format of fewer bits: bfloat16's, or one without loss; raise ModelImportError for others."""
    operand, dtype = call.operands[0], call.dtype
    exponent, mantissa = (integer(call.source, name) for name in ("exponent_bits", "mantissa_bits"))
    bits = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}[dtype]
    if exponent >= bits[0] and mantissa >= bits[1]:
        return operand
    if dtype == "float32" and (exponent, mantissa) == (8, 7):
        return op.cast(op.cast(operand, "bfloat16"), dtype)
    raise ModelImportError(
        f"it rounds {dtype} to {exponent} bits of exponent and {mantissa} of mantissa; "
        "of types of less precision only bfloat16's 8 and 7 can be imported, from float32"
    )


CONVERSIONS: dict[str, Conversion] = {
    **{name: partial(elementwise, change=change) for name, change in {**_UNARY, **_BINARY}.items()},
    "compare": _compare,
    "convert": lambda op, call: _converted(op, call.operands[0], call.dtype),
    "reduce_precision": _reduce_precision,
}
