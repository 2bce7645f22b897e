"""Convolutions, transposed and grouped ones too: computed with channels first, for which kernels are fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir.dialects import stablehlo
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.axis_orders import Arranger, Value
from tvm_split.frontends.operators import numbers_of, wide
from tvm_split.frontends.stablehlo.attributes import integer, integers, pairs
from tvm_split.frontends.stablehlo.conversions.shapes import padded, reversed_along
from tvm_split.frontends.stablehlo.values import Call, of_array


def _convolution(op: Arranger, call: Call) -> Value:
    data, weight = call.operands
    operation = call.operation
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
    dtype = wide(call.dtype) if call.dtype != data.dtype else call.dtype
    data, weight = op.as_dtype(data, dtype), op.as_dtype(weight, dtype)
    data_order = [numbers.input_batch_dimension, numbers.input_feature_dimension, *space]
    kernel = [weight.shape[axis] for axis in kernel_space]
    outputs = weight.shape[numbers.kernel_output_feature_dimension]
    kernel_order = [numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension, *kernel_space]
    transposed = None
    if any(each > 1 for each in spread) and strides == ones:
        transposed = _transposed_padding(kernel, dilation, spread, padding)
    if transposed is not None:
        weights = _transposed_weights(op, weight, kernel_order, groups)
        before_and_after, further = transposed
        convolve = getattr(op.nn, f"conv{count}d_transpose")
        result = convolve(op.full(data, data_order), weights, spread, before_and_after, further, dilation, groups)
    else:
        data, padding = _with_plain_padding(op, data, space, spread, padding)
        lows, highs = zip(*padding, strict=True)
        convolve = getattr(op.nn, f"conv{count}d")
        result = convolve(
            op.full(data, data_order), op.full(weight, kernel_order), strides, [*lows, *highs], dilation, groups,
            out_dtype=dtype,
        )  # fmt: skip
    order = [numbers.output_batch_dimension, numbers.output_feature_dimension, *numbers.output_spatial_dimensions]
    if outputs != call.shape[numbers.output_feature_dimension]:
        raise ModelImportError(f"it gives {call.shape} of {outputs} kernels")
    return Value(op.cast(result, call.dtype), tuple(order), call.shape)


def _with_plain_padding(
    op: Arranger, data: Value, space: Sequence[int], spread: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[Value, list[tuple[int, int]]]:
    """Data that is spread apart and cut as a convolution would do it itself, and what is left of its padding."""
    inner, low, high = [0] * data.rank, [0] * data.rank, [0] * data.rank
    for axis, apart, (before, after) in zip(space, spread, padding, strict=True):
        inner[axis], low[axis], high[axis] = apart - 1, min(before, 0), min(after, 0)
    data = padded(op, data, low, high, inner, 0)
    return data, [(max(before, 0), max(after, 0)) for before, after in padding]


def _transposed_padding(
    kernel: Sequence[int], dilation: Sequence[int], spread: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]] | None:
    """A transposed convolution's padding and output padding that give the same; None if there are none.

    Padding data that is spread apart by p is, for a kernel that reaches over k, cutting k - 1 - p off the full result.
    """
    before, after, further = [], [], []
    for size, apart, step, (low, high) in zip(kernel, dilation, spread, padding, strict=True):
        reach = (size - 1) * apart
        first, last = reach - low, reach - high
        if first < 0 or last <= -step:
            return None
        before.append(first)
        after.append(max(last, 0))
        further.append(max(-last, 0))
    return [*before, *after], further


def _transposed_weights(op: Arranger, weight: Value, order: Sequence[int], groups: int) -> relax.Expr:
    """The kernel of a convolution as a transposed one has it: turned round, inputs (of all groups) before outputs."""
    turned = reversed_along(op, weight, order[2:])
    expr = op.full(turned, order)
    outputs, inputs, *kernel = (weight.shape[axis] for axis in order)
    space = range(3, 3 + len(kernel))
    numbers = numbers_of(expr)
    shape, swapped = [groups, outputs // groups, inputs, *kernel], [0, 2, 1, *space]
    final = [groups * inputs, outputs // groups, *kernel]
    if numbers is not None:
        return of_array(np.ascontiguousarray(numbers.reshape(shape).transpose(swapped)).reshape(final)).expr
    return op.reshape(op.permute_dims(op.reshape(expr, shape), swapped), final)


CONVERTERS: dict[str, Callable[[Arranger, Call], Value]] = {"stablehlo.convolution": _convolution}
"""By the operation's name."""
