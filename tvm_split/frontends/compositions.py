"""Operators that TVM lacks or gets wrong, composed of others for all frontends."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import Any

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, numbers_of, shape_of, wide


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

    Needed because TVM's floor_mod of floats computes x - floor(x / y) · y: NaN for infinite y, and inaccurate for a
    large quotient.
    """
    if not is_float(dtype_of(left)):
        return op.floor_mod(left, right)
    rest = op.mod(left, right)
    other_sign = op.logical_xor(op.less(rest, 0), op.less(right, 0))
    return op.where(op.logical_and(op.not_equal(rest, 0), other_sign), op.add(rest, right), rest)


def in_wide(compose: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    """Return a composition that computes half precision in float32, since each of its steps would be rounded."""

    @wraps(compose)
    def composed(op: Operators, *operands: relax.Expr) -> relax.Expr:
        dtype = dtype_of(operands[0])
        return op.cast(compose(op, *(op.cast(operand, wide(dtype)) for operand in operands)), dtype)

    return composed


@in_wide
def floor_quotient(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Return floor(left / right) of the exact quotients, as torch and Python do.

    The floor of the rounded quotient may be one more: 1 / 0.1 is rounded to 10, but 1 // 0.1 is 9.
    """
    if not is_float(dtype_of(left)):
        return op.floor_divide(left, right)
    quotient = op.divide(op.subtract(left, floor_remainder(op, left, right)), right)
    nearest = op.floor(op.add(quotient, 0.5))
    # The quotient of a finite number and an infinite one is 0, or -1 if their signs differ.
    beyond = op.minimum(op.multiply(op.sign(left), op.sign(right)), 0)
    beyond = op.where(is_infinite(op, left), math.nan, beyond)
    result = op.where(is_infinite(op, right), beyond, nearest)
    return op.where(op.equal(right, 0), op.divide(left, right), result)


@in_wide
def hypotenuse(op: Operators, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Return √(left² + right²), whose squares neither overflow nor underflow; infinite if an operand is, as in C."""
    sizes = op.abs(left), op.abs(right)
    longer, shorter = op.maximum(*sizes), op.minimum(*sizes)
    ratio = op.divide(shorter, op.where(op.equal(longer, 0), 1, longer))
    result = op.multiply(longer, op.sqrt(op.add(op.multiply(ratio, ratio), 1)))
    is_beyond = op.logical_or(*(is_infinite(op, size) for size in sizes))
    return op.where(is_beyond, math.inf, result)


def elu(op: Operators, x: relax.Expr, alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> relax.Expr:
    """Return scale · x for x > 0, else scale · alpha · (exp(input_scale · x) - 1)."""
    below = op.multiply(exp_minus_one(op, op.multiply(x, input_scale)), alpha * scale)
    return op.where(op.greater(x, 0), op.multiply(x, scale), below)


def power(op: Operators, base: relax.Expr, exponent: Any, dtype: str) -> relax.Expr:
    """Return ``base`` to the ``exponent`` (an expression or a number), computed and returned in ``dtype``.

    TVM's power takes operands of one float dtype only, and a small integer power is faster as a product. Powers of
    integers by a tensor are exact up to 2 to the power of 53.
    """
    numbers = numbers_of(exponent) if isinstance(exponent, relax.Expr) else np.asarray(exponent)
    number = float(numbers.astype("float64").item()) if numbers is not None and numbers.size == 1 else math.nan
    base, target, dtype = op.cast(base, wide(dtype)), dtype, wide(dtype)
    if number.is_integer() and (number >= 0 if not is_float(dtype) else -64 <= number <= 64):
        result = _product(op, base, abs(int(number)))
        result = op.divide(1, result) if number < 0 else result
    elif number == 0.5 and is_float(dtype):
        result = op.sqrt(base)
    elif is_float(dtype):
        return op.cast(op.power(base, op.cast(exponent, dtype)), target)
    else:
        exact = op.power(op.cast(base, "float64"), op.cast(exponent, "float64"))
        nearest = op.round(exact)
        is_near = op.less(op.abs(op.subtract(exact, nearest)), op.multiply(op.abs(nearest), 1e-12))
        return op.cast(op.where(is_near, nearest, op.trunc(exact)), dtype)
    shape = np.broadcast_shapes(shape_of(base), numbers.shape if numbers is not None else ())
    result = op.cast(result, target)
    return result if list(shape) == shape_of(base) else op.broadcast_to(result, list(shape))


def log_sum_exp(op: Operators, data: relax.Expr, axes: Sequence[int], keepdims: bool) -> relax.Expr:
    """Return log(sum(exp(data))) over ``axes``; of nothing but -inf it is -inf, with an inf it is inf."""
    most = op.max(data, list(axes), keepdims=True)
    most = op.where(is_infinite(op, most), 0, most)
    total = op.log(op.sum(op.exp(op.subtract(data, most)), list(axes), keepdims=True))
    result = op.add(total, most)
    return result if keepdims else op.squeeze(result, list(axes))


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


def sign(op: Operators, operand: relax.Expr) -> relax.Expr:
    """Return the sign; NaN for NaN and -0 for -0, which TVM's operator turns into 0."""
    if not is_float(dtype_of(operand)):
        return op.sign(operand)
    return op.where(op.greater(operand, 0), 1, op.where(op.less(operand, 0), -1, operand))


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


def cumulative_sum(
    op: Operators, data: relax.Expr, axis: int, is_exclusive: bool = False, is_reversed: bool = False
) -> relax.Expr:
    """Sum ``data`` up along ``axis``, from the end if ``is_reversed``; an exclusive sum leaves out its own element."""
    data = op.flip(data, axis) if is_reversed else data
    total = op.cumsum(data, axis, dtype_of(data), is_exclusive)
    return op.flip(total, axis) if is_reversed else total


def padded_with_rows(op: Operators, data: relax.Expr, axis: int, widths: tuple[int, int], mode: str) -> relax.Expr:
    """Pad ``data`` along ``axis`` by ``widths`` (before, after) with its own rows, in a ``mode`` of ``numpy.pad``."""
    if not any(widths):
        return data
    rows = np.pad(np.arange(shape_of(data)[axis]), widths, mode=mode)  # type: ignore[call-overload]
    return op.take(data, constant(rows, "int64"), axis)


ROWS_PER_WEIGHT = 16
"""The number of rows per nonzero weight from which gathers are faster than a matrix product.

Measured on AVX-512 with bilinear weights: 0.8 times as fast for 28 rows, 2.7 times for 65, 12 times for 256.
"""


def weighted(op: Operators, data: relax.Expr, weights: np.ndarray[Any, Any], axis: int) -> relax.Expr:
    """Return weighted sums of the rows of ``data`` along ``axis``; ``weights`` is [rows of result, rows of ``data``].

    Weights that only choose rows become one gather. A few weights for many rows become a gather for each weight. Raises
    ModelImportError for other weights of integers: they would be rounded to 0, and sources round the sums in different
    ways.
    """
    target, size = weights.shape
    if target == size and np.array_equal(weights, np.eye(size)):
        return data
    chosen = weights.argmax(axis=1)
    if np.array_equal(weights, np.eye(size)[chosen]):
        return op.take(data, constant(chosen, "int64"), axis)
    dtype, rank = dtype_of(data), len(shape_of(data))
    if not is_float(dtype):
        raise ModelImportError(f"it interpolates between numbers of {dtype}; convert them to float32 before it")
    data = op.cast(data, wide(dtype))
    used = np.argsort(weights == 0, axis=1, kind="stable")[:, : np.count_nonzero(weights, axis=1).max()]
    if size >= ROWS_PER_WEIGHT * used.shape[1]:
        factors = np.take_along_axis(weights, used, axis=1)
        shape = [-1 if place == axis else 1 for place in range(rank)]
        parts = [
            op.multiply(op.take(data, constant(rows, "int64"), axis), constant(factor.reshape(shape), wide(dtype)))
            for rows, factor in zip(used.T, factors.T, strict=True)
        ]
        return op.cast(reduce(op.add, parts), dtype)
    if axis == rank - 2:
        return op.cast(op.matmul(constant(weights, wide(dtype)), data), dtype)
    order = [*range(axis), *range(axis + 1, rank), axis]
    data = data if axis == rank - 1 else op.permute_dims(data, order)
    product = op.matmul(data, constant(weights.T, wide(dtype)))
    return op.cast(product if axis == rank - 1 else op.permute_dims(product, np.argsort(order).tolist()), dtype)


def attention(
    op: Operators,
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    scale: float | None = None,
    biases: Sequence[relax.Expr] = (),
) -> relax.Expr:
    """Return softmax(scale · query · keyᵀ + biases) · value over the last two axes; the scale is 1 / √width by default.

    Biases, and the softmax of half precision, are in float32, as in the sources.
    """
    rank, dtype = len(shape_of(key)), dtype_of(query)
    scores = op.matmul(query, op.permute_dims(key, [*range(rank - 2), rank - 1, rank - 2]))
    scores = op.multiply(op.cast(scores, wide(dtype)), scale or 1 / math.sqrt(shape_of(query)[-1]))
    scores = reduce(op.add, [scores, *biases])
    return op.matmul(op.cast(op.nn.softmax(scores, -1), dtype), value)


def strides(shape: Sequence[int]) -> list[int]:
    """The row-major strides of a tensor of this shape, in elements."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def flat_index(op: Operators, indices: relax.Expr, steps: Sequence[int]) -> relax.Expr:
    """Return positions in a flat tensor: dot products of the last axis of ``indices`` with the strides ``steps``."""
    return op.sum(op.multiply(indices, np.array(steps)), [-1])


def counted_from_front(op: Operators, index: relax.Expr, size: int) -> relax.Expr:
    """Return int64 indices in 0 … size − 1; negative ones count from the end. TVM would read outside the tensor."""
    index = op.cast(index, "int64")
    numbers = numbers_of(index)
    if numbers is not None:
        return constant(np.where(numbers < 0, numbers + size, numbers), "int64")
    return op.where(op.less(index, 0), op.add(index, size), index)


def sorted_places(op: Operators, data: relax.Expr, axis: int, is_descending: bool) -> relax.Expr:
    """Return the int64 positions of the elements of ``data`` in sorted order along ``axis``.

    NaN is the greatest element, and equal elements keep their order.
    """
    return op.argsort(_sort_keys(op, data), axis, is_descending, dtype="int64")


def sorted_elements(
    op: Operators, data: relax.Expr, axis: int, is_descending: bool, count: int | None = None
) -> tuple[relax.Expr, relax.Expr]:
    """Return the first ``count`` elements of ``data`` (default: all) in sorted order, and their int64 positions."""
    axis, places = axis % len(shape_of(data)), sorted_places(op, data, axis, is_descending)
    if count is not None:
        places = op.strided_slice(places, [axis], [0], [count])
    return op.gather_elements(data, places, axis), places


def _sort_keys(op: Operators, data: relax.Expr) -> relax.Expr:
    """Return numbers in the order of ``data`` that TVM sorts correctly: int32, int64, or float64 without NaN.

    TVM has no order for NaN, sorts bfloat16 wrongly, and fails for other integers. Infinity becomes the greatest finite
    number, so that it stays below NaN.
    """
    dtype = dtype_of(data)
    if is_float(dtype):
        numbers = op.cast(data, "float64")
        return op.where(op.isnan(numbers), math.inf, op.minimum(numbers, np.finfo("float64").max))
    if dtype == "uint64":
        return op.bitwise_xor(op.cast(data, "int64"), constant(np.iinfo("int64").min, "int64"))
    return op.cast(data, "int64" if dtype in ("int64", "uint32") else "int32")


def parts(op: Operators, data: relax.Expr, sizes: Sequence[int], axis: int) -> relax.Expr:
    """Split ``data`` into ``sizes``; TVM's split refuses parts without elements, and gives no tuple of one part."""
    ends = np.cumsum([0, *sizes]).tolist()
    if 0 not in sizes and len(sizes) > 1:
        return op.split(data, ends[1:-1], axis)
    return relax.Tuple([op.strided_slice(data, [axis], [first], [last]) for first, last in itertools.pairwise(ends)])


@in_wide
def exp_minus_one(op: Operators, x: relax.Expr) -> relax.Expr:
    """Return exp(x) - 1; for abs(x) < 0.5 by Taylor's series, since the subtraction would lose x's digits."""
    series: Any = op.full_like(x, 1)
    for count in range(16 if dtype_of(x) == "float64" else 9, 1, -1):
        series = op.add(op.multiply(op.multiply(x, 1 / count), series), 1)
    is_small = op.less(op.abs(x), 0.5)
    return op.where(is_small, op.multiply(x, series), op.subtract(op.exp(x), 1))


@in_wide
def log_one_plus(op: Operators, x: relax.Expr) -> relax.Expr:
    """Return log(1 + x); for abs(x) < 0.5 by the series of 2 artanh(x / (2 + x)) (Abramowitz and Stegun, 4.1.27)."""
    is_small = op.less(op.abs(x), 0.5)
    near = op.where(is_small, x, 0)
    ratio = op.divide(near, op.add(near, 2))
    odd = [2 / (2 * count + 1) for count in range(18 if dtype_of(x) == "float64" else 8)]
    series = op.multiply(ratio, polynomial(op, op.multiply(ratio, ratio), odd[::-1]))
    return op.where(is_small, series, op.log(op.add(x, 1)))


@in_wide
def erfc(op: Operators, x: relax.Expr) -> relax.Expr:
    """Return the complementary error function, accurate to a few units in the last place."""
    return op.where(op.greater(x, 0.5), _erfc_beyond(op, x), op.subtract(1, op.erf(x)))


def _erfc_beyond(op: Operators, x: relax.Expr) -> relax.Expr:
    """Return erfc(x) for x > 0.47: Cody, Rational Chebyshev approximations for the error function, 1969.

    exp(-x²) is exp(-r²) · exp(-(x - r) · (x + r)), where r is x rounded down to a 16th, so that x² loses no digits.
    """
    middle = op.divide(polynomial(op, x, _ERFC_4), polynomial(op, x, _ERFC_4_BELOW))
    inverse = op.divide(1, op.multiply(x, x))
    rest = op.multiply(
        inverse, op.divide(polynomial(op, inverse, _ERFC_OVER), polynomial(op, inverse, _ERFC_OVER_BELOW))
    )
    far = op.divide(op.subtract(1 / math.sqrt(math.pi), rest), x)
    rounded = op.divide(op.floor(op.multiply(x, 16.0)), 16.0)
    change = op.multiply(op.subtract(x, rounded), op.add(x, rounded))
    tail = op.multiply(op.exp(op.negative(op.multiply(rounded, rounded))), op.exp(op.negative(change)))
    # Beyond, the result is 0; infinity would give NaN.
    result = op.multiply(tail, op.where(op.less(x, 4), middle, far))
    return op.where(op.less(x, 27.5), result, 0)


# Cody's coefficients below 4 in x, and from 4 on in 1 / x^2; highest power first.
_ERFC_4 = (
    2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1, 2.98635138197400131e2,
    8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3,
)  # fmt: skip
_ERFC_4_BELOW = (
    1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
    3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3,
)  # fmt: skip
_ERFC_OVER = (
    1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
    1.60837851487422766e-2, 6.58749161529837803e-4,
)  # fmt: skip
_ERFC_OVER_BELOW = (
    1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2,
    2.33520497626869185e-3,
)  # fmt: skip


def polynomial(op: Operators, x: relax.Expr, factors: tuple[float, ...] | list[float]) -> relax.Expr:
    """Evaluate a polynomial by Horner's rule; the coefficient of the highest power is first."""
    result: Any = op.full_like(x, factors[0])
    for factor in factors[1:]:
        result = op.add(op.multiply(result, x), factor)
    return result
