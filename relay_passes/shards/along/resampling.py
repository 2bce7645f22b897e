"""Operators that read the indices of the split axis from a table: image scaling, and padding by reflection.

The frontends write most of them as ``take`` with constant indices, or as a product with a constant matrix of
interpolation weights. A part then has a part of the table. A ``resize2d`` computes its coordinates from the length of
its operand, which would be wrong on a part. So it is rewritten with such a table, from the whole image's coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relay_passes.ir import constant, is_tensor_constant
from relay_passes.shards.along.rule import Along, Emit, Operation, Range, same_range

Table = np.ndarray[Any, Any]


def take(operation: Operation) -> Along:
    data, index = operation.operands
    expression = operation.expression
    axis = expression.attrs.axis
    axis = 0 if axis is None else int(axis) % len(data.shape)
    if data.axis is None and index.axis is not None:
        return same_range(operation, axis + index.axis, (None, index.axis))
    if data.axis is None or index.axis is not None:
        raise operation.refused("its indices and what it looks into are both split")
    if data.axis != axis:
        result_axis = data.axis if data.axis < axis else data.axis + len(index.shape) - 1
        return same_range(operation, result_axis, (data.axis, None))
    if not is_tensor_constant(index.expression) or len(index.shape) != 1:
        raise operation.refused("it looks up that axis by indices that are no constant list")
    table = index.expression.value.numpy()
    if table.min() < 0 or table.max() >= data.shape[axis]:
        raise operation.refused(f"it looks up indices outside its {data.shape[axis]}")

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        own = constant(table[slice(*wanted)] - _places(table, wanted)[0])
        return relax.op.take(parts[0], own, axis, expression.attrs.mode)

    return Along(axis, (axis, None), lambda wanted: (_places(table, wanted), None), write)


def interpolation(operation: Operation) -> Along:
    """Return the rule of a product with a constant matrix whose contracted axis is split.

    Only the indices whose weights are not 0 are read.
    """
    left, right = operation.operands
    rank = len(operation.shape)
    weights, data = (left, right) if left.axis is None else (right, left)
    if data.axis is None or not is_tensor_constant(weights.expression) or len(weights.shape) != 2:
        raise operation.refused("it sums over that axis")
    matrix = weights.expression.value.numpy()
    is_left = weights is left
    matrix = matrix if is_left else matrix.T
    axis = rank - 2 if is_left else rank - 1

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        own = matrix[slice(*wanted), slice(*_span(matrix, wanted))]
        factor = constant(np.ascontiguousarray(own if is_left else own.T))
        part = parts[1 if is_left else 0]
        operands = (factor, part) if is_left else (part, factor)
        return relax.op.matmul(*operands, out_dtype=operation.expression.attrs.out_dtype)

    operand_axes = (None, data.axis) if is_left else (data.axis, None)

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        span = _span(matrix, wanted)
        return (None, span) if is_left else (span, None)

    return Along(axis, operand_axes, needs, write)


def resize(operation: Operation) -> Along:
    axis, attributes = operation.only_first(), operation.expression.attrs
    layout = str(attributes.layout)
    if layout[axis] in "NC":
        return same_range(operation, axis, (axis,))
    if layout != "NCHW" or attributes.out_dtype:
        raise operation.refused(f"the layout {layout} and another type of result are not known here")
    shape = operation.operands[0].shape
    dtype = str(operation.expression.ty.dtype.dtype)
    kind = str(attributes.method)
    coordinates = [_coordinates(operation, shape[each], operation.shape[each]) for each in (2, 3)]
    if kind == "nearest_neighbor":
        nearest = [
            np.clip(_nearest(operation, each), 0, length - 1)
            for each, length in zip(coordinates, shape[2:], strict=True)
        ]
        return _by_indices(operation, axis, nearest)
    if kind == "linear":
        lengths = zip(coordinates, shape[2:], strict=True)
        return _by_weights(operation, axis, [_linear(each, length).astype(dtype) for each, length in lengths])
    raise operation.refused(f"the method {kind!r} has no table here")


def _by_indices(operation: Operation, axis: int, tables: Sequence[Table]) -> Along:
    table = tables[axis - 2]

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        own = table[slice(*wanted)] - _places(table, wanted)[0]
        lines = emit(relax.op.take(parts[0], constant(own), axis, "fast"))
        return relax.op.take(lines, constant(tables[3 - axis]), 5 - axis, "fast")

    return Along(axis, (axis,), lambda wanted: (_places(table, wanted),), write)


def _by_weights(operation: Operation, axis: int, matrices: Sequence[Table]) -> Along:
    matrix = matrices[axis - 2]

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        own = [*matrices]
        own[axis - 2] = matrix[slice(*wanted), slice(*_span(matrix, wanted))]
        rows, columns = (constant(np.ascontiguousarray(each)) for each in (own[0], own[1].T))
        return relax.op.matmul(emit(relax.op.matmul(rows, parts[0])), columns)

    return Along(axis, (axis,), lambda wanted: (_span(matrix, wanted),), write)


def _places(table: Table, wanted: Range) -> Range:
    """Return the range that covers the table's entries at ``wanted``."""
    places = table[slice(*wanted)]
    return int(places.min()), int(places.max()) + 1


def _span(matrix: Table, wanted: Range) -> Range:
    """Return the range of columns outside which the rows ``wanted`` of a matrix are 0."""
    used = np.flatnonzero(np.any(matrix[slice(*wanted)] != 0, axis=0))
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)


def _coordinates(operation: Operation, length: int, target: int) -> Table:
    """Return the operand's coordinate for each index of the result, in float32 as TVM's kernel computes it."""
    mode = str(operation.expression.attrs.coordinate_transformation_mode)
    places, half = np.arange(target, dtype=np.float32), np.float32(0.5)
    scale = np.float32(length) / np.float32(target)
    if mode == "half_pixel":
        return (places + half) * scale - half
    if mode == "pytorch_half_pixel":
        return (places + half) * scale - half if target > 1 else np.zeros(1, np.float32)
    if mode == "asymmetric":
        return scale * places
    if mode == "align_corners" and target > 1:
        return np.float32(length - 1) / np.float32(target - 1) * places
    if mode == "tf_half_pixel_for_nn":
        return (places + half) * scale
    raise operation.refused(f"the coordinates {mode!r} of {target} indices have no table here")


def _nearest(operation: Operation, coordinates: Table) -> Table:
    attributes = operation.expression.attrs
    rounding, epsilon = str(attributes.rounding_method), np.float32(1e-5)
    if not rounding:
        rounding = "round" if str(attributes.coordinate_transformation_mode) == "align_corners" else "floor"
    if rounding == "round":
        found = np.rint(coordinates)
    elif rounding == "round_prefer_floor":
        found = np.ceil(coordinates - np.float32(0.5))
    elif rounding == "round_prefer_ceil":
        found = np.floor(coordinates + np.float32(0.5))
    elif rounding == "floor":
        found = np.floor(coordinates + epsilon)
    elif rounding == "ceil":
        found = np.ceil(coordinates - epsilon)
    else:
        raise operation.refused(f"the rounding {rounding!r} has no table here")
    return found.astype(np.int64)


def _linear(coordinates: Table, length: int) -> Table:
    """Return the weights of a linear interpolation, one row per index of the result; indices are clipped."""
    lower = np.floor(coordinates)
    weight = coordinates - lower
    matrix = np.zeros((len(coordinates), length), np.float32)
    rows = np.arange(len(coordinates))
    np.add.at(matrix, (rows, np.clip(lower, 0, length - 1).astype(int)), 1 - weight)
    np.add.at(matrix, (rows, np.clip(lower + 1, 0, length - 1).astype(int)), weight)
    return matrix
