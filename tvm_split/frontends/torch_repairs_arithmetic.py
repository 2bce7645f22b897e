"""Repairs of element-wise operators: TVM's importer promotes dtypes, rounds and clamps differently from torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.exact_arithmetic import floor_remainder, shifted
from tvm_split.frontends.torch_repair_tools import (
    Importer,
    Repair,
    arguments,
    cast,
    common_dtype,
    constant,
    dtype_of,
    emit,
    float_dtype,
    is_float,
    result_dtype,
)

Operator = Callable[..., relax.Expr]


def _operands(node: fx.Node, importer: Importer) -> tuple[Any, Any]:
    values = list(arguments(node, importer).values())
    return values[0], values[1]


def _promoted(node: fx.Node, importer: Importer, dtype: str | None = None) -> tuple[relax.Expr, relax.Expr, str]:
    """Both operands in the dtype in which torch computes."""
    common = dtype or common_dtype(node.args[0], node.args[1])
    left, right = _operands(node, importer)
    return cast(importer, left, common), cast(importer, right, common), common


def _binary(operator: Operator, on_booleans: Operator | None = None) -> Repair:
    # TVM casts a Python number to the tensor's dtype: 0.5 becomes 0 beside integers. It also ignores alpha, and
    # promotes zero-dimensional tensors like others.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        left, right, dtype = _promoted(node, importer)
        alpha = arguments(node, importer).get("alpha", 1)
        if alpha != 1:
            right = emit(importer, relax.op.multiply(right, constant(alpha, dtype)))
        chosen = on_booleans if dtype == "bool" and on_booleans is not None else operator
        return emit(importer, chosen(left, right))

    return convert


def _remainder(node: fx.Node, importer: Importer) -> relax.Expr:
    left, right, _ = _promoted(node, importer)
    return floor_remainder(importer.block_builder, left, right)


def _shift(to_the_left: bool) -> Repair:
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        left, right, _ = _promoted(node, importer)
        return shifted(importer.block_builder, left, right, to_the_left)

    return convert


def _reversed_subtraction(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM ignores alpha, and subtracts from a float32 constant whatever the tensor's dtype.
    left, right, dtype = _promoted(node, importer)
    alpha = arguments(node, importer).get("alpha", 1)
    if alpha != 1:
        left = emit(importer, relax.op.multiply(left, constant(alpha, dtype)))
    return emit(importer, relax.op.subtract(right, left))


def _divide(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM divides integers as integers where torch makes floats, and rounds them through floats where torch does not.
    mode = arguments(node, importer).get("rounding_mode")
    dtype = common_dtype(node.args[0], node.args[1])
    if mode is None:
        left, right, _ = _promoted(node, importer, float_dtype(dtype))
        return emit(importer, relax.op.divide(left, right))
    left, right, _ = _promoted(node, importer)
    if mode == "floor":
        return emit(importer, relax.op.floor_divide(left, right))
    quotient = emit(importer, relax.op.divide(left, right))
    return emit(importer, relax.op.trunc(quotient)) if is_float(dtype) else quotient


def _power(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's power takes no integers, casts a float exponent to an integer base's dtype, and gives NaN for bases below 0.
    dtype = common_dtype(node.args[0], node.args[1])
    base, exponent = _operands(node, importer)
    if isinstance(exponent, int | float) and float(exponent).is_integer() and 0 <= exponent <= 64:
        return _repeated_product(importer, cast(importer, base, dtype), int(exponent), dtype)
    if is_float(dtype):
        if isinstance(exponent, int | float) and exponent == 0.5:
            return emit(importer, relax.op.sqrt(cast(importer, base, dtype)))
        if isinstance(exponent, int | float) and float(exponent).is_integer() and -64 <= exponent < 0:
            product = _repeated_product(importer, cast(importer, base, dtype), -int(exponent), dtype)
            return emit(importer, relax.op.divide(constant(1, dtype), product))
        return emit(importer, relax.op.power(cast(importer, base, dtype), cast(importer, exponent, dtype)))
    power = relax.op.power(cast(importer, base, "float64"), cast(importer, exponent, "float64"))
    return cast(importer, emit(importer, relax.op.round(emit(importer, power))), dtype)


def _repeated_product(importer: Importer, base: relax.Expr, exponent: int, dtype: str) -> relax.Expr:
    if exponent == 0:
        return emit(importer, relax.op.full_like(base, constant(1, dtype)))
    result: relax.Expr | None = None
    square = base
    while exponent:
        if exponent & 1:
            result = square if result is None else emit(importer, relax.op.multiply(result, square))
        exponent >>= 1
        if exponent:
            square = emit(importer, relax.op.multiply(square, square))
    return result


def _float_unary(operator: Operator) -> Repair:
    # TVM refuses integers, or keeps them integers, where torch makes floats.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        value = arguments(node, importer)["self"]
        return emit(importer, operator(cast(importer, value, float_dtype(dtype_of(value)))))

    return convert


def _rounding(operator: Operator) -> Repair:
    # Integers are round already, and TVM's operators do not take them.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        value = arguments(node, importer)["self"]
        return emit(importer, operator(value)) if is_float(dtype_of(value)) else value

    return convert


def _reciprocal(value: relax.Expr) -> relax.Expr:
    return relax.op.divide(constant(1, dtype_of(value)), value)


def _logarithm(base: float) -> Operator:
    return lambda value: relax.op.multiply(relax.op.log(value), constant(1 / math.log(base), dtype_of(value)))


def _is_infinite(importer: Importer, value: relax.Expr) -> relax.Expr:
    return emit(importer, relax.op.equal(relax.op.abs(value), constant(math.inf, dtype_of(value))))


def _isinf(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's isinf and isfinite do not compile.
    return _is_infinite(importer, arguments(node, importer)["self"])


def _isfinite(node: fx.Node, importer: Importer) -> relax.Expr:
    value = arguments(node, importer)["self"]
    return emit(importer, relax.op.less(relax.op.abs(value), constant(math.inf, dtype_of(value))))


def _logaddexp(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's log_add_exp does not compile.
    left, right, dtype = _promoted(node, importer)
    difference = emit(importer, relax.op.abs(relax.op.subtract(left, right)))
    rest = emit(importer, relax.op.log(relax.op.add(relax.op.exp(relax.op.negative(difference)), constant(1, dtype))))
    return emit(importer, relax.op.add(relax.op.maximum(left, right), rest))


def _copysign(node: fx.Node, importer: Importer) -> relax.Expr:
    left, right, dtype = _promoted(node, importer)
    size = emit(importer, relax.op.abs(left))
    is_negative = emit(importer, relax.op.less(right, constant(0, dtype)))
    return emit(importer, relax.op.where(is_negative, relax.op.negative(size), size))


def _series(importer: Importer, x: relax.Expr, coefficients: list[float]) -> relax.Expr:
    """x · (c₀ + c₁·x + c₂·x² + …)."""
    dtype = dtype_of(x)
    total = constant(coefficients[-1], dtype)
    for coefficient in reversed(coefficients[:-1]):
        product = emit(importer, relax.op.multiply(x, total))
        total = emit(importer, relax.op.add(product, constant(coefficient, dtype)))
    return emit(importer, relax.op.multiply(x, total))


def _near_zero(coefficients: list[float], limit: float, elsewhere: Operator) -> Repair:
    # TVM computes log(1 + x) and exp(x) − 1, which are 0 for a small x, and simplifies better formulas to the same:
    # near 0, the first terms of the series.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        value = arguments(node, importer)["self"]
        x = cast(importer, value, float_dtype(dtype_of(value)))
        near = _series(importer, x, coefficients)
        is_near = emit(importer, relax.op.less(relax.op.abs(x), constant(limit, dtype_of(x))))
        return emit(importer, relax.op.where(is_near, near, elsewhere(x)))

    return convert


_LOG1P = _near_zero(
    [(-1) ** power / (power + 1) for power in range(12)],
    0.1,
    lambda x: relax.op.log(relax.op.add(x, constant(1, dtype_of(x)))),
)
_EXPM1 = _near_zero(
    [1 / math.factorial(power + 1) for power in range(12)],
    0.5,
    lambda x: relax.op.subtract(relax.op.exp(x), constant(1, dtype_of(x))),
)


def _exp2(value: relax.Expr) -> relax.Expr:
    return relax.op.exp(relax.op.multiply(value, constant(math.log(2), dtype_of(value))))


def _erfc(value: relax.Expr) -> relax.Expr:
    return relax.op.subtract(constant(1, dtype_of(value)), relax.op.erf(value))


def _hypot(node: fx.Node, importer: Importer) -> relax.Expr:
    left, right, _ = _promoted(node, importer)
    return emit(importer, relax.op.sqrt(relax.op.add(relax.op.square(left), relax.op.square(right))))


def _round(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM rounds halves away from zero; torch rounds them to even.
    values = arguments(node, importer)
    value, decimals = values["self"], int(values.get("decimals", 0))
    dtype = dtype_of(value)
    if not is_float(dtype):
        if decimals < 0:
            raise ModelImportError("integers cannot be rounded to tens here")
        return value
    if decimals:
        wide = "float32" if dtype in ("float16", "bfloat16") else dtype
        scale = constant(10.0 ** abs(decimals), wide)
        before, after = (relax.op.multiply, relax.op.divide) if decimals > 0 else (relax.op.divide, relax.op.multiply)
        scaled = emit(importer, before(cast(importer, value, wide), scale))
        return cast(importer, emit(importer, after(_half_to_even(importer, scaled), scale)), dtype)
    return _half_to_even(importer, value)


def _half_to_even(importer: Importer, value: relax.Expr) -> relax.Expr:
    dtype = dtype_of(value)
    below = emit(importer, relax.op.floor(value))
    rest = emit(importer, relax.op.subtract(value, below))
    half = constant(0.5, dtype)
    halved = emit(importer, relax.op.multiply(below, half))
    is_odd = emit(importer, relax.op.not_equal(relax.op.floor(halved), halved))
    is_half = emit(importer, relax.op.equal(rest, half))
    up = emit(importer, relax.op.logical_or(relax.op.greater(rest, half), relax.op.logical_and(is_half, is_odd)))
    rounded = emit(importer, relax.op.add(below, relax.op.astype(up, dtype)))
    return emit(importer, relax.op.where(_is_infinite(importer, value), value, rounded))


def _clamp(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM keeps an integer tensor's dtype where a float limit makes floats, reads clamp_max's limit from the wrong
    # argument, and makes integer limits from infinities.
    values = arguments(node, importer)
    dtype = result_dtype(node)
    result = cast(importer, values["self"], dtype)
    for limit, operator in ((values.get("min"), relax.op.maximum), (values.get("max"), relax.op.minimum)):
        if limit is not None:
            result = emit(importer, operator(result, cast(importer, limit, dtype)))
    return result


def _comparison(operator: Operator) -> Repair:
    # TVM casts a Python number to the tensor's dtype: an integer tensor > 1.5 becomes > 1.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        left, right, dtype = _promoted(node, importer)
        if dtype == "bool":
            left, right = cast(importer, left, "int8"), cast(importer, right, "int8")
        return emit(importer, operator(left, right))

    return convert


def _logical(operator: Operator) -> Repair:
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        left, right = _operands(node, importer)
        return emit(importer, operator(cast(importer, left, "bool"), cast(importer, right, "bool")))

    return convert


def _bitwise(operator: Operator, on_booleans: Operator) -> Repair:
    return _binary(operator, on_booleans)


def _bitwise_not(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM inverts the bits of a boolean's byte.
    value = arguments(node, importer)["self"]
    return emit(importer, relax.op.logical_not(value) if dtype_of(value) == "bool" else relax.op.bitwise_not(value))


def _where(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM does not promote the dtypes of the two values.
    values = arguments(node, importer)
    dtype = result_dtype(node)
    chosen, other = cast(importer, values["self"], dtype), cast(importer, values["other"], dtype)
    return emit(importer, relax.op.where(cast(importer, values["condition"], "bool"), chosen, other))


def _masked_fill(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    dtype = result_dtype(node)
    kept, filled = cast(importer, values["self"], dtype), cast(importer, values["value"], dtype)
    return emit(importer, relax.op.where(values["mask"], filled, kept))


def _to_copy(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's cast of floats to booleans goes through integers: 0.5 becomes False.
    value = arguments(node, importer)["self"]
    dtype = result_dtype(node)
    if dtype == "bool" and dtype_of(value) != "bool":
        return emit(importer, relax.op.not_equal(value, constant(0, dtype_of(value))))
    return cast(importer, value, dtype)


REPAIRS: dict[str, Repair] = {
    **{f"add.{kind}": _binary(relax.op.add, relax.op.logical_or) for kind in ("Tensor", "Scalar")},
    **{f"sub.{kind}": _binary(relax.op.subtract) for kind in ("Tensor", "Scalar")},
    **{f"mul.{kind}": _binary(relax.op.multiply, relax.op.logical_and) for kind in ("Tensor", "Scalar")},
    **{f"rsub.{kind}": _reversed_subtraction for kind in ("Tensor", "Scalar")},
    **{f"div.{kind}": _divide for kind in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode")},
    "floor_divide.default": _binary(relax.op.floor_divide),
    **{f"remainder.{kind}": _remainder for kind in ("Tensor", "Scalar", "Scalar_Tensor")},
    **{f"fmod.{kind}": _binary(relax.op.mod) for kind in ("Tensor", "Scalar")},
    **{f"pow.{kind}": _power for kind in ("Tensor_Scalar", "Tensor_Tensor", "Scalar")},
    **{f"bitwise_and.{k}": _bitwise(relax.op.bitwise_and, relax.op.logical_and) for k in ("Tensor", "Scalar")},
    **{f"bitwise_or.{k}": _bitwise(relax.op.bitwise_or, relax.op.logical_or) for k in ("Tensor", "Scalar")},
    **{f"bitwise_xor.{k}": _bitwise(relax.op.bitwise_xor, relax.op.logical_xor) for k in ("Tensor", "Scalar")},
    **{f"bitwise_left_shift.{k}": _shift(to_the_left=True) for k in ("Tensor", "Tensor_Scalar")},
    **{f"bitwise_right_shift.{k}": _shift(to_the_left=False) for k in ("Tensor", "Tensor_Scalar")},
    **{f"__lshift__.{k}": _shift(to_the_left=True) for k in ("Tensor", "Scalar")},
    **{f"__rshift__.{k}": _shift(to_the_left=False) for k in ("Tensor", "Scalar")},
    "bitwise_not.default": _bitwise_not,
    **{f"gt.{kind}": _comparison(relax.op.greater) for kind in ("Tensor", "Scalar")},
    **{f"ge.{kind}": _comparison(relax.op.greater_equal) for kind in ("Tensor", "Scalar")},
    **{f"lt.{kind}": _comparison(relax.op.less) for kind in ("Tensor", "Scalar")},
    **{f"le.{kind}": _comparison(relax.op.less_equal) for kind in ("Tensor", "Scalar")},
    **{f"eq.{kind}": _comparison(relax.op.equal) for kind in ("Tensor", "Scalar")},
    **{f"ne.{kind}": _comparison(relax.op.not_equal) for kind in ("Tensor", "Scalar")},
    "logical_and.default": _logical(relax.op.logical_and),
    "logical_or.default": _logical(relax.op.logical_or),
    "logical_xor.default": _logical(relax.op.logical_xor),
    "where.self": _where,
    "masked_fill.Scalar": _masked_fill,
    "masked_fill.Tensor": _masked_fill,
    "_to_copy.default": _to_copy,
    "to.dtype": _to_copy,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "clamp_min.default": _clamp,
    "clamp_min.Tensor": _clamp,
    "clamp_max.default": _clamp,
    "clamp_max.Tensor": _clamp,
    "round.default": _round,
    "round.decimals": _round,
    "floor.default": _rounding(relax.op.floor),
    "ceil.default": _rounding(relax.op.ceil),
    "trunc.default": _rounding(relax.op.trunc),
    "isinf.default": _isinf,
    "isfinite.default": _isfinite,
    "logaddexp.default": _logaddexp,
    "copysign.Tensor": _copysign,
    "maximum.default": _binary(relax.op.maximum),
    "minimum.default": _binary(relax.op.minimum),
    "log1p.default": _LOG1P,
    "expm1.default": _EXPM1,
    "reciprocal.default": _float_unary(_reciprocal),
    "sqrt.default": _float_unary(relax.op.sqrt),
    "rsqrt.default": _float_unary(relax.op.rsqrt),
    "exp2.default": _float_unary(_exp2),
    "erfc.default": _float_unary(_erfc),
    "hypot.default": _hypot,
    "exp.default": _float_unary(relax.op.exp),
    "log.default": _float_unary(relax.op.log),
    "log2.default": _float_unary(_logarithm(2)),
    "log10.default": _float_unary(_logarithm(10)),
    "sin.default": _float_unary(relax.op.sin),
    "cos.default": _float_unary(relax.op.cos),
    "tan.default": _float_unary(relax.op.tan),
    "tanh.default": _float_unary(relax.op.tanh),
    "sigmoid.default": _float_unary(relax.op.sigmoid),
    "erf.default": _float_unary(relax.op.erf),
}
"""By the name of the ATen overload."""
