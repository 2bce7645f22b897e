"""Operators that move indices: the split axis has another position or another unit in their result.

A reshape keeps an axis if its result has an axis of the same length with the same number of elements before it. It may
also merge the axis with those behind it, or divide it again. For example, a batch of sequences becomes one list of
tokens, with a fixed number for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

from tvm import relax

from relay_passes.shards.along.rule import Along, Emit, Operation, Range, replaced_at, same_range, sliced


def reshape(operation: Operation) -> Along:
    axis = operation.only_first()
    source, target = operation.operands[0].shape, operation.shape
    length, before = source[axis], prod(source[:axis])
    places = [place for place in range(len(target)) if prod(target[:place]) == before]
    # Several axes can fit if some have length 1; prefer the one with the same length. Along the axis, each ``few``
    # indices of the operand become ``many`` of the result.
    same = [place for place in places if target[place] == length]
    joined = [place for place in places if target[place] > length and target[place] % length == 0]
    apart = [place for place in places if 1 < target[place] < length and length % target[place] == 0]
    if same:
        place, many, few = same[0], 1, 1
    elif joined:
        place, many, few = joined[0], target[joined[0]] // length, 1
    elif apart:
        place, many, few = apart[0], 1, length // target[apart[0]]
    else:
        raise operation.refused(f"{source} becomes {target}, which has no such axis")

    def taken(wanted: Range) -> Range:
        return wanted[0] * few // many, -(-wanted[1] * few // many)

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        first, end = (each * many // few for each in taken(wanted))
        part = relax.op.reshape(parts[0], replaced_at(target, place, end - first))
        return part if (first, end) == wanted else sliced(emit(part), place, (wanted[0] - first, wanted[1] - first))

    return Along(place, (axis,), lambda wanted: (taken(wanted),), write, local=many == few == 1)


def permute(operation: Operation) -> Along:
    axis, axes = operation.only_first(), operation.expression.attrs.axes
    rank = len(operation.shape)
    order = list(range(rank))[::-1] if axes is None else [int(each) % rank for each in axes]
    return same_range(operation, order.index(axis), (axis,))


def broadcast(operation: Operation) -> Along:
    axis = operation.only_first()
    place = axis + len(operation.shape) - len(operation.operands[0].shape)
    if operation.shape[place] != operation.operands[0].shape[axis]:
        raise operation.refused("it repeats the one index of that axis")

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        return relax.op.broadcast_to(parts[0], replaced_at(operation.shape, place, wanted[1] - wanted[0]))

    return Along(place, (axis,), lambda wanted: (wanted,), write, local=True)


def concat(operation: Operation) -> Along:
    axes = {each.axis for each in operation.operands if each.axis is not None}
    if len(axes) > 1:
        raise operation.refused(f"its operands have the axis in different places, {sorted(axes)}")
    (axis,) = axes
    if int(operation.expression.attrs.axis or 0) % len(operation.shape) != axis:
        return same_range(operation, axis, tuple(axis for _ in operation.operands))
    begins = list(accumulate((each.shape[axis] for each in operation.operands), initial=0))

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        within = [(max(wanted[0], first) - first, min(wanted[1], end) - first) for first, end in pairwise(begins)]
        return tuple((first, end) if first < end else None for first, end in within)

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        return relax.op.concat([each for each in parts if each is not None], axis)

    return Along(axis, tuple(axis for _ in operation.operands), needs, write)


def stack(operation: Operation) -> Along:
    axis = operation.operands[0].axis
    if axis is None or any(each.axis != axis for each in operation.operands):
        raise operation.refused("its operands are not all split along the same axis")
    new = int(operation.expression.attrs.axis or 0) % len(operation.shape)
    return same_range(operation, axis + (new <= axis), tuple(axis for _ in operation.operands))


def split(operation: Operation) -> Along:
    axis = operation.only_first()
    if int(operation.expression.attrs.axis) % len(operation.operands[0].shape) == axis:
        raise operation.refused("it takes that axis apart")
    return same_range(operation, axis, (axis,))


def strided_slice(operation: Operation) -> Along:
    """Return the rule of a slice along other axes, or along the split axis with a positive stride."""
    axis, (_, *arguments) = operation.only_first(), operation.expression.args
    length = operation.operands[0].shape[axis]
    axes, begins, _, *strides = [[int(each) for each in argument.fields] for argument in arguments]
    places = [each % len(operation.shape) for each in axes]
    if axis not in places:
        return same_range(operation, axis, (axis,))
    place = places.index(axis)
    begin, stride = begins[place], strides[0][place] if strides else 1
    if stride < 1:
        raise operation.refused(f"it has the stride {stride} there")
    begin = max(0, begin + length if begin < 0 else begin)

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        return ((begin + wanted[0] * stride, begin + (wanted[1] - 1) * stride + 1),)

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        ends = [int(each) for each in arguments[2].fields]
        return relax.op.strided_slice(
            parts[0],
            axes,
            replaced_at(begins, place, 0),
            replaced_at(ends, place, (wanted[1] - wanted[0] - 1) * stride + 1),
            strides[0] if strides else None,
        )

    return Along(axis, (axis,), needs, write)


def matmul(operation: Operation) -> Along:
    """Return the rule of a product that is split by the left operand's rows, the right one's columns, or a batch axis.

    The contracted axis is refused.
    """
    left, right = operation.operands
    rank = len(operation.shape)
    if min(len(left.shape), len(right.shape)) < 2:
        raise operation.refused("one of its operands is a vector")
    found = set()
    for each in operation.operands:
        if each.axis is not None:
            found.add(each.axis + rank - len(each.shape))
    contracts = left.axis == len(left.shape) - 1 or right.axis == len(right.shape) - 2
    if contracts or len(found) > 1:
        raise operation.refused("it sums over that axis")
    (axis,) = found
    places: list[int | None] = []
    for each, whole in zip(operation.operands, (rank - 1, rank - 2), strict=True):
        place = axis - rank + len(each.shape)
        has_axis = place >= 0 and axis != whole and each.shape[place] == operation.shape[axis]
        places.append(place if has_axis else None)
    if any(each.axis is not None and place is None for each, place in zip(operation.operands, places, strict=True)):
        raise operation.refused("it repeats the one index of that axis")
    return same_range(operation, axis, tuple(places))
