"""Rules of operators that read a window of indices for each index of the result: convolutions, pools, pads.

Let s be the stride, p the padding before the axis, and k the indices of a dilated kernel. The results b … e - 1 read
the indices b·s - p … (e - 1)·s - p + k - 1 of the operand. Indices outside the operand are padding: a part at the
image's border keeps the layer's padding, clipped, and an inner part has none. (Arithmetic: Dumoulin and Visin, 2016.)
"""

from collections.abc import Sequence

import numpy as np
from tvm import relax

from relay_passes.ir import call_like, constant, shape_of
from relay_passes.sharding.compute_rules import channel_convolution
from relay_passes.sharding.region import Range
from relay_passes.sharding.rule import Axis, Emit, Operation, Rule, inside, reading, replaced_at, same_range


def window_range(result_range: Range, stride: int, before: int, kernel: int) -> Range:
    """Return the operand indices that the windows of ``result_range`` cover, including indices outside the operand."""
    return result_range[0] * stride - before, (result_range[1] - 1) * stride - before + kernel


def convolution(operation: Operation) -> Rule:
    layout = str(operation.expression.attrs.data_layout)
    data, weight = operation.operands
    if weight.axis is not None or (data.axis is not None and layout[data.axis.index] == "C"):
        return channel_convolution(operation)
    axis = operation.only_first()
    if layout[axis.index] == "N":
        return same_range(operation, axis)
    place, stride, padding, reach = _windows(operation, axis)
    before = padding[place]
    if (reach, stride, before, padding[place + len(padding) // 2]) == (1, 1, 0, 0):
        return same_range(operation, axis)

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        first, end = window_range(result_range, stride, before, reach)
        one_sided = _one_sided(padding, place, max(0, -first), max(0, end - axis.length))
        return call_like(operation.expression, parts, padding=one_sided)

    return reading(operation, axis, lambda result_range: window_range(result_range, stride, before, reach), write)


def transposed_convolution(operation: Operation) -> Rule:
    axis, attributes = operation.only_first(), operation.expression.attrs
    if str(attributes.data_layout)[axis.index] == "N":
        return same_range(operation, axis)
    place, stride, padding, reach = _windows(operation, axis)
    before = padding[place]

    def operand_range(result_range: Range) -> Range:
        """Return the indices whose windows in the result reach the range; some may lie outside the operand."""
        first = -((reach - 1 - before - result_range[0]) // stride)
        end = (result_range[1] - 1 + before) // stride + 1
        # If the kernel is shorter than the stride, results between two windows are 0 and belong to the window before.
        first = min(first, (result_range[0] + before) // stride)
        return first, max(end, first + 1)

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        first, end = inside(operation, operand_range(result_range), axis.length)
        covered = first * stride, (end - 1) * stride + reach
        cut_before, cut_after = result_range[0] + before - covered[0], covered[1] - result_range[1] - before
        output_padding = [int(width) for width in attributes.output_padding]
        return call_like(
            operation.expression,
            parts,
            padding=_one_sided(padding, place, cut_before, max(0, cut_after)),
            output_padding=replaced_at(output_padding, place, max(0, -cut_after)),
        )

    return reading(operation, axis, operand_range, write)


def pool(operation: Operation) -> Rule:
    axis, attributes = operation.only_first(), operation.expression.attrs
    if str(attributes.layout)[axis.index] in "NC":
        return same_range(operation, axis)
    place = _spatial(operation, str(attributes.layout), axis)
    kernel, stride = [int(size) for size in attributes.pool_size], int(attributes.strides[place])
    padding, length = [int(width) for width in attributes.padding], axis.length
    before, after = padding[place], padding[place + len(kernel)]
    reach = (kernel[place] - 1) * int(attributes.dilation[place]) + 1

    first, end = window_range((0, 1), stride, before, reach)
    covers_all = operation.shape[axis.index] == 1 and first <= 0 and end >= length and reach == kernel[place]
    if covers_all and operation.operator.startswith("relax.nn.avg"):
        # A mean over the whole axis: each part's mean is weighted by its number of indices.
        counted = min(end, length + after) - first if attributes.count_include_pad else length

        def weighted(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
            rows = shape_of(parts[0])[axis.index]
            size, one_sided = replaced_at(kernel, place, rows), _one_sided(padding, place, 0, 0)
            mean = emit(call_like(operation.expression, parts, pool_size=size, padding=one_sided))
            return relax.op.multiply(mean, constant(np.array(rows / counted, str(mean.ty.dtype.dtype))))

        return Rule((axis,), (None,), "sum", write=weighted)

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        first, end = window_range(result_range, stride, before, reach)
        # With ``ceil_mode`` a window may end behind the padding; an average does not count the indices there.
        one_sided = _one_sided(padding, place, max(0, -first), max(0, min(end - length, after)))
        return call_like(operation.expression, parts, padding=one_sided)

    if (reach, stride, before, after) == (1, 1, 0, 0):
        return same_range(operation, axis)
    return reading(operation, axis, lambda result_range: window_range(result_range, stride, before, reach), write)


def pad(operation: Operation) -> Rule:
    axis, attributes = operation.only_first(), operation.expression.attrs
    widths = [int(width) for width in attributes.pad_width]
    before = widths[2 * axis.index]
    if not any(widths[2 * axis.index : 2 * axis.index + 2]):
        return same_range(operation, axis)
    if attributes.pad_mode != "constant":
        raise operation.refused(f"it pads that axis in the mode {str(attributes.pad_mode)!r}")

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        first, end = window_range(result_range, 1, before, 1)
        local_widths = [*widths]
        local_widths[2 * axis.index : 2 * axis.index + 2] = max(0, -first), max(0, end - axis.length)
        return relax.op.nn.pad(parts[0], local_widths, attributes.pad_mode, attributes.pad_value)

    return reading(operation, axis, lambda result_range: window_range(result_range, 1, before, 1), write)


def _windows(operation: Operation, axis: Axis) -> tuple[int, int, list[int], int]:
    """Return a convolution's geometry along the sharded axis.

    These are the axis's position among the spatial axes, its stride, the padding of all axes, and the number of indices
    that a window covers.
    """
    attributes = operation.expression.attrs
    layout = str(attributes.data_layout)
    place = _spatial(operation, layout, axis)
    kernel = operation.operands[1].shape[str(attributes.kernel_layout).index(layout[axis.index])]
    reach = (kernel - 1) * int(attributes.dilation[place]) + 1
    return place, int(attributes.strides[place]), [int(width) for width in attributes.padding], reach


def _spatial(operation: Operation, layout: str, axis: Axis) -> int:
    """Return the position of the sharded axis among the spatial axes (D, H, W) of ``layout``.

    Raises:
        ShardError: the operation changes its layout, the layout has blocks, or the axis is not spatial.
    """
    letter = layout[axis.index]
    if str(operation.expression.attrs.out_layout) != layout:
        raise operation.refused(f"it changes the layout {layout}")
    if operation.by_blocks or letter not in "DHW" or not layout.isalpha():
        raise operation.refused(f"{letter!r} of its layout {layout} is not an axis of its windows")
    return [spatial for spatial in layout if spatial in "DHW"].index(letter)


def _one_sided(padding: Sequence[int], place: int, before: int, after: int) -> list[int]:
    return replaced_at(replaced_at(padding, place, before), place + len(padding) // 2, after)
