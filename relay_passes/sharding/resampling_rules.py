"""Rules of operators that read the indices of the sharded axis from a table: image scaling, padding by reflection.

The frontends write most of them as ``take`` with constant indices, or as a product with a constant matrix of
interpolation weights. A part then has a part of the table. A ``resize2d`` computes its coordinates from the length of
its operand, which would be wrong on a part. So it is rewritten with such a matrix, from the whole image's coordinates.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import constant, is_tensor_constant, new_function
from relay_passes.one_at_a_time import ONE_AT_A_TIME
from relay_passes.sharding.region import Range
from relay_passes.sharding.rule import Axis, Emit, Operation, Rule, reading, replaced_at, same_range

Table = np.ndarray[Any, Any]


def take(operation: Operation) -> Rule:
    """Return the rule of a ``take``; along the sharded axis its indices must be a constant list."""
    data, index = operation.operands
    expression = operation.expression
    along = int(expression.attrs.axis or 0) % len(data.shape)
    if data.axis is None and index.axis is not None:
        return Rule((None, index.axis), (index.axis.at(along + index.axis.index),))
    if data.axis is None or index.axis is not None:
        raise operation.refused("its indices and its data are both sharded")
    axis = data.axis
    if axis.index != along:
        return same_range(operation, axis, axis.at(axis.index + (len(index.shape) - 1 if axis.index > along else 0)))
    if not is_tensor_constant(index.expression) or len(index.shape) != 1:
        raise operation.refused("it looks up that axis by indices that are not a constant list")
    table = index.expression.value.numpy()
    if table.min() < 0 or table.max() >= data.shape[along]:
        raise operation.refused(f"it looks up indices outside its {data.shape[along]}")

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        local_indices = constant(table[slice(*result_range)] - _places(table, result_range)[0])
        return relax.op.take(parts[0], local_indices, along, expression.attrs.mode)

    return reading(operation, axis, lambda result_range: _places(table, result_range), write)


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
    """Return the rule of a ``resize2d``: along rows and columns it becomes constant matrices, or indices if nearest."""
    axis, attributes = operation.only_first(), operation.expression.attrs
    layout, method = str(attributes.layout), str(attributes.method)
    is_nearest = method == "nearest_neighbor"
    if layout[axis.index] in "NC":
        return same_range(operation, axis)
    dtype = np.dtype(str(operation.expression.ty.dtype.dtype))
    if layout != "NCHW" or attributes.out_dtype or (dtype.kind in "iu" and not is_nearest):
        raise operation.refused(f"the layout {layout} and results of {dtype} are not known here")
    mode = str(attributes.coordinate_transformation_mode)
    if mode == "tf_crop_and_resize":
        raise operation.refused(f"its coordinates are {mode!r}, of a region")
    settings: dict[str, Any] = {"method": method, "coordinate_transformation_mode": mode}
    settings |= {"rounding_method": str(attributes.rounding_method), "cubic_alpha": float(attributes.cubic_alpha)}
    lengths, sizes = operation.operands[0].shape[2:], operation.shape[2:]
    matrices = [_weights(*along, **settings) for along in zip(lengths, sizes, strict=True)]
    place = axis.index - 2
    matrix = matrices[place]

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        rows, columns = replaced_at(matrices, place, matrix[slice(*result_range), slice(*_span(matrix, result_range))])
        if is_nearest:  # a product would make NaN of infinities
            lines = emit(relax.op.take(parts[0], constant(rows.argmax(axis=1)), 2, "fast"))
            return relax.op.take(lines, constant(columns.argmax(axis=1)), 3, "fast")
        left, right = (constant(np.ascontiguousarray(factor, dtype)) for factor in (rows, columns.T))
        return relax.op.matmul(emit(relax.op.matmul(left, parts[0])), right)

    return reading(operation, axis, lambda result_range: _span(matrix, result_range), write)


@cache
@ONE_AT_A_TIME
def _weights(length: int, size: int, **settings: Any) -> Table:
    """Return the matrix [size, length] by which a resize multiplies an axis: TVM's kernel applied to an identity."""
    image = relax.Var("image", relax.TensorType((length, 1, length, 2), "float32"))
    resized = relax.op.image.resize2d(image, (size, 2), **settings)
    module = tvm.IRModule({"main": new_function("main", [image], lambda builder: [builder.emit(resized)])})
    identity = np.repeat(np.eye(length, dtype=np.float32).reshape(length, 1, length, 1), 2, axis=3)
    quickly = tvm.target.Target({"kind": "llvm", "opt-level": 0})  # the kernel runs once, for less time than LLVM takes
    machine = relax.VirtualMachine(relax.build(module, quickly), tvm.cpu())
    (images,) = machine["main"](tvm.runtime.tensor(identity))
    return np.ascontiguousarray(images.numpy()[:, 0, :, 0].T)


def _places(table: Table, result_range: Range) -> Range:
    """Return the smallest range that contains the entries of ``table`` at the positions ``result_range``."""
    places = table[slice(*result_range)]
    return int(places.min()), int(places.max()) + 1


def _span(matrix: Table, rows: Range) -> Range:
    """Return the smallest range of columns outside which these rows of a matrix are 0; (0, 1) if all are 0."""
    used = np.flatnonzero(np.any(matrix[slice(*rows)] != 0, axis=0))
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
