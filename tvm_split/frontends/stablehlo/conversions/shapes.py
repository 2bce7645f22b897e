"""Convert operations that only move elements, also by computed indices: dynamic slices, gathers and scatters."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxlib.mlir.dialects import stablehlo
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.compositions import flat_index, strides
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, shape_of
from tvm_split.frontends.stablehlo.conversions import HloCall
from tvm_split.frontends.stablehlo.modules import combined_by, integer, integers

_INDEX = "int64"
_SCATTERED = {"replace": "update", "add": "add", "multiply": "mul", "maximum": "max", "minimum": "min"}


def _broadcast(op: Operators, call: HloCall) -> relax.Expr:
    """Convert a broadcast: axis i of the operand becomes axis ``broadcast_dimensions[i]``, all others have size 1."""
    dimensions = integers(call.source, "broadcast_dimensions")
    value = op.transposed(call.operands[0], sorted(range(len(dimensions)), key=dimensions.__getitem__))
    sizes = dict(zip(sorted(dimensions), shape_of(value), strict=True))
    return op.shaped(value, [sizes.get(axis, 1) for axis in range(len(call.shape))])


def _reshape(op: Operators, call: HloCall) -> relax.Expr:
    """Convert a reshape. If it only adds or removes axes of size 1, repeated axes keep size 1."""
    before, after = call.shape_of(0), call.shape
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return op.shaped(call.whole(0), after)
    value = call.operands[0]
    sizes = (actual_size for actual_size, size in zip(shape_of(value), before, strict=True) if size != 1)
    return op.shaped(value, [1 if size == 1 else next(sizes) for size in after])


def _concatenate(op: Operators, call: HloCall) -> relax.Expr:
    axis = integer(call.source, "dimension")
    parts = [call.whole(place) for place in range(len(call.operands)) if call.shape_of(place)[axis]]
    return parts[0] if len(parts) == 1 else op.concat(parts, axis)


def _slice(op: Operators, call: HloCall) -> relax.Expr:
    bounds = (integers(call.source, name) for name in ("start_indices", "limit_indices", "strides"))
    return sliced(op, call.operands[0], call.shape_of(0), *bounds)


def sliced(
    op: Operators,
    value: relax.Expr,
    shape: Sequence[int],
    firsts: Sequence[int],
    lasts: Sequence[int],
    steps: Sequence[int] | None = None,
) -> relax.Expr:
    """Slice from ``firsts`` to ``lasts`` (exclusive) by ``steps`` along each axis of ``shape``."""
    steps = [1] * len(shape) if steps is None else steps
    lengths = [len(range(*bounds)) for bounds in zip(firsts, lasts, steps, strict=True)]
    axes = [axis for axis, size in enumerate(shape_of(value)) if lengths[axis] != shape[axis] == size]
    bounds = [[numbers[axis] for axis in axes] for numbers in (firsts, lasts, steps)]
    return op.strided_slice(value, axes, *bounds) if axes else value


def reversed_along(op: Operators, value: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """Reverse ``value`` along ``axes``."""
    for axis in axes:
        value = op.flip(value, axis) if shape_of(value)[axis] > 1 else value
    return value


def _pad(op: Operators, call: HloCall) -> relax.Expr:
    filling = call.known(1)
    if filling is None:
        raise ModelImportError("it pads with a number that is computed; pad with a number that is known")
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, inner = (integers(call.source, name) for name in names)
    if not any(map(any, (low, high, inner))):
        return call.operands[0]
    return padded(op, call.whole(0), low, high, inner, float(filling))


def padded(
    op: Operators, value: relax.Expr, low: Sequence[int], high: Sequence[int], inner: Sequence[int], filling: float
) -> relax.Expr:
    """Pad ``value`` before, after and between its elements along each axis; negative widths slice elements off."""
    for axis, between in enumerate(inner):
        value = _spread_apart(op, value, axis, between, filling)
    shape = shape_of(value)
    lasts = [size + min(pad, 0) for size, pad in zip(shape, high, strict=True)]
    value = sliced(op, value, shape, [max(-pad, 0) for pad in low], lasts)
    widths = [max(width, 0) for pair in zip(low, high, strict=True) for width in pair]
    return op.nn.pad(value, widths, "constant", filling) if any(widths) else value


def _spread_apart(op: Operators, value: relax.Expr, axis: int, between: int, filling: float) -> relax.Expr:
    """Insert ``between`` fillings between neighbouring elements along an axis."""
    shape = shape_of(value)
    if not between or shape[axis] < 2:
        return value
    alone = op.reshape(value, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
    widths = [0, 0] * (axis + 1) + [0, between] + [0, 0] * (len(shape) - axis - 1)
    length = shape[axis] * (between + 1)
    spread = op.reshape(op.nn.pad(alone, widths, "constant", filling), [*shape[:axis], length, *shape[axis + 1 :]])
    return op.strided_slice(spread, [axis], [0], [length - between])


def _dynamic_slice(op: Operators, call: HloCall) -> relax.Expr:
    shape, sizes = call.shape_of(0), integers(call.source, "slice_sizes")
    starts = [call.known(1 + axis) for axis in range(len(shape))]
    firsts, lasts, computed = [0] * len(shape), list(shape), []
    for axis, (whole, size) in enumerate(zip(shape, sizes, strict=True)):
        if size != whole and starts[axis] is None:
            computed.append(axis)
        elif size != whole:
            firsts[axis] = _start(starts[axis], whole, size)
            lasts[axis] = firsts[axis] + size
    value = sliced(op, call.operands[0], shape, firsts, lasts)
    for axis in computed:
        if shape_of(value)[axis] == shape[axis]:
            first = _within(op, call.operands[1 + axis], shape[axis] - sizes[axis])
            value = op.take(value, op.add(op.reshape(first, [1]), constant(np.arange(sizes[axis]), _INDEX)), axis)
    return value


def _within(op: Operators, index: relax.Expr, last: int | np.ndarray) -> relax.Expr:
    """Clamp ``index`` to 0 … ``last``, in int64. A take that clips its indices itself is 4 % slower."""
    index = op.cast(index, _INDEX)
    return op.minimum(op.maximum(index, constant(0, _INDEX)), constant(last, _INDEX))


def _dynamic_update(op: Operators, call: HloCall) -> relax.Expr:
    value, update, *starts = (call.whole(place) for place in range(len(call.operands)))
    shape, part = shape_of(value), shape_of(update)
    first_of_axis = [call.known(2 + axis) for axis in range(len(shape))]
    cut = [axis for axis in range(len(shape)) if part[axis] != shape[axis]]
    if all(first_of_axis[axis] is not None for axis in cut):
        return _replaced(op, value, update, cut, first_of_axis)
    # Each element of the result is read from the update if it lies in it, else from the value.
    inside = None
    for axis in cut:
        first = _within(op, starts[axis], shape[axis] - part[axis])
        offset = op.subtract(constant(np.arange(shape[axis]), _INDEX), op.reshape(first, [1]))
        is_in = op.logical_and(op.greater_equal(offset, 0), op.less(offset, part[axis]))
        is_in = op.reshape(is_in, [shape[axis] if position == axis else 1 for position in range(len(shape))])
        inside = is_in if inside is None else op.logical_and(inside, is_in)
        update = op.take(update, _within(op, offset, part[axis] - 1), axis)
    return op.where(inside, update, value)


def _replaced(
    op: Operators, value: relax.Expr, update: relax.Expr, cut: Sequence[int], starts: Sequence[np.ndarray | None]
) -> relax.Expr:
    """Replace the part of ``value`` at ``starts`` by ``update``: concatenate slices around it along axes ``cut``."""
    if not cut:
        return update
    *outer, axis = cut
    shape, part = shape_of(value), shape_of(update)
    firsts, lasts = [0] * len(shape), list(shape)
    for outer_axis in outer:
        firsts[outer_axis] = _start(starts[outer_axis], shape[outer_axis], part[outer_axis])
        lasts[outer_axis] = firsts[outer_axis] + part[outer_axis]
    row = sliced(op, value, shape, firsts, lasts)
    start = _start(starts[axis], shape[axis], part[axis])
    bounds = ((0, start), (start + part[axis], shape[axis]))
    before, after = ([op.strided_slice(row, [axis], [low], [high])] if low < high else [] for low, high in bounds)
    return _replaced(op, value, op.concat([*before, update, *after], axis), outer, starts)


def _start(start: np.ndarray | None, size: int, length: int) -> int:
    """The start of a part, clamped so that the part is inside; None, the unknown start of a whole axis, becomes 0."""
    return 0 if start is None else min(max(int(start), 0), size - length)


def _gather(op: Operators, call: HloCall) -> relax.Expr:
    value, indices, shape = call.whole(0), call.whole(1), call.shape
    numbers = stablehlo.GatherDimensionNumbers(call.source.attributes["dimension_numbers"])
    sizes, whole = integers(call.source, "slice_sizes"), shape_of(value)
    offset, collapsed = list(numbers.offset_dims), list(numbers.collapsed_slice_dims)
    of_operand, of_indices = list(numbers.operand_batching_dims), list(numbers.start_indices_batching_dims)
    index_map, vector = list(numbers.start_index_map), numbers.index_vector_dim
    is_rest_whole = all(sizes[axis] == whole[axis] for axis in range(len(whole)) if axis not in index_map)
    if len(index_map) == 1 and collapsed == index_map and not of_operand and is_rest_whole:
        return _taken(op, call, value, indices, index_map[0], vector, offset)
    window_axes = [axis for axis in range(len(whole)) if axis not in collapsed and axis not in of_operand]
    places = _places(op, indices, vector, [whole[axis] - sizes[axis] for axis in index_map])
    paired = [(axis, other - (other > vector)) for axis, other in zip(of_operand, of_indices, strict=True)]
    where = _where(op, places, whole, index_map, paired, shape, dict(zip(offset, window_axes, strict=True)))
    return op.take(op.reshape(value, [math.prod(whole)]), where, 0)


def _taken(
    op: Operators, call: HloCall, value: relax.Expr, indices: relax.Expr, axis: int, vector: int, offset: Sequence[int]
) -> relax.Expr:
    """Convert a gather of whole rows along one axis, such as an embedding."""
    places = _within(op, indices, shape_of(value)[axis] - 1)
    shape = [size for position, size in enumerate(shape_of(indices)) if position != vector]
    # The axes of the result: those of the operand, with its gathered axis replaced by those of the indices.
    result = op.take(value, op.shaped(places, shape), axis)
    batch = [position for position in range(len(call.shape)) if position not in offset]
    order = [*offset[:axis], *batch, *offset[axis:]]
    return op.transposed(result, np.argsort(order).tolist())


def _places(op: Operators, indices: relax.Expr, vector: int, lasts: Sequence[int] | None) -> relax.Expr:
    """Return the index vectors of axis ``vector`` as the last axis, in int64, clamped to ``lasts`` if not None."""
    rank = len(shape_of(indices))
    if vector < rank:
        indices = op.transposed(indices, [*(axis for axis in range(rank) if axis != vector), vector])
    else:
        indices = op.reshape(indices, [*shape_of(indices), 1])
    return op.cast(indices, _INDEX) if lasts is None else _within(op, indices, np.array(lasts, np.int64))


def _where(
    op: Operators,
    places: relax.Expr,
    whole: Sequence[int],
    index_map: Sequence[int],
    paired: Sequence[tuple[int, int]],
    shape: Sequence[int],
    window: Mapping[int, int],
) -> relax.Expr:
    """Return the positions, in the flat tensor of shape ``whole``, of the elements in windows at index vectors.

    ``index_map`` are the axes that the vectors index. ``paired`` are batch axes: one of the tensor with the
    corresponding one of the vectors. ``shape`` is that of the elements, and ``window`` maps its axes within a window to
    axes of the tensor.
    """
    steps, rows = strides(whole), shape_of(places)[:-1]
    where = flat_index(op, places, [steps[axis] for axis in index_map])
    for tensor_axis, axis in paired:
        where = op.add(where, constant(_numbers_along(axis, rows, steps[tensor_axis]), _INDEX))
    where = op.reshape(where, [1 if axis in window else size for axis, size in enumerate(shape)])
    within = [_numbers_along(axis, shape, steps[tensor_axis]) for axis, tensor_axis in window.items()]
    return op.add(where, constant(sum(within, np.zeros([1] * len(shape), np.int64)), _INDEX))


def _numbers_along(axis: int, shape: Sequence[int], step: int) -> np.ndarray:
    return np.arange(shape[axis]).reshape([-1 if position == axis else 1 for position in range(len(shape))]) * step


def _scatter(op: Operators, call: HloCall) -> relax.Expr:
    numbers = stablehlo.ScatterDimensionNumbers(call.source.attributes["scatter_dimension_numbers"])
    kind = combined_by(call.source)
    if kind not in _SCATTERED or len(call.operands) != 3:
        raise ModelImportError(f"it scatters {len(call.operands) // 2} tensors and combines them by {kind}")
    value, indices, updates = (call.whole(place) for place in range(3))
    whole, part = shape_of(value), shape_of(updates)
    window, inserted = list(numbers.update_window_dims), list(numbers.inserted_window_dims)
    of_operand, of_indices = list(numbers.input_batching_dims), list(numbers.scatter_indices_batching_dims)
    index_map, vector = list(numbers.scattered_dims_to_operand_dims), numbers.index_vector_dim
    window_axes = [axis for axis in range(len(whole)) if axis not in inserted and axis not in of_operand]
    lengths = dict(zip(window_axes, (part[axis] for axis in window), strict=True))
    places = _places(op, indices, vector, None)
    lasts = np.array([whole[axis] - lengths.get(axis, 1) for axis in index_map], np.int64)
    fits = op.logical_and(op.greater_equal(places, 0), op.less_equal(places, constant(lasts, _INDEX)))
    fits = op.min(fits, [-1])
    paired = [(axis, other - (other > vector)) for axis, other in zip(of_operand, of_indices, strict=True)]
    spread = [1 if axis in window else size for axis, size in enumerate(part)]
    size, count = math.prod(whole), math.prod(part)
    where = _where(op, places, whole, index_map, paired, part, dict(zip(window, window_axes, strict=True)))
    # An update that lies outside changes nothing: it goes to an extra element behind the tensor.
    where = op.where(op.reshape(fits, spread), where, constant(size, _INDEX))
    flat_places = op.reshape(op.repeated(where, part), [count])
    longer = op.concat([op.reshape(value, [size]), constant(np.zeros(1), call.dtype)], 0)
    changed = op.scatter_elements(longer, flat_places, op.reshape(updates, [count]), 0, reduction=_SCATTERED[kind])
    return op.reshape(op.strided_slice(changed, [0], [0], [size]), whole)


CONVERSIONS: dict[str, Conversion] = {
    "transpose": lambda op, call: op.transposed(call.operands[0], integers(call.source, "permutation")),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "slice": _slice,
    "reverse": lambda op, call: reversed_along(op, call.operands[0], integers(call.source, "dimensions")),
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "gather": _gather,
    "scatter": _scatter,
}
