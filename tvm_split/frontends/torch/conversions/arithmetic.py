"""Conversions of elementwise operators: TVM's importer promotes dtypes, rounds and clamps differently from torch."""

import math
from collections.abc import Callable
from functools import partial

from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.compositions import (
    erfc,
    exp_minus_one,
    floor_quotient,
    floor_remainder,
    half_to_even,
    hypotenuse,
    limited,
    log_one_plus,
    power,
    shifted,
)
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import COMPARISONS, Operators, dtype_of, is_float, wide
from tvm_split.frontends.torch.conversions import TorchCall, float_dtype

Unary = Callable[[Operators, relax.Expr], relax.Expr]


def _promoted(op: Operators, call: TorchCall, dtype: str = "") -> tuple[relax.Expr, relax.Expr]:
    """Cast both operands to ``dtype``, by default to the dtype to which torch promotes them."""
    left, right = call.operands[:2]
    return op.cast(left, dtype or call.common_dtype), op.cast(right, dtype or call.common_dtype)


def _binary(op: Operators, call: TorchCall, operator: str, on_booleans: str = "") -> relax.Expr:
    # TVM casts a Python number to the tensor's dtype: for an integer tensor, 0.5 becomes 0. It also ignores alpha, and
    # promotes zero-dimensional tensors like others.
    # Python numbers stay wider than half precision in sums and products, as in torch.
    dtype = call.arithmetic_dtype if operator in ("add", "subtract", "multiply") else call.common_dtype
    left, right = _promoted(op, call, dtype)
    if call.get("alpha", 1) != 1:
        right = op.multiply(right, call["alpha"])
    result = getattr(op, on_booleans if on_booleans and call.common_dtype == "bool" else operator)(left, right)
    return result if dtype == call.common_dtype else op.cast(result, call.common_dtype)


def _remainder(op: Operators, call: TorchCall) -> relax.Expr:
    return floor_remainder(op, *_promoted(op, call))


def _shift(op: Operators, call: TorchCall) -> relax.Expr:
    return shifted(op, *_promoted(op, call), to_the_left=call.operation.kind.startswith(("__lshift__", "bitwise_left")))


def _divide(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM divides integers as integers where torch uses floats, and rounds by floats where torch uses integers.
    mode, dtype = call.get("rounding_mode"), call.common_dtype
    if mode is None:
        return op.cast(op.divide(*_promoted(op, call, float_dtype(call.arithmetic_dtype))), float_dtype(dtype))
    operands = _promoted(op, call, call.arithmetic_dtype)
    if mode == "floor":
        return op.cast(floor_quotient(op, *operands), dtype)
    quotient = op.divide(*operands)
    return op.cast(op.trunc(quotient), dtype) if is_float(dtype) else quotient


def _power(op: Operators, call: TorchCall) -> relax.Expr:
    # Unlike those of sums and products, Python numbers are rounded to half precision.
    exponent = op.cast(call.operands[1], call.common_dtype) if is_float(call.common_dtype) else call.operands[1]
    return power(op, call.operands[0], exponent, call.common_dtype)


def _float_unary(op: Operators, call: TorchCall, operator: str | Unary) -> relax.Expr:
    # TVM refuses integers or returns integers, where torch returns floats.
    dtype = float_dtype(dtype_of(call["self"]))
    if isinstance(operator, str):
        return getattr(op, operator)(op.cast(call["self"], dtype))
    # In half precision, each step would be rounded.
    return op.cast(operator(op, op.cast(call["self"], wide(dtype))), dtype)


def _rounding(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # Integers need no rounding, and TVM's operators do not accept them.
    return getattr(op, operator)(call["self"]) if is_float(dtype_of(call["self"])) else call["self"]


def _round(op: Operators, call: TorchCall) -> relax.Expr:
    value, decimals = call["self"], call.get("decimals", 0)
    dtype = dtype_of(value)
    if not is_float(dtype):
        if decimals < 0:
            raise ModelImportError("integers cannot be rounded to tens here")
        return value
    if not decimals:
        return half_to_even(op, value)
    scale = 10.0 ** abs(decimals)
    before, after = (op.multiply, op.divide) if decimals > 0 else (op.divide, op.multiply)
    return op.cast(after(half_to_even(op, before(op.cast(value, wide(dtype)), scale)), scale), dtype)


_UNARY: dict[str, str | Unary] = {
    **{name: name for name in ("sqrt", "rsqrt", "exp", "log", "sigmoid", "erf")},
    **{f"{arc}{name}{h}": f"{arc}{name}{h}" for name in ("sin", "cos", "tan") for arc in ("", "a") for h in ("", "h")},
    "log1p": log_one_plus,
    "expm1": exp_minus_one,
    "reciprocal": lambda op, x: op.divide(1, x),
    "exp2": lambda op, x: op.exp(op.multiply(x, math.log(2))),
    "erfc": erfc,
    "special_ndtr": lambda op, x: op.multiply(erfc(op, op.multiply(x, -math.sqrt(0.5))), 0.5),
    "log2": lambda op, x: op.multiply(op.log(x), 1 / math.log(2)),
    "log10": lambda op, x: op.multiply(op.log(x), 1 / math.log(10)),
}


def _copysign(op: Operators, call: TorchCall) -> relax.Expr:
    left, right = _promoted(op, call, call.dtype)
    size = op.abs(left)
    # The quotient tells the zeros apart, which compare equal.
    is_negative = op.logical_or(op.less(right, 0), op.less(op.divide(1, right), 0))
    return op.where(is_negative, op.negative(size), size)


def _clamp(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM keeps an integer dtype although torch promotes to a float limit's dtype, and casts infinities to integers.
    low, high = (None if call[limit] is None else op.cast(call[limit], call.dtype) for limit in ("min", "max"))
    return limited(op, op.cast(call["self"], call.dtype), low, high)


def _logical(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    return getattr(op, operator)(*_promoted(op, call, "bool"))


def _where(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM does not promote the dtypes of the two values.
    chosen, alternative = op.cast(call["self"], call.dtype), op.cast(call["other"], call.dtype)
    return op.where(op.cast(call["condition"], "bool"), chosen, alternative)


def _to_copy(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's cast of floats to booleans goes through integers: 0.5 becomes False.
    value = call["self"]
    if call.dtype == "bool" and dtype_of(value) != "bool":
        return op.not_equal(value, 0)
    return op.cast(value, call.dtype)


_BINARY: dict[str, Conversion] = {
    "add": partial(_binary, operator="add", on_booleans="logical_or"),
    "sub": partial(_binary, operator="subtract"),
    "mul": partial(_binary, operator="multiply", on_booleans="logical_and"),
    "fmod": partial(_binary, operator="mod"),
    "bitwise_and": partial(_binary, operator="bitwise_and", on_booleans="logical_and"),
    "bitwise_or": partial(_binary, operator="bitwise_or", on_booleans="logical_or"),
    "bitwise_xor": partial(_binary, operator="bitwise_xor", on_booleans="logical_xor"),
    "remainder": _remainder,
    "__lshift__": _shift,
    "__rshift__": _shift,
    **{name: partial(_binary, operator=operator) for name, operator in COMPARISONS.items()},
}

CONVERSIONS: dict[str, Conversion] = {
    **{f"{name}.{kind}": conversion for name, conversion in _BINARY.items() for kind in ("Tensor", "Scalar")},
    **{f"{name}.default": partial(_float_unary, operator=operator) for name, operator in _UNARY.items()},
    **{f"{name}.default": partial(_rounding, operator=name) for name in ("floor", "ceil", "trunc")},
    **{f"logical_{name}.default": partial(_logical, operator=f"logical_{name}") for name in ("and", "or", "xor")},
    **{f"div.{kind}": _divide for kind in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode")},
    **{f"pow.{kind}": _power for kind in ("Tensor_Scalar", "Tensor_Tensor", "Scalar")},
    **{f"bitwise_{side}_shift.{kind}": _shift for side in ("left", "right") for kind in ("Tensor", "Tensor_Scalar")},
    "remainder.Scalar_Tensor": _remainder,
    # TVM inverts all bits of a boolean's byte.
    "bitwise_not.default": lambda op, call: (op.logical_not if call.dtype == "bool" else op.bitwise_not)(call["self"]),
    "where.self": _where,
    "_to_copy.default": _to_copy,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "round.default": _round,
    "round.decimals": _round,
    # TVM's importer keeps integers, which torch promotes.
    "atan2.default": lambda op, call: op.cast(op.atan2(*_promoted(op, call, wide(call.dtype))), call.dtype),
    "copysign.Tensor": _copysign,
    "hypot.default": lambda op, call: hypotenuse(op, *_promoted(op, call)),
    "maximum.default": partial(_binary, operator="maximum"),
    "minimum.default": partial(_binary, operator="minimum"),
}
"""Conversions by the name of the ATen overload."""
