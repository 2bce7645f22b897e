"""Lower integer arithmetic to TE so that it wraps at the end of the range, as in the sources.

TVM's simplifier takes int32 and int64 for indices, which never overflow: it turns ``(a + 1) > a`` into true. LLVM does
the same with sums, differences and products of 32 and 64 bits, signed or not, since TVM marks them as never
overflowing. So these are computed in twice the bits, where nothing overflows. Their lower half is combined with 0 by an
exclusive or, which the simplifier does not look through. LLVM makes one instruction of this again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add, mul, sub
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from schedules.relax_tools import array_of, broadcast_index, default_legalization, operator_of, static_shape

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
SIGNED = ("int8", "int16", "int32", "int64")
WRAPPING = (*SIGNED, *UNSIGNED)
Compute = Callable[[Any, Any], Any]
Wrap = Callable[..., Any]
"""`wrapped` for a target."""


def wrapped(compute: Compute, left: Any, right: Any, dtype: str, is_widened: bool) -> Any:
    """Return the sum, difference or product of two expressions of a dtype of `WRAPPING`.

    CUDA has no integers of 128 bits, but its unsigned ones of 64 bits wrap: there, ``is_widened`` is false. Integers of
    8 and 16 bits would keep the 32 bits in which C computes them.
    """
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    # Only differences of unsigned numbers are negative, only their products need all bits.
    kind = "uint" if dtype.startswith("u") and compute is mul else "int"
    wide = f"{kind}{2 * bits}" if is_widened or bits < 64 else "uint64"
    result = compute(left.astype(wide), right.astype(wide)).astype(dtype)
    return tirx.bitwise_xor(result, tirx.const(0, dtype))


def _negative(wrap: Wrap, value: Any, dtype: str) -> Any:
    return wrap(sub, tirx.const(0, dtype), value, dtype)


def _absolute(wrap: Wrap, value: Any, dtype: str) -> Any:
    return tirx.Select(value < tirx.const(0, dtype), _negative(wrap, value, dtype), value)


def _quotient(wrap: Wrap, left: Any, right: Any, dtype: str, *, divide: Compute) -> Any:
    # The processor stops at the lowest number divided by -1.
    is_inverse = right == tirx.const(-1, dtype)
    quotient = divide(left, tirx.Select(is_inverse, tirx.const(1, dtype), right))
    return tirx.Select(is_inverse, _negative(wrap, left, dtype), quotient)


def _rest(_: Wrap, left: Any, right: Any, dtype: str, *, divide: Compute) -> Any:
    return divide(left, tirx.Select(right == tirx.const(-1, dtype), tirx.const(1, dtype), right))


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
_FUNCTIONS: Mapping[str, tuple[Function, Sequence[str]]] = {
    **{name: (function, WRAPPING) for name, function in _WRAPPED.items()},
    **{name: (function, SIGNED) for name, function in _DIVIDING.items()},
    "relax.negative": (_negative, SIGNED),
    "relax.abs": (_absolute, SIGNED),
}
"""Operator → its function of elements and their dtype, and the dtypes for which TVM's own lowering is wrong."""
INTEGER_ARITHMETIC = tuple(_FUNCTIONS)


def legalize_integers(builder: BlockBuilder, call: relax.Call, *, is_widened: bool = True) -> relax.Expr:
    """Lower one of `INTEGER_ARITHMETIC` elementwise, in the dtypes listed for it; others are left to TVM."""
    operator, dtype = operator_of(call), str(call.ty.dtype)
    function, dtypes = _FUNCTIONS[operator]
    shape, shapes = static_shape(call), [static_shape(operand) for operand in call.args]
    if dtype not in dtypes or shape is None or None in shapes or _divides_otherwise(operator, call):
        return default_legalization(builder, call)
    name = operator.rsplit(".", 1)[-1]

    def compute(*tensors: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            operands = (tensor[tuple(broadcast_index(index, [*map(int, tensor.shape)]))] for tensor in tensors)
            return function(partial(wrapped, is_widened=is_widened), *operands, dtype)

        return te.compute(shape, element, name=name)

    return builder.call_te(compute, *call.args, primfunc_name_hint=name)


def _divides_otherwise(operator: str, call: relax.Call) -> bool:
    """Whether the operator divides by constants other than -1; TVM makes products and shifts of these."""
    divisors = array_of(call.args[1]) if operator in _DIVIDING else None
    return divisors is not None and not bool((divisors == -1).any())
