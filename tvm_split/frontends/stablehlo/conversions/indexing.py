"""Parts that are chosen by computed indices: slices, gathers and scatters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir.dialects import stablehlo
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.axis_orders import Arranger, Value, in_place
from tvm_split.frontends.operators import constant
from tvm_split.frontends.stablehlo.attributes import integers
from tvm_split.frontends.stablehlo.conversions.reductions import combined_by
from tvm_split.frontends.stablehlo.conversions.shapes import sliced
from tvm_split.frontends.stablehlo.values import Call

_INDEX = "int64"
_SCATTERED = {"replace": "update", "add": "add", "multiply": "mul", "maximum": "max", "minimum": "min"}


def _dynamic_slice(op: Arranger, call: Call) -> Value:
    value, *starts = call.operands
    sizes = integers(call.operation, "slice_sizes")
    cut = [axis for axis in range(value.rank) if sizes[axis] != value.shape[axis]]
    known = call.known[1:]
    firsts, lasts = [0] * value.rank, list(value.shape)
    for axis in cut:
        start = known[axis]
        if start is not None:
            firsts[axis] = min(max(int(start), 0), value.shape[axis] - sizes[axis])
            lasts[axis] = firsts[axis] + sizes[axis]
    value = sliced(op, value, firsts, lasts)
    for axis in cut:
        if known[axis] is None and not value.repeats(axis):
            first = _within(op, starts[axis].expr, value.shape[axis] - sizes[axis])
            places = op.add(op.reshape(first, [1]), constant(np.arange(sizes[axis]), _INDEX))
            expr = op.take(value.expr, places, value.order.index(axis))
            shape = [sizes[each] if each == axis else size for each, size in enumerate(value.shape)]
            value = Value(expr, value.order, tuple(shape))
    return Value(value.expr, value.order, tuple(sizes))


def _within(op: Arranger, index: relax.Expr, last: int | np.ndarray) -> relax.Expr:
    """``index`` moved to 0 … ``last``, in int64."""
    index = op.cast(index, _INDEX)
    return op.minimum(op.maximum(index, constant(0, _INDEX)), constant(last, _INDEX))


def _dynamic_update(op: Arranger, call: Call) -> Value:
    value, update, *starts = call.operands
    order, known = value.order, call.known[2:]
    cut = [axis for axis in range(value.rank) if update.shape[axis] != value.shape[axis]]
    if all(known[axis] is not None for axis in cut):
        return _replaced(op, value, update, cut, known)
    # Each element of the result is looked up in the update, and taken from there where it lies in it.
    inside, expr = None, op.full(update, order)
    for axis in cut:
        place, size = order.index(axis), update.shape[axis]
        first = _within(op, starts[axis].expr, value.shape[axis] - size)
        offset = op.subtract(constant(np.arange(value.shape[axis]), _INDEX), op.reshape(first, [1]))
        is_in = op.logical_and(op.greater_equal(offset, 0), op.less(offset, size))
        is_in = op.reshape(is_in, [value.shape[axis] if each == place else 1 for each in range(value.rank)])
        inside = is_in if inside is None else op.logical_and(inside, is_in)
        expr = op.take(expr, _within(op, offset, size - 1), place)
    return Value(op.where(inside, expr, op.full(value, order)), order, value.shape)


def _replaced(
    op: Arranger, value: Value, update: Value, cut: Sequence[int], known: Sequence[np.ndarray | None]
) -> Value:
    """The update between the parts of the value before and after it, axis by axis from the last."""
    if not cut:
        return update
    *outer, axis = cut
    firsts, lasts = [0] * value.rank, list(value.shape)
    for each in outer:
        firsts[each] = _start(known[each], value.shape[each], update.shape[each])
        lasts[each] = firsts[each] + update.shape[each]
    row = sliced(op, value, firsts, lasts)
    start = _start(known[axis], value.shape[axis], update.shape[axis])
    order, parts = value.order, []
    for first, last in ((0, start), (start + update.shape[axis], value.shape[axis])):
        if first < last:
            begin, end = [0] * row.rank, list(row.shape)
            begin[axis], end[axis] = first, last
            parts.append(op.full(sliced(op, row, begin, end), order))
        if not first:
            parts.append(op.full(update, order))
    joined = Value(op.concat(parts, order.index(axis)), order, row.shape)
    return _replaced(op, value, joined, outer, known)


def _start(known: np.ndarray | None, size: int, length: int) -> int:
    """Where an update of this length begins, moved so that it is inside; what is not cut is not known to begin at 0."""
    return 0 if known is None else min(max(int(known), 0), size - length)


def _gather(op: Arranger, call: Call) -> Value:
    value, indices = call.operands
    numbers = stablehlo.GatherDimensionNumbers(call.operation.attributes["dimension_numbers"])
    sizes = integers(call.operation, "slice_sizes")
    offset, collapsed = list(numbers.offset_dims), list(numbers.collapsed_slice_dims)
    of_operand, of_indices = list(numbers.operand_batching_dims), list(numbers.start_indices_batching_dims)
    index_map, vector = list(numbers.start_index_map), numbers.index_vector_dim
    whole = [axis for axis in range(value.rank) if axis not in index_map]
    if (
        len(index_map) == 1
        and collapsed == index_map
        and not of_operand
        and all(sizes[axis] == value.shape[axis] for axis in whole)
    ):
        return _taken(op, call, value, indices, index_map[0], vector, offset)
    places = _places(op, indices, vector, index_map, [value.shape[each] - sizes[each] for each in index_map])
    batch = [axis for axis in range(len(call.shape)) if axis not in offset]
    kept = [axis for axis in range(value.rank) if axis not in collapsed and axis not in of_operand]
    steps = _steps(value.shape)
    where = _flat(op, places, [steps[axis] for axis in index_map])
    rows = [size for axis, size in enumerate(indices.shape) if axis != vector]
    around = [axis for axis in range(indices.rank) if axis != vector]
    for mine, theirs in zip(of_operand, of_indices, strict=True):
        where = op.add(where, _along(around.index(theirs), rows, steps[mine]))
    where = op.reshape(where, [call.shape[axis] if axis in batch else 1 for axis in range(len(call.shape))])
    within = np.zeros([1] * len(call.shape), np.int64)
    for axis, operand_axis in zip(offset, kept, strict=True):
        within = within + _numbers_along(axis, call.shape, steps[operand_axis])
    flat = op.reshape(op.full(value), [math.prod(value.shape)])
    return in_place(op.take(flat, op.add(where, constant(within, _INDEX)), 0))


def _taken(
    op: Arranger, call: Call, value: Value, indices: Value, axis: int, vector: int, offset: Sequence[int]
) -> Value:
    """Whole rows along one axis, such as those of an embedding."""
    places = _within(op, op.full(indices), value.shape[axis] - 1)
    shape = [size for each, size in enumerate(indices.shape) if each != vector]
    # The axes of the result: the operand's as they lie, those of the indices in place of the one that is taken from.
    result = op.take(value.expr, op.shaped(places, shape), value.order.index(axis))
    batch = [each for each in range(len(call.shape)) if each not in offset]
    kept = [each for each in range(value.rank) if each != axis]
    order: list[int] = []
    for each in value.order:
        order.extend(batch if each == axis else [offset[kept.index(each)]])
    return Value(result, tuple(order), call.shape)


def _places(
    op: Arranger, indices: Value, vector: int, index_map: Sequence[int], lasts: Sequence[int] | None
) -> relax.Expr:
    """Index vectors as the last axis, in int64, moved inside where ``lasts`` are given."""
    around = [axis for axis in range(indices.rank) if axis != vector]
    if vector < indices.rank:
        expr = op.full(indices, [*around, vector])
    else:
        expr = op.reshape(op.full(indices), [*indices.shape, 1])
    return op.cast(expr, _INDEX) if lasts is None else _within(op, expr, np.array(lasts, np.int64))


def _flat(op: Arranger, places: relax.Expr, steps: Sequence[int]) -> relax.Expr:
    """Where index vectors point to in a flat tensor."""
    return op.sum(op.multiply(places, constant(np.array(steps), _INDEX)), [-1])


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _numbers_along(axis: int, shape: Sequence[int], step: int) -> np.ndarray:
    return np.arange(shape[axis]).reshape([-1 if each == axis else 1 for each in range(len(shape))]) * step


def _along(axis: int, shape: Sequence[int], step: int) -> relax.Expr:
    return constant(_numbers_along(axis, shape, step), _INDEX)


def _scatter(op: Arranger, call: Call) -> Value:
    value, indices, updates = call.operands
    numbers = stablehlo.ScatterDimensionNumbers(call.operation.attributes["scatter_dimension_numbers"])
    kind = combined_by(call.operation)
    if kind not in _SCATTERED or len(call.operands) != 3:
        raise ModelImportError(f"it scatters {len(call.operands) // 2} tensors and combines them by {kind}")
    window, inserted = list(numbers.update_window_dims), list(numbers.inserted_window_dims)
    of_operand, of_indices = list(numbers.input_batching_dims), list(numbers.scatter_indices_batching_dims)
    index_map, vector = list(numbers.scattered_dims_to_operand_dims), numbers.index_vector_dim
    kept = [axis for axis in range(value.rank) if axis not in inserted and axis not in of_operand]
    lengths = dict(zip(kept, (updates.shape[axis] for axis in window), strict=True))
    steps = _steps(value.shape)
    places = _places(op, indices, vector, index_map, None)
    lasts = np.array([value.shape[axis] - lengths.get(axis, 1) for axis in index_map], np.int64)
    fits = op.logical_and(op.greater_equal(places, 0), op.less_equal(places, constant(lasts, _INDEX)))
    fits = op.equal(op.min(op.cast(fits, "int8"), [-1]), 1)
    where = _flat(op, places, [steps[axis] for axis in index_map])
    rows = [size for axis, size in enumerate(indices.shape) if axis != vector]
    around = [axis for axis in range(indices.rank) if axis != vector]
    for mine, theirs in zip(of_operand, of_indices, strict=True):
        where = op.add(where, _along(around.index(theirs), rows, steps[mine]))
    scattered = [axis for axis in range(updates.rank) if axis not in window]
    spread = [updates.shape[axis] if axis in scattered else 1 for axis in range(updates.rank)]
    within = np.zeros([1] * updates.rank, np.int64)
    for axis, operand_axis in zip(window, kept, strict=True):
        within = within + _numbers_along(axis, updates.shape, steps[operand_axis])
    size = math.prod(value.shape)
    where = op.add(op.reshape(where, spread), constant(within, _INDEX))
    # An update that lies outside changes nothing: it goes to a place of its own, behind the tensor.
    where = op.where(op.reshape(fits, spread), where, constant(size, _INDEX))
    count = math.prod(updates.shape)
    flat_places = op.reshape(op.repeated(where, updates.shape), [count])
    longer = op.concat([op.reshape(op.full(value), [size]), constant(np.zeros(1), value.dtype)], 0)
    changed = op.scatter_elements(
        longer, flat_places, op.reshape(op.full(updates), [count]), 0, reduction=_SCATTERED[kind]
    )
    return in_place(op.reshape(op.strided_slice(changed, [0], [0], [size]), list(value.shape)))


CONVERTERS: dict[str, Callable[[Arranger, Call], Value]] = {
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.dynamic_update_slice": _dynamic_update,
    "stablehlo.gather": _gather,
    "stablehlo.scatter": _scatter,
}
"""By the operation's name."""
