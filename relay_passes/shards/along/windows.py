"""Operators that read a window of indices for each index of the result: convolutions, pools, pads.

Let s be the stride, p the padding before the axis, and k the indices of a dilated kernel. The results b … e - 1 read
the indices b·s - p … (e - 1)·s - p + k - 1 of the operand. Indices outside the operand are padding: a part at the
image's border keeps the layer's padding, clipped, and an inner part has none. (Arithmetic: Dumoulin and Visin, 2016.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax

from relay_passes.ir import constant, convolution_like, shape_of
from relay_passes.shards.along.rule import Along, Emit, Operation, Range, Total, replaced_at, same_range


def window_range(wanted: Range, stride: int, before: int, kernel: int) -> Range:
    """Return the operand indices that the windows of ``wanted`` cover, including indices outside the operand."""
    return wanted[0] * stride - before, (wanted[1] - 1) * stride - before + kernel


def transposed_range(wanted: Range, stride: int, before: int, kernel: int) -> Range:
    """Return the operand indices whose windows in a transposed convolution's result reach ``wanted``.

    The range may lie partly outside the operand.
    """
    return -((kernel - 1 - before - wanted[0]) // stride), (wanted[1] - 1 + before) // stride + 1


def convolution(operation: Operation) -> Along:
    axis, attributes = operation.only_first(), operation.expression.attrs
    if str(attributes.data_layout)[axis] == "N":
        return same_range(operation, axis, (axis, None))
    place, stride, padding, reach = _windows(operation, axis)
    before, length = padding[place], operation.operands[0].shape[axis]
    rank = len(operation.shape)

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        return _inside(operation, window_range(wanted, stride, before, reach), length), None

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        first, end = window_range(wanted, stride, before, reach)
        one_sided = _one_sided(padding, place, max(0, -first), max(0, end - length))
        return convolution_like(operation.expression, parts, padding=one_sided)

    is_pointwise = (reach, stride, before, padding[place + rank - 2]) == (1, 1, 0, 0)
    return Along(axis, (axis, None), needs, write, local=is_pointwise)


def transposed_convolution(operation: Operation) -> Along:
    axis, attributes = operation.only_first(), operation.expression.attrs
    if str(attributes.data_layout)[axis] == "N":
        return same_range(operation, axis, (axis, None))
    place, stride, padding, reach = _windows(operation, axis)
    before, length = padding[place], operation.operands[0].shape[axis]

    def taken(wanted: Range) -> Range:
        first, end = transposed_range(wanted, stride, before, reach)
        # If the kernel is shorter than the stride, results between two windows are 0 and belong to the window before.
        first = min(first, (wanted[0] + before) // stride)
        return _inside(operation, (first, max(end, first + 1)), length)

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        return taken(wanted), None

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        first, end = taken(wanted)
        covered = first * stride, (end - 1) * stride + reach
        cut_before, cut_after = wanted[0] + before - covered[0], covered[1] - wanted[1] - before
        output_padding = [int(each) for each in attributes.output_padding]
        return convolution_like(
            operation.expression,
            parts,
            padding=_one_sided(padding, place, cut_before, max(0, cut_after)),
            output_padding=replaced_at(output_padding, place, max(0, -cut_after)),
        )

    return Along(axis, (axis, None), needs, write)


def pool(operation: Operation) -> Along | Total:
    axis, attributes = operation.only_first(), operation.expression.attrs
    if str(attributes.layout)[axis] in "NC":
        return same_range(operation, axis, (axis,))
    place = _spatial(operation, str(attributes.layout), axis)
    kernel, stride = [int(each) for each in attributes.pool_size], int(attributes.strides[place])
    padding, length = [int(each) for each in attributes.padding], operation.operands[0].shape[axis]
    before, after = padding[place], padding[place + len(kernel)]
    reach = (kernel[place] - 1) * int(attributes.dilation[place]) + 1
    write_whole = _POOLS[operation.operator]

    def written(part: relax.Expr, size: list[int], pads: list[int]) -> relax.Expr:
        return write_whole(
            part,
            pool_size=size,
            strides=attributes.strides,
            padding=pads,
            dilation=attributes.dilation,
            ceil_mode=attributes.ceil_mode,
            count_include_pad=attributes.count_include_pad,
            layout=attributes.layout,
            out_layout=attributes.out_layout,
        )

    first, end = window_range((0, 1), stride, before, reach)
    covers_all = operation.shape[axis] == 1 and first <= 0 and end >= length and reach == kernel[place]
    if covers_all and operation.operator.startswith("relax.nn.avg"):
        # A mean over the whole axis: each part's mean is weighted by its number of indices.
        counted = min(end, length + after) - first if attributes.count_include_pad else length
        dtype = str(operation.expression.ty.dtype.dtype)

        def weighted(part: relax.Expr, emit: Emit) -> relax.Expr:
            rows = shape_of(part)[axis]
            mean = emit(written(part, replaced_at(kernel, place, rows), _one_sided(padding, place, 0, 0)))
            return relax.op.multiply(mean, constant(np.array(rows / counted, dtype)))

        return Total(weighted, relax.op.add)

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        return (_inside(operation, window_range(wanted, stride, before, reach), length),)

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        first, end = window_range(wanted, stride, before, reach)
        # With ``ceil_mode`` a window may end behind the padding; an average does not count the indices there.
        return written(parts[0], kernel, _one_sided(padding, place, max(0, -first), max(0, min(end - length, after))))

    return Along(axis, (axis,), needs, write, local=(reach, stride, before, after) == (1, 1, 0, 0))


def pad(operation: Operation) -> Along:
    axis, attributes = operation.only_first(), operation.expression.attrs
    widths = [int(each) for each in attributes.pad_width]
    before, length = widths[2 * axis], operation.operands[0].shape[axis]
    is_local = not any(widths[2 * axis : 2 * axis + 2])
    if not is_local and attributes.pad_mode != "constant":
        raise operation.refused(f"it pads that axis in the mode {str(attributes.pad_mode)!r}")

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        return (_inside(operation, window_range(wanted, 1, before, 1), length),)

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        first, end = window_range(wanted, 1, before, 1)
        own = replaced_at(replaced_at(widths, 2 * axis, max(0, -first)), 2 * axis + 1, max(0, end - length))
        return relax.op.nn.pad(parts[0], own, attributes.pad_mode, attributes.pad_value)

    return Along(axis, (axis,), needs, write, local=is_local)


def _windows(operation: Operation, axis: int) -> tuple[int, int, list[int], int]:
    """Return a convolution's geometry along the split axis.

    These are the axis's position among the spatial axes, its stride, the padding of all axes, and the number of indices
    that a window covers.
    """
    attributes = operation.expression.attrs
    layout = str(attributes.data_layout)
    place = _spatial(operation, layout, axis)
    kernel = operation.operands[1].shape[str(attributes.kernel_layout).index(layout[axis])]
    reach = (kernel - 1) * int(attributes.dilation[place]) + 1
    return place, int(attributes.strides[place]), [int(each) for each in attributes.padding], reach


def _spatial(operation: Operation, layout: str, axis: int) -> int:
    """Return the position of the split axis among the spatial axes."""
    if str(operation.expression.attrs.out_layout) != layout:
        raise operation.refused(f"it changes the layout {layout}")
    if layout[axis] not in "DHW" or not layout.isalpha():
        raise operation.refused(f"{layout[axis]!r} of its layout {layout} is no axis of its windows")
    return [letter for letter in layout if letter in "DHW"].index(layout[axis])


def _inside(operation: Operation, needed: Range, length: int) -> Range:
    first, end = max(0, needed[0]), min(length, needed[1])
    if first >= end:
        raise operation.refused("a part of its result would be made of padding alone")
    return first, end


def _one_sided(padding: Sequence[int], place: int, before: int, after: int) -> list[int]:
    return replaced_at(replaced_at(padding, place, before), place + len(padding) // 2, after)


_POOLS = {
    f"relax.nn.{kind}_pool{rank}d": getattr(relax.op.nn, f"{kind}_pool{rank}d")
    for kind in ("avg", "max")
    for rank in (1, 2, 3)
}
