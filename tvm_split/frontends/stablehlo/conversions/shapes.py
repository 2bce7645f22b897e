"""Operations that only move elements: most of them move nothing here, but note where the axes lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.axis_orders import Arranger, Value, in_place, leading_order
from tvm_split.frontends.operators import constant, numbers_of, shape_of
from tvm_split.frontends.stablehlo.attributes import integer, integers
from tvm_split.frontends.stablehlo.values import Call


def _transpose(op: Arranger, call: Call) -> Value:
    (value,) = call.operands
    permutation = integers(call.operation, "permutation")
    return Value(value.expr, tuple(permutation.index(axis) for axis in value.order), call.shape)


def _broadcast(op: Arranger, call: Call) -> Value:
    (value,) = call.operands
    return broadcast(op, value, integers(call.operation, "broadcast_dimensions"), call.shape)


def broadcast(op: Arranger, value: Value, dimensions: Sequence[int], shape: Sequence[int]) -> Value:
    """``value`` with its axis i as axis ``dimensions[i]`` of ``shape``, and repeated along all others."""
    return _laid_out(op, value.expr, [dimensions[axis] for axis in value.order], shape_of(value.expr), shape)


def _reshape(op: Arranger, call: Call) -> Value:
    return reshaped(op, call.operands[0], call.shape)


def reshaped(op: Arranger, value: Value, shape: Sequence[int]) -> Value:
    """Axes that only gain or lose neighbours of size 1 stay where they lie; otherwise they must lie in order."""
    before = [axis for axis in range(value.rank) if value.shape[axis] != 1]
    after = [axis for axis in range(len(shape)) if shape[axis] != 1]
    if [value.shape[axis] for axis in before] != [shape[axis] for axis in after]:
        return in_place(op.shaped(op.full(value), shape))
    becomes = dict(zip(before, after, strict=True))
    sizes = [size for size, axis in zip(shape_of(value.expr), value.order, strict=True) if axis in becomes]
    return _laid_out(op, value.expr, [becomes[axis] for axis in value.order if axis in becomes], sizes, shape)


def _laid_out(
    op: Arranger, expr: relax.Expr, placed: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> Value:
    """``expr``, whose axes are those ``placed`` of ``shape``, of these ``sizes``, and others of size 1, as a value."""
    order = list(range(len(shape)))
    if list(placed) != sorted(placed):
        order = [axis for axis in order if axis not in placed] + list(placed)
    size_of = dict(zip(placed, sizes, strict=True))
    return Value(op.shaped(expr, [size_of.get(axis, 1) for axis in order]), tuple(order), tuple(shape))


def _concatenate(op: Arranger, call: Call) -> Value:
    axis = integer(call.operation, "dimension")
    order = leading_order(call.operands)
    parts = [op.full(value, order) for value in call.operands if value.shape[axis]]
    return Value(parts[0] if len(parts) == 1 else op.concat(parts, order.index(axis)), order, call.shape)


def _slice(op: Arranger, call: Call) -> Value:
    (value,) = call.operands
    firsts, lasts, steps = (integers(call.operation, name) for name in ("start_indices", "limit_indices", "strides"))
    return sliced(op, value, firsts, lasts, steps)


def sliced(
    op: Arranger, value: Value, firsts: Sequence[int], lasts: Sequence[int], steps: Sequence[int] | None = None
) -> Value:
    """The elements between ``firsts`` and ``lasts`` along each axis, each ``steps``-th."""
    steps = [1] * value.rank if steps is None else steps
    shape = tuple(len(range(*part)) for part in zip(firsts, lasts, steps, strict=True))
    axes = [axis for axis in range(value.rank) if shape[axis] != value.shape[axis] and not value.repeats(axis)]
    if not axes:
        return Value(value.expr, value.order, shape)
    places = [value.order.index(axis) for axis in axes]
    ends = [[numbers[axis] for axis in axes] for numbers in (firsts, lasts, steps)]
    return Value(op.strided_slice(value.expr, places, *ends), value.order, shape)


def _reverse(op: Arranger, call: Call) -> Value:
    (value,) = call.operands
    return reversed_along(op, value, integers(call.operation, "dimensions"))


def reversed_along(op: Arranger, value: Value, axes: Sequence[int]) -> Value:
    """``value`` with the elements along ``axes`` from last to first."""
    expr = value.expr
    turned = [value.order.index(axis) for axis in axes if value.shape[axis] > 1 and not value.repeats(axis)]
    numbers = numbers_of(expr)
    if numbers is not None and turned:
        expr = constant(np.ascontiguousarray(np.flip(numbers, tuple(turned))), value.dtype)
    else:
        for place in turned:
            expr = op.flip(expr, place)
    return Value(expr, value.order, value.shape)


def _pad(op: Arranger, call: Call) -> Value:
    value, _ = call.operands
    (filling,) = call.known[1:]
    if filling is None:
        raise ModelImportError("it pads with a number that is computed; pad with a number that is known")
    low, high, inner = (
        integers(call.operation, name) for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    return padded(op, value, low, high, inner, float(filling))


def padded(
    op: Arranger, value: Value, low: Sequence[int], high: Sequence[int], inner: Sequence[int], filling: float
) -> Value:
    """``value`` with so many fillings before, after and between the elements along each axis; less than 0 cuts off."""
    order = value.order
    expr = op.full(value, order) if any(map(any, (low, high, inner))) else value.expr
    spread = spread_apart(op, Value(expr, order, value.shape), inner, filling)
    shape = spread.shape
    cut = sliced(
        op,
        spread,
        [max(-each, 0) for each in low],
        [size - max(-each, 0) for size, each in zip(shape, high, strict=True)],
    )
    widths = [max(each, 0) for axis in order for each in (low[axis], high[axis])]
    final = tuple(
        size + max(before, 0) + max(behind, 0) for size, before, behind in zip(cut.shape, low, high, strict=True)
    )
    return Value(op.filled(cut.expr, widths, filling) if any(widths) else cut.expr, order, final)


def spread_apart(op: Arranger, value: Value, inner: Sequence[int], filling: float) -> Value:
    """``value`` with ``inner`` fillings between each two elements along each axis."""
    expr, shape = value.expr, list(value.shape)
    for axis, between in enumerate(inner):
        if between and shape[axis] > 1:
            place, sizes = value.order.index(axis), shape_of(expr)
            alone = op.reshape(expr, [*sizes[: place + 1], 1, *sizes[place + 1 :]])
            widths = [0, 0] * (place + 1) + [0, between] + [0, 0] * (len(sizes) - place - 1)
            longer = [*sizes[:place], sizes[place] * (between + 1), *sizes[place + 1 :]]
            expr = op.reshape(op.filled(alone, widths, filling), longer)
            expr = op.strided_slice(expr, [place], [0], [longer[place] - between])
            shape[axis] = longer[place] - between
    return Value(expr, value.order, tuple(shape))


CONVERTERS: dict[str, Callable[[Arranger, Call], Value]] = {
    "stablehlo.transpose": _transpose,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.slice": _slice,
    "stablehlo.reverse": _reverse,
    "stablehlo.pad": _pad,
}
"""By the operation's name."""
