"""Convert convolutions, to channels first, and products of matrices."""

import math
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir.dialects import stablehlo
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, dtype_of, numbers_of, shape_of, wide
from tvm_split.frontends.stablehlo.conversions import HloCall
from tvm_split.frontends.stablehlo.conversions.shapes import padded, reversed_along
from tvm_split.frontends.stablehlo.modules import integer, integers, pairs


def _convolution(op: Operators, call: HloCall) -> relax.Expr:
    data, weight = call.whole(0), call.whole(1)
    operation = call.source
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    space = list(numbers.input_spatial_dimensions)
    count = len(space)
    if not 1 <= count <= 3:
        raise ModelImportError(f"it has {count} axes of space; 1, 2 and 3 can be imported")
    if integer(operation, "batch_group_count", 1) != 1:
        raise ModelImportError("it is grouped by batch, as gradients are")
    groups = integer(operation, "feature_group_count", 1)
    ones = [1] * count
    strides, dilation, spread = (
        integers(operation, name, ones) for name in ("window_strides", "rhs_dilation", "lhs_dilation")
    )
    padding = pairs(operation, "padding", count)
    kernel_space = list(numbers.kernel_spatial_dimensions)
    turned = integers(operation, "window_reversal", [0] * count)
    weight = reversed_along(op, weight, [axis for axis, turn in zip(kernel_space, turned, strict=True) if turn])
    dtype = wide(call.dtype) if call.dtype != dtype_of(data) else call.dtype
    data, weight = op.cast(data, dtype), op.cast(weight, dtype)
    data_order = [numbers.input_batch_dimension, numbers.input_feature_dimension, *space]
    kernel = [shape_of(weight)[axis] for axis in kernel_space]
    outputs = shape_of(weight)[numbers.kernel_output_feature_dimension]
    kernel_order = [numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension, *kernel_space]
    transposed = None
    if any(step > 1 for step in spread) and strides == ones:
        transposed = _transposed_padding(kernel, dilation, padding)
    if transposed is not None:
        weights = _transposed_weights(op, weight, kernel_order, groups)
        before_and_after, further = transposed
        convolve = getattr(op.nn, f"conv{count}d_transpose")
        result = convolve(op.transposed(data, data_order), weights, spread, before_and_after, further, dilation, groups)
    else:
        data, padding = _with_plain_padding(op, data, space, spread, padding)
        lows, highs = zip(*padding, strict=True)
        convolve = getattr(op.nn, f"conv{count}d")
        weights = op.transposed(weight, kernel_order)
        paddings = [*lows, *highs]
        result = convolve(
            op.transposed(data, data_order), weights, strides, paddings, dilation, groups, out_dtype=dtype
        )
    order = [numbers.output_batch_dimension, numbers.output_feature_dimension, *numbers.output_spatial_dimensions]
    if outputs != call.shape[numbers.output_feature_dimension]:
        raise ModelImportError(f"it gives {call.shape} of {outputs} kernels")
    return op.transposed(op.cast(result, call.dtype), np.argsort(order).tolist())


def _with_plain_padding(
    op: Operators, data: relax.Expr, space: Sequence[int], spread: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[relax.Expr, list[tuple[int, int]]]:
    """Return the data with the base dilation ``spread`` and negative padding applied, and the remaining padding."""
    inner, low, high = ([0] * len(shape_of(data)) for _ in range(3))
    for axis, apart, (before, after) in zip(space, spread, padding, strict=True):
        inner[axis], low[axis], high[axis] = apart - 1, min(before, 0), min(after, 0)
    data = padded(op, data, low, high, inner, 0)
    return data, [(max(before, 0), max(after, 0)) for before, after in padding]


def _transposed_padding(
    kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]] | None:
    """Return the padding and output padding of the equivalent transposed convolution; None if there is none.

    For a kernel of extent k, padding dilated data by p equals slicing k - 1 - p off the full result.
    """
    reaches = [(size - 1) * apart for size, apart in zip(kernel, dilation, strict=True)]
    firsts, lasts = ([reach - pair[end] for reach, pair in zip(reaches, padding, strict=True)] for end in (0, 1))
    if min(firsts) < 0:
        return None
    return [*firsts, *(max(last, 0) for last in lasts)], [max(-last, 0) for last in lasts]


def _transposed_weights(op: Operators, weight: relax.Expr, order: Sequence[int], groups: int) -> relax.Expr:
    """Convert a kernel to the form of transposed convolutions: flipped, inputs of all groups before outputs."""
    weight = op.transposed(reversed_along(op, weight, order[2:]), order)
    outputs, inputs, *kernel = shape_of(weight)
    grouped = op.reshape(weight, [groups, outputs // groups, inputs, *kernel])
    swapped = op.permute_dims(grouped, [0, 2, 1, *range(3, 3 + len(kernel))])
    return op.reshape(swapped, [groups * inputs, outputs // groups, *kernel])


def _dot_general(op: Operators, call: HloCall) -> relax.Expr:
    numbers = stablehlo.DotDimensionNumbers(call.source.attributes["dot_dimension_numbers"])
    batch = list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)
    summed = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    return _product(op, call, batch, summed)


def _product(
    op: Operators,
    call: HloCall,
    batch: tuple[Sequence[int], Sequence[int]],
    summed: tuple[Sequence[int], Sequence[int]],
) -> relax.Expr:
    # Operands are cast to the result's dtype: integers need it, and half precision with a float32 result.
    left, right = (op.cast(call.whole(place), call.dtype) for place in (0, 1))
    free = [
        [axis for axis in range(len(shape_of(value))) if axis not in around and axis not in within]
        for value, around, within in zip((left, right), batch, summed, strict=True)
    ]
    # The axes of the result: those of the batch, then the free axes of each operand.
    places = list(range(len(call.shape)))
    first, second = len(batch[0]), len(batch[0]) + len(free[0])
    order = places
    if numbers_of(left) is not None and numbers_of(right) is None and not batch[0]:  # weights come second
        left, right, summed, free = right, left, summed[::-1], free[::-1]
        order = [*places[:first], *places[second:], *places[first:second]]
    batches = [shape_of(left)[axis] for axis in batch[0]]
    rows = [shape_of(left)[axis] for axis in free[0]]
    if batch[0] or not rows:
        rows = [math.prod(rows)]
    sums = math.prod(shape_of(left)[axis] for axis in summed[0])
    columns = math.prod(shape_of(right)[axis] for axis in free[1])
    left_matrix = op.shaped(op.transposed(left, [*batch[0], *free[0], *summed[0]]), [*batches, *rows, sums])
    right_matrix = op.shaped(op.transposed(right, [*batch[1], *summed[1], *free[1]]), [*batches, sums, columns])
    result = op.shaped(op.matmul(left_matrix, right_matrix), [call.shape[axis] for axis in order])
    return op.transposed(result, np.argsort(order).tolist())


CONVERSIONS: dict[str, Conversion] = {
    "convolution": _convolution,
    "dot_general": _dot_general,
    "dot": lambda op, call: _product(op, call, ([], []), ([len(call.shape_of(0)) - 1], [0])),
}
