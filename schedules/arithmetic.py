"""Lower arithmetic to TE so that no optimisation changes its results.

Integers wrap at the end of the range, as in the frameworks. TVM's simplifier takes int32 and int64 for indices, which
never overflow: it turns ``(a + 1) > a`` into true. LLVM does the same with sums, differences and products of 32 and 64
bits, signed or not, since TVM marks them as never overflowing. So these are computed in twice the bits, where nothing
overflows. Their lower half is combined with 0 by an exclusive or, which the simplifier does not look through. LLVM
makes one instruction of this again.

A divisor is hidden in the same way: inside of ``where(c > 0, x // where(c > 0, c, 1), 0)``, the simplifier drops the
inner condition, and then both branches are computed.

For floats, the simplifier turns ``(x + y) - x`` into ``y``. A difference is lowered to ``x + -1 * y``, which is equal,
and of which LLVM makes one instruction.

A cast to bfloat16 and back is dropped where TVM replaces operations of bfloat16 by those of float32. So the cast itself
rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add, mul, sub
from typing import Any

from tvm import relax, tirx
from tvm.relax import BlockBuilder

from schedules.relax_tools import array_of, default_legalization, legalize_elements, operator_of, static_shape

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
SIGNED = ("int8", "int16", "int32", "int64")
WRAPPING = (*SIGNED, *UNSIGNED)
FLOATS = ("float16", "bfloat16", "float32", "float64")
Compute = Callable[[Any, Any], Any]
Wrap = Callable[..., Any]
"""`wrapped` with the target's ``is_widened``: takes the operation, its operands and their dtype."""


def wrapped(compute: Compute, left: Any, right: Any, dtype: str, is_widened: bool) -> Any:
    """Return the sum, difference or product of two expressions of a dtype of `WRAPPING`.

    CUDA has no integers of 128 bits, but its unsigned ones of 64 bits wrap: there, ``is_widened`` is false. Integers of
    8 and 16 bits would keep the 32 bits in which C computes them.
    """
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    # Only differences of unsigned numbers are negative, only their products need all bits.
    kind = "uint" if dtype.startswith("u") and compute is mul else "int"
    wide = f"{kind}{2 * bits}" if is_widened or bits < 64 else "uint64"
    return _hidden(compute(left.astype(wide), right.astype(wide)).astype(dtype), dtype)


def _negative(wrap: Wrap, value: Any, dtype: str) -> Any:
    return wrap(sub, tirx.const(0, dtype), value, dtype)


def _absolute(wrap: Wrap, value: Any, dtype: str) -> Any:
    return tirx.Select(value < tirx.const(0, dtype), _negative(wrap, value, dtype), value)


def _quotient(wrap: Wrap, left: Any, right: Any, dtype: str, *, divide: Compute) -> Any:
    hidden, zero = _hidden(right, dtype), tirx.const(0, dtype)
    quotient = tirx.Select(hidden == zero, zero, divide(left, _possible_divisor(right, dtype)))
    if dtype in UNSIGNED:
        return quotient
    return tirx.Select(hidden == tirx.const(-1, dtype), _negative(wrap, left, dtype), quotient)


def _rest(_: Wrap, left: Any, right: Any, dtype: str, *, divide: Compute) -> Any:
    return divide(left, _possible_divisor(right, dtype))


def _hidden(value: Any, dtype: str) -> Any:
    """Return an expression of the same value that TVM's simplifier does not look through."""
    return tirx.bitwise_xor(value, tirx.const(0, dtype))


def _possible_divisor(right: Any, dtype: str) -> Any:
    """Return the divisor, or 1 if it is 0 or -1: dividing by 0, or the lowest integer by -1, is a processor exception.

    As in numpy and onnxruntime, the quotient and the remainder of a division by 0 are 0.
    """
    hidden, one = _hidden(right, dtype), tirx.const(1, dtype)
    divisor = tirx.Select(hidden == tirx.const(0, dtype), one, hidden)
    return tirx.Select(hidden == tirx.const(-1, dtype), one, divisor) if dtype in SIGNED else divisor


def _difference(_: Wrap, left: Any, right: Any, dtype: str) -> Any:
    return left + right * tirx.const(-1, dtype)


def _rounded(value: Any) -> Any:
    """Return a float rounded to the nearest bfloat16, ties to even as in IEEE 754; NaN stays NaN."""
    bits = tirx.reinterpret("uint32", value.astype("float32"))
    even = (bits >> tirx.const(16, "uint32")) & tirx.const(1, "uint32")
    nearest = bits + tirx.const(0x7FFF, "uint32") + even
    is_nan = (bits & tirx.const(0x7FFFFFFF, "uint32")) > tirx.const(0x7F800000, "uint32")
    whole = tirx.Select(is_nan, bits | tirx.const(0x400000, "uint32"), nearest) & tirx.const(0xFFFF0000, "uint32")
    return tirx.reinterpret("float32", whole).astype("bfloat16")


Function = Callable[..., Any]
_WRAPPED: Mapping[str, Function] = {
    "relax.square": lambda wrap, value, dtype: wrap(mul, value, value, dtype),
    "relax.add": lambda wrap, *operands: wrap(add, *operands),
    "relax.subtract": lambda wrap, *operands: wrap(sub, *operands),
    "relax.multiply": lambda wrap, *operands: wrap(mul, *operands),
}
_DIVIDING: Mapping[str, Function] = {
    "relax.floor_divide": partial(_quotient, divide=tirx.floordiv),
    "relax.divide": partial(_quotient, divide=tirx.truncdiv),
    "relax.floor_mod": partial(_rest, divide=tirx.floormod),
    "relax.mod": partial(_rest, divide=tirx.truncmod),
}
_OF_DTYPES: Sequence[tuple[Sequence[str], Mapping[str, Function]]] = (
    (WRAPPING, {**_WRAPPED, **_DIVIDING}),
    (SIGNED, {"relax.negative": _negative, "relax.abs": _absolute}),
    (FLOATS, {"relax.subtract": _difference}),
)
_FUNCTIONS: Mapping[tuple[str, str], Function] = {
    (name, dtype): function for dtypes, own in _OF_DTYPES for name, function in own.items() for dtype in dtypes
}
"""Operator and dtype → a function of elements and their dtype, where TVM's own lowering is wrong."""
DIVISIONS = tuple(_DIVIDING)
CAST = "relax.astype"
ARITHMETIC = (*dict.fromkeys(name for name, _ in _FUNCTIONS), CAST)


def legalize_arithmetic(builder: BlockBuilder, call: relax.Call, *, is_widened: bool = True) -> relax.Expr:
    """Lower one of `ARITHMETIC` elementwise, in the dtypes for which there is a function; others are left to TVM."""
    operator, dtype = operator_of(call), str(call.ty.dtype)
    if operator == CAST:
        return _legalize_cast(builder, call)
    function = _FUNCTIONS.get((operator, dtype))
    if function is None or None in map(static_shape, (call, *call.args)) or _divides_otherwise(operator, call):
        return default_legalization(builder, call)
    of_elements, wrap = function, partial(wrapped, is_widened=is_widened)
    name = operator.rsplit(".", 1)[-1]
    return legalize_elements(builder, name, call.args, lambda *operands: of_elements(wrap, *operands, dtype))


def _legalize_cast(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    if str(call.ty.dtype) != "bfloat16" or str(call.args[0].ty.dtype) not in ("float32", "float64"):
        return default_legalization(builder, call)
    return legalize_elements(builder, "cast", call.args, _rounded)


def _divides_otherwise(operator: str, call: relax.Call) -> bool:
    """Return whether a call divides by constants of which none is 0 or -1: TVM makes products and shifts of these."""
    divisors = array_of(call.args[1]) if operator in _DIVIDING else None
    return divisors is not None and not bool(((divisors == -1) | (divisors == 0)).any())
