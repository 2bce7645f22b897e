"""Rules of operators that read the indices of the sharded axis from a table: image scaling, padding by reflection.

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
from relay_passes.sharding.bounds import Range
from relay_passes.sharding.rule import Axis, Emit, Operation, Rule, same_range

Table = np.ndarray[Any, Any]


def take(operation: Operation) -> Rule:
    data, index = operation.operands
    expression = operation.expression
    along = int(expression.attrs.axis or 0) % len(data.shape)
    if data.axis is None and index.axis is not None:
        return Rule((None, index.axis), (index.axis.at(along + index.axis.index),))
    if data.axis is None or index.axis is not None:
        raise operation.refused("its indices and what it looks into are both split")
    axis = data.axis
    if axis.index != along:
        return same_range(operation, axis, axis.at(axis.index + (len(index.shape) - 1 if axis.index > along else 0)))
    if not is_tensor_constant(index.expression) or len(index.shape) != 1:
        raise operation.refused("it looks up that axis by indices that are no constant list")
    table = index.expression.value.numpy()
    if table.min() < 0 or table.max() >= data.shape[along]:
        raise operation.refused(f"it looks up indices outside its {data.shape[along]}")

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        local_indices = constant(table[slice(*result_range)] - _places(table, result_range)[0])
        return relax.op.take(parts[0], local_indices, along, expression.attrs.mode)

    result = Axis(along, 1, len(table))
    return Rule((axis, None), (result,), needs=lambda result_range: (_places(table, result_range), None), write=write)


def interpolation(operation: Operation) -> Rule:
    """Return the rule of a product with a constant matrix whose contracted axis is sharded.

    Only the indices whose weights are not 0 are read.
    """
    left, right = operation.operands
    is_left = left.axis is None
    weights, data = (left, right) if is_left else (right, left)
    if data.axis is None or not is_tensor_constant(weights.expression) or len(weights.shape) != 2:
        raise operation.refused("it sums over that axis")
    matrix = weights.expression.value.numpy()
    matrix = matrix if is_left else matrix.T
    index = len(operation.shape) - (2 if is_left else 1)

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        part = matrix[slice(*result_range), slice(*_span(matrix, result_range))]
        factor = constant(np.ascontiguousarray(part if is_left else part.T))
        operands = (factor, parts[1]) if is_left else (parts[0], factor)
        return relax.op.matmul(*operands, out_dtype=operation.expression.attrs.out_dtype)

    def needs(result_range: Range) -> tuple[Range | None, ...]:
        span = _span(matrix, result_range)
        return (None, span) if is_left else (span, None)

    result = Axis(index, 1, operation.shape[index])
    return Rule((left.axis, right.axis), (result,), needs=needs, write=write)


def resize(operation: Operation) -> Rule:
    axis, attributes = operation.only_first(), operation.expression.attrs
    layout, kind = str(attributes.layout), str(attributes.method)
    if layout[axis.index] in "NC":
        return same_range(operation, axis)
    if layout != "NCHW" or attributes.out_dtype:
        raise operation.refused(f"the layout {layout} and another type of result are not known here")
    lengths = operation.operands[0].shape[2:]
    coordinates = [
        _coordinates(operation, length, size) for length, size in zip(lengths, operation.shape[2:], strict=True)
    ]
    if kind == "nearest_neighbor":
        rounded = (_nearest(operation, places) for places in coordinates)
        tables = [np.clip(places, 0, length - 1) for places, length in zip(rounded, lengths, strict=True)]
        return _by_indices(operation, axis, tables)
    if kind == "linear":
        return _by_weights(operation, axis, [_linear(*along) for along in zip(coordinates, lengths, strict=True)])
    raise operation.refused(f"the method {kind!r} has no table here")


def _by_indices(operation: Operation, axis: Axis, tables: Sequence[Table]) -> Rule:
    index, table = axis.index, tables[axis.index - 2]

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        local_indices = table[slice(*result_range)] - _places(table, result_range)[0]
        lines = emit(relax.op.take(parts[0], constant(local_indices), index, "fast"))
        return relax.op.take(lines, constant(tables[3 - index]), 5 - index, "fast")

    result = Axis(index, 1, len(table))
    return Rule((axis,), (result,), needs=lambda result_range: (_places(table, result_range),), write=write)


def _by_weights(operation: Operation, axis: Axis, matrices: Sequence[Table]) -> Rule:
    index, matrix = axis.index - 2, matrices[axis.index - 2]
    dtype = str(operation.expression.ty.dtype.dtype)

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        factors = [*matrices]
        factors[index] = matrix[slice(*result_range), slice(*_span(matrix, result_range))]
        rows, columns = (constant(np.ascontiguousarray(factor, dtype)) for factor in (factors[0], factors[1].T))
        return relax.op.matmul(emit(relax.op.matmul(rows, parts[0])), columns)

    result = Axis(axis.index, 1, len(matrix))
    return Rule((axis,), (result,), needs=lambda result_range: (_span(matrix, result_range),), write=write)


def _places(table: Table, result_range: Range) -> Range:
    """Return the range that covers the table's entries at ``result_range``."""
    places = table[slice(*result_range)]
    return int(places.min()), int(places.max()) + 1


def _span(matrix: Table, rows: Range) -> Range:
    """Return the range of columns outside which these rows of a matrix are 0."""
    used = np.flatnonzero(np.any(matrix[slice(*rows)] != 0, axis=0))
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
        rounded = np.rint(coordinates)
    elif rounding == "round_prefer_floor":
        rounded = np.ceil(coordinates - np.float32(0.5))
    elif rounding == "round_prefer_ceil":
        rounded = np.floor(coordinates + np.float32(0.5))
    elif rounding == "floor":
        rounded = np.floor(coordinates + epsilon)
    elif rounding == "ceil":
        rounded = np.ceil(coordinates - epsilon)
    else:
        raise operation.refused(f"the rounding {rounding!r} has no table here")
    return rounded.astype(np.int64)


def _linear(coordinates: Table, length: int) -> Table:
    """Return the weights of a linear interpolation, one row per index of the result; indices are clipped."""
    lower = np.floor(coordinates)
    weight = coordinates - lower
    matrix = np.zeros((len(coordinates), length), np.float32)
    rows = np.arange(len(coordinates))
    np.add.at(matrix, (rows, np.clip(lower, 0, length - 1).astype(int)), 1 - weight)
    np.add.at(matrix, (rows, np.clip(lower + 1, 0, length - 1).astype(int)), weight)
    return matrix
