"""Convert elementwise operations, whose operands broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax

from tvm_split.frontends.compositions import half_to_even, is_infinite, power, shifted
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, numbers_of, wide
from tvm_split.frontends.stablehlo.attributes import comparison, integer
from tvm_split.frontends.stablehlo.conversions.arithmetic import (
    converted,
    divided,
    erfc,
    exp_minus_one,
    less_precise,
    log_one_plus,
    polynomial,
    remainder,
)
from tvm_split.frontends.stablehlo.conversions.call import Call, Conversions

Elementwise = Callable[..., relax.Expr]


def elementwise(op: Operators, call: Call, change: Elementwise) -> relax.Expr:
    """Convert an elementwise operation; ``change`` takes the operators and the operands, which broadcast."""
    return change(op, *call.operands)


def _named(name: str) -> Elementwise:
    return lambda op, *operands: getattr(op, name)(*operands)


def _in_float32(name: str) -> Elementwise:
    """Compute an operator in float32 for half precision, which TVM lacks or computes inaccurately."""

    def change(op: Operators, operand: relax.Expr) -> relax.Expr:
        dtype = dtype_of(operand)
        return op.cast(getattr(op, name)(op.cast(operand, wide(dtype))), dtype)

    return change


def _bitwise(name: str) -> Elementwise:
    def change(op: Operators, *operands: relax.Expr) -> relax.Expr:
        kind = "logical" if dtype_of(operands[0]) == "bool" else "bitwise"
        return getattr(op, f"{kind}_{name}")(*operands)

    return change


def _of_numbers(name: str, of_booleans: str) -> Elementwise:
    """Use ``of_booleans`` for booleans, which StableHLO also adds and multiplies."""

    def change(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
        return getattr(op, of_booleans if dtype_of(left) == "bool" else name)(left, right)

    return change


def _power(op: Operators, base: relax.Expr, exponent: relax.Expr) -> relax.Expr:
    dtype = dtype_of(base)
    numbers = numbers_of(exponent)
    if not is_float(dtype) or (numbers is not None and (numbers.size == 1 and float(numbers.reshape(())) % 1 == 0)):
        return power(op, base, exponent, dtype)
    # TVM's power gives NaN for every base below 0, also where the exponent is a whole number.
    computed = wide(dtype)
    base, exponent = op.cast(base, computed), op.cast(exponent, computed)
    size = op.power(op.abs(base), exponent)
    is_odd = op.not_equal(op.mod(exponent, constant(2, computed)), 0)
    is_whole = op.equal(op.floor(exponent), exponent)
    below = op.where(is_whole, op.where(is_odd, op.negative(size), size), constant(math.nan, computed))
    return op.cast(op.where(op.less(base, 0), below, size), dtype)


def _compared(op: Operators, left: relax.Expr, right: relax.Expr, direction: str) -> relax.Expr:
    if dtype_of(left) == "bool":  # TVM's comparisons of booleans do not compile
        left, right = op.cast(left, "int8"), op.cast(right, "int8")
    names = {"EQ": "equal", "NE": "not_equal", "LT": "less", "LE": "less_equal", "GT": "greater", "GE": "greater_equal"}
    return getattr(op, names[direction])(left, right)


def _shift(op: Operators, operand: relax.Expr, by: relax.Expr, to_the_left: bool = False, logical: bool = False) -> Any:
    dtype = dtype_of(operand)
    if not logical:
        return shifted(op, operand, by, to_the_left)
    unsigned = dtype if dtype.startswith("u") else f"u{dtype}"
    return op.cast(shifted(op, op.cast(operand, unsigned), op.cast(by, unsigned), False), dtype)


def _clamped(op: Operators, low: relax.Expr, operand: relax.Expr, high: relax.Expr) -> relax.Expr:
    return op.minimum(op.maximum(operand, low), high)


def _half_away_from_zero(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Round halves away from zero; TVM's round depends on the target."""
    size = op.abs(operand)
    below = op.floor(size)
    is_up = op.greater_equal(op.subtract(size, below), 0.5)
    return op.multiply(op.sign(operand), op.where(is_up, op.add(below, 1), below))


def _sign(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Return the sign; NaN for NaN and -0 for -0, which TVM's operator turns into 0."""
    if not is_float(dtype_of(operand)):
        return op.sign(operand)
    return op.where(op.greater(operand, 0), 1, op.where(op.less(operand, 0), -1, operand))


def _cube_root(op: Operators, operand: relax.Expr) -> relax.Expr:
    dtype = dtype_of(operand)
    wider = op.cast(operand, wide(dtype))
    third = constant(1 / 3, wide(dtype))
    return op.cast(op.multiply(op.sign(wider), op.power(op.abs(wider), third)), dtype)


def _erf_inverse(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Return the inverse error function in single precision, as in XLA.

    Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011).
    """
    dtype = dtype_of(operand)
    x = op.cast(operand, wide(dtype))
    w = op.negative(op.log(op.multiply(op.subtract(1, x), op.add(x, 1))))
    is_central = op.less(w, 5)
    centre = op.subtract(w, 2.5)
    tail = op.subtract(op.sqrt(w), 3)
    result = op.where(is_central, polynomial(op, centre, _CENTRE), polynomial(op, tail, _TAIL))
    ends = op.multiply(op.sign(x), constant(math.inf, wide(dtype)))
    return op.cast(op.where(op.equal(op.abs(x), 1), ends, op.multiply(result, x)), dtype)


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


def _finite(op: Operators, operand: relax.Expr) -> relax.Expr:
    return op.less(op.abs(operand), constant(math.inf, dtype_of(operand)))


_UNARY: dict[str, Elementwise] = {
    "stablehlo.abs": _named("abs"),
    "stablehlo.negate": _named("negative"),
    "stablehlo.exponential": _named("exp"),
    "stablehlo.log": _named("log"),
    "stablehlo.tanh": _named("tanh"),
    "stablehlo.logistic": _named("sigmoid"),
    "stablehlo.sqrt": _named("sqrt"),
    "stablehlo.rsqrt": _named("rsqrt"),
    "stablehlo.sine": _named("sin"),
    "stablehlo.cosine": _named("cos"),
    "stablehlo.tan": _in_float32("tan"),
    "stablehlo.floor": _named("floor"),
    "stablehlo.ceil": _named("ceil"),
    "stablehlo.sign": lambda op, x: _sign(op, x),
    "stablehlo.round_nearest_afz": lambda op, x: _half_away_from_zero(op, x),
    "stablehlo.round_nearest_even": lambda op, x: half_to_even(op, x),
    "stablehlo.not": _bitwise("not"),
    "stablehlo.cbrt": _cube_root,
    "stablehlo.exponential_minus_one": exp_minus_one,
    "stablehlo.log_plus_one": log_one_plus,
    "stablehlo.is_finite": _finite,
    "chlo.erf": _in_float32("erf"),
    "chlo.erfc": erfc,
    "chlo.erf_inv": _erf_inverse,
    "chlo.square": lambda op, x: op.multiply(x, x),
    "chlo.is_inf": _is_infinite,
    "chlo.is_pos_inf": partial(_is_infinite, of_sign=1),
    "chlo.is_neg_inf": partial(_is_infinite, of_sign=-1),
    **{
        f"chlo.{name}": _in_float32(name)
        for name in ("acos", "asin", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "tan")
    },
}

_BINARY: dict[str, Elementwise] = {
    "stablehlo.add": _of_numbers("add", "logical_or"),
    "stablehlo.subtract": _named("subtract"),
    "stablehlo.multiply": _of_numbers("multiply", "logical_and"),
    "stablehlo.divide": divided,
    "stablehlo.remainder": remainder,
    "stablehlo.maximum": _of_numbers("maximum", "logical_or"),
    "stablehlo.minimum": _of_numbers("minimum", "logical_and"),
    "stablehlo.power": _power,
    "stablehlo.atan2": _named("atan2"),
    "stablehlo.and": _bitwise("and"),
    "stablehlo.or": _bitwise("or"),
    "stablehlo.xor": _bitwise("xor"),
    "stablehlo.shift_left": partial(_shift, to_the_left=True),
    "stablehlo.shift_right_arithmetic": _shift,
    "stablehlo.shift_right_logical": partial(_shift, logical=True),
    "stablehlo.select": lambda op, choice, left, right: op.where(choice, left, right),
    "stablehlo.clamp": _clamped,
}


def _compare(op: Operators, call: Call) -> relax.Expr:
    (left, right), direction = call.operation.operands, comparison(call.operation)
    value, other = call.operands
    if left == right and is_float(dtype_of(value)) and direction in ("EQ", "NE"):
        # JAX tests for NaN by x != x, but TVM simplifies x == x to true.
        found = op.isnan(op.cast(value, wide(dtype_of(value))))
        return found if direction == "NE" else op.logical_not(found)
    return _compared(op, value, other, direction)


def _reduce_precision(op: Operators, call: Call) -> relax.Expr:
    bits = (integer(call.operation, name) for name in ("exponent_bits", "mantissa_bits"))
    return less_precise(op, call.operands[0], *bits)


CONVERSIONS: Conversions = {
    **{name: partial(elementwise, change=change) for name, change in {**_UNARY, **_BINARY}.items()},
    "stablehlo.compare": _compare,
    "stablehlo.convert": lambda op, call: converted(op, call.operands[0], call.dtype),
    "stablehlo.reduce_precision": _reduce_precision,
}
