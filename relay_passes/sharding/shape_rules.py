"""Rules of operators that move indices: the sharded axis has another position or another unit in their result.

A reshape keeps an axis if its result has an axis of the same length with the same number of elements before it. It may
also merge the axis with those behind it, or divide it again. For example, a batch of sequences becomes one list of
tokens, with a fixed number for each sequence.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

from tvm import relax

from relay_passes.ir import leaves_of, shape_of
from relay_passes.sharding.region import Range
from relay_passes.sharding.rule import Axis, Emit, Operation, Rule, reading, replaced_at, same_range, sliced


def reshape(operation: Operation) -> Rule:
    axis = operation.only_first()
    source, target = operation.operands[0].shape, operation.shape
    result = _regrouped(axis, source, target)
    if result is None or (result.outer > 1 and not operation.by_blocks):
        raise operation.refused(f"{source} becomes {target}, which has no such axis")

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        (read,) = rule.ranges(result_range)
        assert read is not None  # noqa: S101  (its operand is sharded)
        first, end = (bound * result.length // axis.length for bound in read)
        part = relax.op.reshape(parts[0], replaced_at(target, result.index, result.outer * (end - first)))
        if (first, end) == result_range:
            return part
        return sliced(emit(part), result.index, (result_range[0] - first, result_range[1] - first))

    divides = target[result.index] < source[axis.index]
    rule = Rule((axis,), (result,), write=write, blocks=result.length, divides=divides)
    return rule


def _regrouped(axis: Axis, source: Sequence[int], target: Sequence[int]) -> Axis | None:
    """Return the sharded axis after a reshape: the same axis, merged with axes behind it, or its outermost part.

    None if the result has no such axis.
    """
    before = prod(source[: axis.index])
    for index, size in enumerate(target):
        if size == source[axis.index] and prod(target[:index]) == before:
            return axis.at(index)
    blocks = before * axis.outer
    for index, size in enumerate(target):
        outside = prod(target[:index])
        if outside <= blocks < outside * size:
            outer = blocks // outside
            if blocks % outside or size % outer:
                return None
            length = size // outer
            return Axis(index, outer, length) if not (length % axis.length and axis.length % length) else None
    return None


def expand_dims(operation: Operation) -> Rule:
    axis, rank = operation.only_first(), len(operation.shape)
    new = {int(index) % rank for index in operation.expression.attrs.axis}
    return same_range(operation, axis, axis.at([index for index in range(rank) if index not in new][axis.index]))


def permute(operation: Operation) -> Rule:
    axis, axes = operation.only_first(), operation.expression.attrs.axes
    rank = len(operation.shape)
    order = list(range(rank))[::-1] if axes is None else [int(index) % rank for index in axes]
    return same_range(operation, axis, axis.at(order.index(axis.index)))


def broadcast(operation: Operation) -> Rule:
    axis = operation.only_first()
    index = axis.index + len(operation.shape) - len(operation.operands[0].shape)
    if operation.shape[index] != operation.operands[0].shape[axis.index]:
        raise operation.refused("it repeats the one index of that axis")

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        return relax.op.broadcast_to(
            parts[0], replaced_at(operation.shape, index, axis.outer * (result_range[1] - result_range[0]))
        )

    return Rule((axis,), (axis.at(index),), write=write)


def concat(operation: Operation) -> Rule:
    """Return the rule of a concatenation along another axis, of ranges along the axis, or of blocks of equal length."""
    axes = [operand.axis for operand in operation.operands]
    indices = {axis.index for axis in axes if axis is not None}
    if len(indices) > 1:
        raise operation.refused(f"its operands have the axis in different places, {sorted(indices)}")
    axis = next(axis for axis in axes if axis is not None)
    if int(operation.expression.attrs.axis or 0) % len(operation.shape) != axis.index:
        return Rule((axis,) * len(axes), (axis,))
    if operation.by_blocks:
        blocks = [
            operand_axis.outer
            for operand_axis in axes
            if operand_axis is not None and operand_axis.length == axis.length
        ]
        if len(blocks) < len(axes):
            raise operation.refused("its operands are not sharded in the same way")
        return Rule(tuple(axes), (Axis(axis.index, sum(blocks), axis.length),))
    lengths = [operand.shape[axis.index] for operand in operation.operands]
    begins = list(accumulate(lengths, initial=0))

    def needs(result_range: Range) -> tuple[Range | None, ...]:
        within = [
            (max(result_range[0], first) - first, min(result_range[1], end) - first) for first, end in pairwise(begins)
        ]
        return tuple((first, end) if first < end else None for first, end in within)

    def write(result_range: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        return relax.op.concat([part for part in parts if part is not None], axis.index)

    operands = tuple(Axis(axis.index, 1, length) for length in lengths)
    return Rule(operands, (Axis(axis.index, 1, begins[-1]),), needs=needs, write=write)


def stack(operation: Operation) -> Rule:
    axis = operation.operands[0].axis
    if axis is None or any(operand.axis != axis for operand in operation.operands):
        raise operation.refused("its operands are not all split along the same axis")
    new = int(operation.expression.attrs.axis or 0) % len(operation.shape)
    return Rule((axis,) * len(operation.operands), (axis.at(axis.index + (new <= axis.index)),))


def split(operation: Operation) -> Rule:
    """Return the rule of a split along another axis, or at the bounds of blocks."""
    axis, size = operation.only_first(), operation.operands[0].shape
    along = int(operation.expression.attrs.axis) % len(size)
    ends = section_ends(operation.expression)
    if along != axis.index and ends is not None:
        return Rule((axis,), (axis,) * (len(ends) + 1))
    if ends is None or any(end % axis.length for end in ends):
        raise operation.refused("it takes that axis apart")

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        width = result_range[1] - result_range[0]
        return relax.op.split(parts[0], [end // axis.length * width for end in ends], along)

    blocks = [(end - begin) // axis.length for begin, end in pairwise([0, *ends, size[along]])]
    return Rule((axis,), tuple(Axis(along, outer, axis.length) for outer in blocks), write=write)


def section_ends(call: relax.Call) -> list[int] | None:
    """Return the ends of all sections of a ``relax.split`` but the last; None if equal sections do not fit the axis."""
    length = shape_of(leaves_of(call)[0])[int(call.attrs.axis)]
    sections = call.attrs.indices_or_sections
    if isinstance(sections, int) or hasattr(sections, "value"):
        count = int(sections)
        return None if length % count else [length // count * place for place in range(1, count)]
    return [int(end) for end in sections]


def strided_slice(operation: Operation) -> Rule:
    """Return the rule of a slice along another axis, of whole blocks, or of a range with a positive stride."""
    axis, ranges = operation.only_first(), slice_ranges(operation.expression)
    if ranges is None:
        raise operation.refused("it has a stride below 1, or bounds that are not numbers")
    if axis.index not in ranges:
        return same_range(operation, axis)
    begin, end, stride = ranges[axis.index]
    is_whole_blocks = stride == 1 and begin < end and begin % axis.length == end % axis.length == 0
    if operation.by_blocks and not is_whole_blocks:
        raise operation.refused("it takes that axis apart")

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        width = result_range[1] - result_range[0]
        axis_slice = (0, (width - 1) * stride + 1, stride)
        if is_whole_blocks:
            axis_slice = (begin // axis.length * width, end // axis.length * width, 1)
        first, last, strides = zip(*{**ranges, axis.index: axis_slice}.values(), strict=True)
        return relax.op.strided_slice(parts[0], list(ranges), first, last, strides)

    if is_whole_blocks:
        return Rule((axis,), (Axis(axis.index, (end - begin) // axis.length, axis.length),), write=write)
    return reading(operation, axis, lambda part: (begin + part[0] * stride, begin + (part[1] - 1) * stride + 1), write)


def slice_ranges(call: relax.Call) -> dict[int, tuple[int, int, int]] | None:
    """Return (begin, end, stride) by axis of a slice, clipped to the axis.

    None if one of them is not a number, or a stride is below 1.
    """
    data, *rest = call.args
    if not all(isinstance(part, relax.Tuple) for part in rest):
        return None
    numbers = [[field.value for field in part.fields if hasattr(field, "value")] for part in rest]
    axes, begins, ends = numbers[:3]
    strides = numbers[3] if len(numbers) > 3 else [1] * len(axes)
    if len({len(axes), len(begins), len(ends), len(strides)}) > 1 or any(stride < 1 for stride in strides):
        return None
    shape = shape_of(data)
    return {
        axis % len(shape): (*slice(begin, end).indices(shape[axis])[:2], stride)
        for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True)
    }
