"""Constant folding: compute operations on known values with numpy.

It counts loops, and it computes new weights from weights alone: a batch norm's factors, or one layer's slice of weights
that are stacked for a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from tvm_split.frontends.stablehlo.attributes import comparison, integers, result_kind
from tvm_split.frontends.stablehlo.modules import Array, array_of

LARGEST = 1 << 16
"""The most elements of a folded result without larger operands; repeated elements count once."""


def folded(operation: ir.Operation, operands: Sequence[Array]) -> list[Array] | None:
    """Return the results of an operation on known operands; None if it is not folded."""
    kind = operation.name
    if kind == "stablehlo.constant":
        return [array_of(operation.attributes["value"])]
    if kind not in _MOVING and kind not in _ELEMENTWISE:
        return None
    shape, dtype = result_kind(operation)
    with np.errstate(all="ignore"):
        if kind in _MOVING:
            return [_MOVING[kind](operation, operands, shape).astype(dtype, copy=False)]
        compact = [without_repeats(each) for each in operands]
        sizes = np.broadcast_shapes(*(each.shape for each in compact))
        if math.prod(sizes) > max(LARGEST, *(each.size for each in compact)):
            return None
        return [np.broadcast_to(np.asarray(_ELEMENTWISE[kind](operation, *compact)).astype(dtype, copy=False), shape)]


def without_repeats(array: Array) -> Array:
    """Slice an array to size 1 along each axis on which ``numpy.broadcast_to`` only repeated it (stride 0)."""
    place = tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)
    return array[place] if array.size else array


def _divided(left: Array, right: Array) -> Array:
    if left.dtype.kind == "f" or left.dtype.kind == "V":
        return left / right
    safe = np.where(right == 0, np.ones_like(right), right)
    quotient, rest = left // safe, left % safe
    quotient = quotient + ((rest != 0) & ((left < 0) != (safe < 0))).astype(left.dtype)
    return np.where(right == 0, np.array(-1).astype(left.dtype), quotient)


def _remainder(left: Array, right: Array) -> Array:
    return np.fmod(left, right) if left.dtype.kind in "fV" else np.asarray(left - right * _divided(left, right))


def _converted(operation: ir.Operation, operand: Array) -> Array:
    """Convert to the result's dtype; floats to integers round towards zero and saturate, and NaN becomes 0."""
    dtype = result_kind(operation)[1]
    if operand.dtype.kind not in "fV" or dtype.kind not in "iu":
        return operand
    limits, value = np.iinfo(dtype), operand.astype("float64")
    is_above, is_below = value >= float(limits.max), value <= float(limits.min)
    inside = np.where(is_above | is_below | np.isnan(value), 0, value).astype(dtype)
    return np.where(is_above, dtype.type(limits.max), np.where(is_below, dtype.type(limits.min), inside))


def _shifted(change: Any) -> Callable[..., Array]:
    def shift(operation: ir.Operation, left: Array, right: Array) -> Array:
        width = left.dtype.itemsize * 8
        unsigned = np.dtype(f"uint{width}")
        is_inside = (right >= 0) & (right < width)
        bits = (
            left if change is _arithmetic else left.view(unsigned) if left.flags.c_contiguous else left.astype(unsigned)
        )
        by = np.where(is_inside, right, 0).astype(bits.dtype)
        nothing = np.where(left < 0, -1, 0) if change is _arithmetic else 0
        return np.where(is_inside, change(bits, by), np.asarray(nothing, bits.dtype))

    return shift


def _arithmetic(left: Array, right: Array) -> Array:
    return np.asarray(np.right_shift(left, right))


def _compared(operation: ir.Operation, left: Array, right: Array) -> Array:
    return np.asarray(_COMPARISONS[comparison(operation)](left, right))


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal
}  # fmt: skip


def _plain(change: Callable[..., Any]) -> Callable[..., Array]:
    return lambda operation, *operands: np.asarray(change(*operands))


_ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "stablehlo.add": _plain(lambda a, b: a | b if a.dtype == bool else a + b),
    "stablehlo.subtract": _plain(np.subtract),
    "stablehlo.multiply": _plain(lambda a, b: a & b if a.dtype == bool else a * b),
    "stablehlo.divide": _plain(_divided),
    "stablehlo.remainder": _plain(_remainder),
    "stablehlo.maximum": _plain(np.maximum),
    "stablehlo.minimum": _plain(np.minimum),
    "stablehlo.power": _plain(lambda a, b: np.power(a, b)),
    "stablehlo.negate": _plain(np.negative),
    "stablehlo.abs": _plain(np.abs),
    "stablehlo.sign": _plain(np.sign),
    "stablehlo.sqrt": _plain(np.sqrt),
    "stablehlo.rsqrt": _plain(lambda a: (1 / np.sqrt(a)).astype(a.dtype)),
    "stablehlo.exponential": _plain(np.exp),
    "stablehlo.log": _plain(np.log),
    "stablehlo.tanh": _plain(np.tanh),
    "stablehlo.sine": _plain(np.sin),
    "stablehlo.cosine": _plain(np.cos),
    "stablehlo.floor": _plain(np.floor),
    "stablehlo.ceil": _plain(np.ceil),
    "stablehlo.and": _plain(np.bitwise_and),
    "stablehlo.or": _plain(np.bitwise_or),
    "stablehlo.xor": _plain(np.bitwise_xor),
    "stablehlo.not": _plain(np.invert),
    "stablehlo.select": _plain(lambda choice, a, b: np.where(choice, a, b)),
    "stablehlo.clamp": _plain(lambda low, a, high: np.minimum(np.maximum(a, low), high)),
    "stablehlo.convert": _converted,
    "stablehlo.compare": _compared,
    "stablehlo.shift_left": _shifted(np.left_shift),
    "stablehlo.shift_right_logical": _shifted(np.right_shift),
    "stablehlo.shift_right_arithmetic": _shifted(_arithmetic),
}


def _iota(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    axis = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
    sizes = [shape[axis] if each == axis else 1 for each in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(sizes), shape)


def broadcast_shape(dimensions: Sequence[int], sizes: Sequence[int], rank: int) -> list[int]:
    """The shape of an operand, with size 1 for each axis of the result that it lacks."""
    placed = dict(zip(dimensions, sizes, strict=True))
    return [placed.get(axis, 1) for axis in range(rank)]


def _broadcast(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    (operand,) = operands
    dimensions = integers(operation, "broadcast_dimensions")
    axes = sorted(range(operand.ndim), key=lambda axis: dimensions[axis])
    moved = without_repeats(operand).transpose(axes)
    sizes = broadcast_shape([dimensions[axis] for axis in axes], moved.shape, len(shape))
    return np.broadcast_to(moved.reshape(sizes), shape)


def _reshape(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    (operand,) = operands
    if operand.size > 1 and without_repeats(operand).size == 1:
        return np.broadcast_to(without_repeats(operand).reshape([1] * len(shape)), shape)
    return operand.reshape(shape)


def _starts(operand: Array, starts: Sequence[Array], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The bounds of a dynamic slice; its starts are clamped so that it lies inside the operand."""
    places = [
        min(max(int(start), 0), whole - size) for start, whole, size in zip(starts, operand.shape, sizes, strict=True)
    ]
    return tuple(slice(place, place + size) for place, size in zip(places, sizes, strict=True))


def _dynamic_update(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    operand, update, *starts = operands
    result = np.array(operand)
    result[_starts(operand, starts, update.shape)] = update
    return result


def _bits(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    return np.array(operands[0]).view(result_kind(operation)[1]).reshape(shape)


def _slice(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    firsts, lasts, steps = (integers(operation, name) for name in ("start_indices", "limit_indices", "strides"))
    return operands[0][tuple(map(slice, firsts, lasts, steps))]


def _reverse(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    return np.flip(operands[0], tuple(integers(operation, "dimensions")))


_MOVING: dict[str, Callable[[ir.Operation, Sequence[Array], tuple[int, ...]], Array]] = {
    "stablehlo.iota": _iota,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": lambda operation, operands, shape: operands[0].transpose(integers(operation, "permutation")),
    "stablehlo.slice": _slice,
    "stablehlo.reverse": _reverse,
    "stablehlo.concatenate": lambda operation, operands, shape: np.concatenate(
        operands, ir.IntegerAttr(operation.attributes["dimension"]).value
    ),
    "stablehlo.dynamic_slice": lambda operation, operands, shape: operands[0][
        _starts(operands[0], operands[1:], integers(operation, "slice_sizes"))
    ],
    "stablehlo.dynamic_update_slice": _dynamic_update,
    "stablehlo.bitcast_convert": _bits,
}
