"""Convert convolutions, matrix products, reductions over axes (sums, argmax) and windows (pooling), and sorting."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from tvm import relax

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError
from tvm_split.frontends.building import result_of_nothing
from tvm_split.frontends.compositions import sorted_elements, sorted_places
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, numbers_of, shape_of, wide
from tvm_split.frontends.stablehlo.conversions import HloCall
from tvm_split.frontends.stablehlo.conversions.shapes import padded, reversed_along
from tvm_split.frontends.stablehlo.modules import OVER_AXES, combined_by, comparison, integer, integers, pairs


def neutral(kind: str, dtype: str) -> float:
    """Return the neutral element of a reduction: 0 for a sum, the least number for a maximum."""
    return result_of_nothing(f"relax.{OVER_AXES[kind]}", dtype)


def _is_neutral(initial: Array | None, kind: str, dtype: str) -> bool:
    return initial is not None and float(initial) == float(neutral(kind, dtype))


def _reduce(op: Operators, call: HloCall) -> relax.Expr | list[relax.Expr]:
    axes = integers(call.source, "dimensions")
    if len(call.operands) == 4:
        return _extreme_and_place(op, call, axes)
    if len(call.operands) != 2:
        raise ModelImportError(f"it reduces {len(call.operands) // 2} tensors at once")
    kind = combined_by(call.source)
    value, initial = call.operands
    if kind in ("and", "or") and call.dtype != "bool":
        raise ModelImportError(
            f"it combines the bits of {call.dtype} by {kind}; all and any of booleans can be imported"
        )
    if not all(call.shape_of(0)[axis] for axis in axes):  # there is nothing to reduce
        return op.shaped(initial, [1] * len(call.shape))
    repeats = any(shape_of(value)[axis] != call.shape_of(0)[axis] for axis in axes)
    result = reduced(op, call.whole(0) if repeats else value, axes, kind)
    if not _is_neutral(call.known(1), kind, call.dtype):
        names = {"and": "logical_and", "or": "logical_or"}
        result = getattr(op, names.get(kind, kind))(result, initial)
    return result


def reduced(op: Operators, value: relax.Expr, axes: Sequence[int], kind: str) -> relax.Expr:
    """Reduce ``value`` over ``axes``; half precision is accumulated in float32."""
    dtype = dtype_of(value)
    if dtype == "bool":  # a sum of them could overflow
        kind = {"add": "or", "multiply": "and"}.get(kind, kind)
    return op.cast(getattr(op, OVER_AXES[kind])(op.cast(value, wide(dtype)), list(axes)), dtype) if axes else value


def _extreme_and_place(op: Operators, call: HloCall, axes: Sequence[int]) -> list[relax.Expr]:
    """Convert a reduction to the extreme element and its position, by which argmax and argmin are written."""
    value = call.whole(0)
    counted = call.known(1)
    block = call.source.regions[0].blocks[0]
    is_largest = _keeps_the_larger(block)
    if (
        is_largest is None
        or counted is None
        or len(axes) != 1
        or not (np.moveaxis(counted, axes[0], -1) == np.arange(shape_of(value)[axes[0]])).all()  # 0, 1, 2, …
    ):
        raise ModelImportError("it reduces two tensors in a way of its own; of these only argmax and argmin are known")
    extreme = reduced(op, value, axes, "maximum" if is_largest else "minimum")
    find = op.argmax if is_largest else op.argmin
    return [extreme, op.cast(find(value, axes[0]), dtype_of(call.operands[1]))]


def _keeps_the_larger(block: Any) -> bool | None:
    """Return whether the body of an argmax or argmin keeps the larger value (True) or the smaller one (False).

    The body takes two pairs (value, position). None if it does not compare the two values by order.
    """
    first, _, second, _ = block.arguments
    for op_view in block.operations:
        operation = op_view.operation
        if operation.name == "stablehlo.compare" and set(operation.operands) == {first, second}:
            direction = comparison(operation)
            if direction[0] in "GL":
                return bool((direction[0] == "G") == (operation.operands[0] == first))
    return None


def _reduce_window(op: Operators, call: HloCall) -> relax.Expr:
    if len(call.operands) != 2:
        raise ModelImportError(f"it reduces {len(call.operands) // 2} tensors at once")
    operation = call.source
    kind, rank = combined_by(operation), len(call.shape)
    window, ones = integers(operation, "window_dimensions"), [1] * rank
    strides, spread, dilation = (
        integers(operation, name, ones) for name in ("window_strides", "base_dilations", "window_dilations")
    )
    padding = pairs(operation, "padding", rank)
    if not _is_neutral(call.known(1), kind, call.dtype):
        raise ModelImportError("its windows begin with a number that changes the result")
    along = [
        axis for axis in range(rank) if (window[axis], strides[axis], spread[axis], padding[axis]) != (1, 1, 1, (0, 0))
    ]
    if not along:
        return call.operands[0]
    if len(along) == 1 and strides == spread == dilation == ones and kind in ("add", "multiply"):
        (axis,) = along
        size = call.shape_of(0)[axis]
        if window[axis] == size and padding[axis] in ((size - 1, 0), (0, size - 1)):
            return _running(op, call.whole(0), axis, kind, is_from_the_end=padding[axis][0] == 0)
    return _pooled(op, call, kind, along, (window, strides, spread, dilation), padding)


def _running(op: Operators, value: relax.Expr, axis: int, kind: str, is_from_the_end: bool) -> relax.Expr:
    dtype, turned = dtype_of(value), [axis] * is_from_the_end
    value = op.cast(reversed_along(op, value, turned), wide(dtype))
    scanned = (op.cumsum if kind == "add" else op.cumprod)(value, axis, wide(dtype))
    return reversed_along(op, op.cast(scanned, dtype), turned)


def _pooled(
    op: Operators,
    call: HloCall,
    kind: str,
    along: list[int],
    windows: tuple[list[int], ...],
    padding: Sequence[tuple[int, int]],
) -> relax.Expr:
    """Convert a window reduction to pooling over one to three axes; the others become batch and channels."""
    value, dtype = call.whole(0), call.dtype
    if len(along) > 3 or kind not in ("add", "maximum", "minimum") or not is_float(dtype):
        raise ModelImportError(
            f"it combines windows of {dtype} over {len(along)} axes by {kind}; "
            "sums and extremes of floats over up to 3 axes can be imported"
        )
    window, strides, spread, dilation = ([numbers[axis] for axis in along] for numbers in windows)
    filling = float(neutral(kind, dtype))
    low, high, inner = ([0] * len(call.shape) for _ in range(3))
    for place, axis in enumerate(along):
        reach = (window[place] - 1) * dilation[place]
        inner[axis] = spread[place] - 1
        if kind != "maximum" or min(padding[axis]) < 0 or max(padding[axis]) > reach // 2:
            low[axis], high[axis] = padding[axis]
    value = padded(op, value, low, high, inner, filling)
    pool_padding = [(padding[axis][0] - low[axis], padding[axis][1] - high[axis]) for axis in along]
    other_axes = [axis for axis in range(len(call.shape)) if axis not in along]
    sizes = [shape_of(value)[axis] for axis in other_axes]
    computed = wide(dtype)
    # Pooling needs an axis for the batch and one for channels.
    data = op.cast(op.transposed(value, [*other_axes, *along]), computed)
    two = sizes if len(sizes) == 2 else [1, math.prod(sizes)]
    data = op.shaped(data, [*two, *shape_of(data)[len(other_axes) :]])
    lows, highs = zip(*pool_padding, strict=True)
    options = {"strides": strides, "padding": [*lows, *highs], "dilation": dilation}
    if kind == "add":
        pooled = getattr(op.nn, f"avg_pool{len(along)}d")(data, window, count_include_pad=True, **options)
        pooled = op.multiply(pooled, constant(math.prod(window), computed))
    else:
        turned = op.negative(data) if kind == "minimum" else data
        pooled = getattr(op.nn, f"max_pool{len(along)}d")(turned, window, **options)
        pooled = op.negative(pooled) if kind == "minimum" else pooled
    result = op.shaped(op.cast(pooled, dtype), [*sizes, *shape_of(pooled)[2:]])
    return op.transposed(result, np.argsort([*other_axes, *along]).tolist())


def _sort(op: Operators, call: HloCall) -> list[relax.Expr]:
    axis = integer(call.source, "dimension", -1) % max(len(call.shape), 1)
    key, is_descending = _key(call.source.regions[0].blocks[0])
    where = sorted_places(op, call.whole(key), axis, is_descending)
    return [op.gather_elements(call.whole(place), where, axis) for place in range(len(call.operands))]


def _key(block: Any) -> tuple[int, bool]:
    """Return the position of the operand that is the sort key, and whether the order is descending.

    JAX converts floats to integer bits, or normalises zeros and NaNs, before it compares: the last comparison counts.
    """
    *body, end = [op_view.operation for op_view in block.operations]
    compared = [
        operation for operation in body if operation.name == "stablehlo.compare" and comparison(operation)[0] in "GL"
    ]
    arguments = list(block.arguments)
    for operation in compared:
        if list(end.operands) == list(operation.results):
            left, right = (_arguments_of(operand, arguments) for operand in operation.operands)
            if len(left) == len(right) == 1 and {left[0] // 2} == {right[0] // 2}:
                return left[0] // 2, (comparison(operation)[0] == "G") == (left[0] % 2 == 0)
    raise ModelImportError("it sorts in an order of its own; sorting by one tensor's numbers can be imported")


def _arguments_of(value: ir.Value, arguments: list[ir.Value]) -> list[int]:
    """The positions of the arguments that a value is computed from."""
    if value in arguments:
        return [arguments.index(value)]
    operation = value.owner
    if not isinstance(operation, ir.Block):
        positions = {place for operand in operation.operands for place in _arguments_of(operand, arguments)}
        return sorted(positions)
    return []


def _top_k(op: Operators, call: HloCall) -> list[relax.Expr]:
    attributes = call.source.attributes
    options = ir.DictAttr(attributes["composite_attributes"]) if "composite_attributes" in attributes else attributes
    count = ir.IntegerAttr(options["k"]).value
    values, places = sorted_elements(op, call.whole(0), -1, True, count)
    return [values, op.cast(places, "int32")]


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
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "sort": _sort,
    "chlo.top_k": _top_k,
}
