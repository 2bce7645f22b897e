"""Conversions of indexing, scatter and concatenation: TVM reads outside the tensor for negative indices."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.compositions import counted_from_front, parts
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of
from tvm_split.frontends.torch.conversions.call import TorchCall


def _places(op: Operators, index: relax.Expr, size: int) -> relax.Expr:
    if dtype_of(index) in ("bool", "uint8"):
        raise ModelImportError("a mask as an index gives a shape that depends on the values; use torch.where instead")
    return counted_from_front(op, index, size)


def _own_places(op: Operators, call: TorchCall) -> relax.Expr:
    """The non-negative indices in the argument ``index`` for axis ``dim``."""
    return _places(op, call["index"], shape_of(call["self"])[call["dim"]])


def _select(op: Operators, call: TorchCall) -> relax.Expr:
    data, axis = call["self"], call["dim"]
    return op.take(data, constant(call["index"] % shape_of(data)[axis], "int64"), axis)


def _rows(call: TorchCall) -> range:
    """The rows of axis ``dim`` that a slice takes, with bounds clamped like Python's."""
    return range(shape_of(call["self"])[call["dim"]])[call["start"] : call["end"] : call["step"]]


def _slice(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer does not clamp the bounds to the axis.
    data, axis, rows = call["self"], call["dim"], _rows(call)
    if rows == range(shape_of(data)[axis]):
        return data
    return op.strided_slice(data, [axis], [rows.start], [max(rows.start, rows.stop)], [rows.step])


def _slice_scatter(op: Operators, call: TorchCall) -> relax.Expr:
    """Replace rows of a tensor: concatenate it with the source, and take each row from one of the two."""
    # TVM's importer requires an end.
    data, axis, places = call["self"], call["dim"], list(_rows(call))
    if not places:
        return data
    rows = np.arange(shape_of(data)[axis])
    rows[places] = len(rows) + np.arange(len(places))
    joined = op.concat([data, op.cast(call["src"], dtype_of(data))], axis)
    return op.take(joined, constant(rows, "int64"), axis)


class _Indexing:
    """Advanced indexing of torch and numpy, with index tensors on some axes, converted to one flat index.

    The indexed axes are moved to position ``first`` and merged; ``flat`` is the equivalent index into the merged axis.
    """

    def __init__(self, op: Operators, data: relax.Expr, indices: Sequence[relax.Expr | None]) -> None:
        self.op = op
        shape = shape_of(data)
        self.axes = [axis for axis, index in enumerate(indices) if index is not None]
        contiguous = self.axes == list(range(self.axes[0], self.axes[0] + len(self.axes)))
        self.first = self.axes[0] if contiguous else 0
        other_axes = [axis for axis in range(len(shape)) if axis not in self.axes]
        self.order = other_axes[: self.first] + self.axes + other_axes[self.first :]
        self.before = [shape[axis] for axis in other_axes[: self.first]]
        self.after = [shape[axis] for axis in other_axes[self.first :]]
        self.sizes = [shape[axis] for axis in self.axes]
        self.shape = shape
        self.flat = self._flat_index([index for index in indices if index is not None])

    def _flat_index(self, indices: Sequence[relax.Expr]) -> relax.Expr:
        total: relax.Expr | None = None
        for position, (index, size) in enumerate(zip(indices, self.sizes, strict=True)):
            stride = math.prod(self.sizes[position + 1 :])
            part = _places(self.op, index, size)
            part = part if stride == 1 else self.op.multiply(part, stride)
            total = part if total is None else self.op.add(total, part)
        return total

    def merged(self, data: relax.Expr) -> relax.Expr:
        if self.order != sorted(self.order):
            data = self.op.permute_dims(data, self.order)
        if len(self.axes) > 1:
            data = self.op.reshape(data, [*self.before, math.prod(self.sizes), *self.after])
        return data

    def split(self, merged: relax.Expr) -> relax.Expr:
        """The inverse of ``merged``."""
        if len(self.axes) > 1:
            merged = self.op.reshape(merged, [self.shape[axis] for axis in self.order])
        if self.order != sorted(self.order):
            merged = self.op.permute_dims(merged, np.argsort(self.order).tolist())
        return merged


def _index(op: Operators, call: TorchCall) -> relax.Expr:
    # With full slices, TVM's importer treats index tensors as an outer product, or misplaces the axes.
    indexing = _Indexing(op, call["self"], call["indices"])
    return op.take(indexing.merged(call["self"]), indexing.flat, indexing.first)


def _index_put(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer requires an index for every axis.
    data = call["self"]
    indexing = _Indexing(op, data, call["indices"])
    index_shape = shape_of(indexing.flat)
    count, first = math.prod(index_shape), indexing.first
    source = op.cast(call["values"], dtype_of(data))
    source = op.broadcast_to(source, [*indexing.before, *index_shape, *indexing.after])
    source = op.reshape(source, [*indexing.before, count, *indexing.after])
    merged = indexing.merged(data)
    front = [first, *range(first), *range(first + 1, len(shape_of(merged)))]
    if first:
        merged, source = op.permute_dims(merged, front), op.permute_dims(source, front)
    index = op.reshape(indexing.flat, [count, 1])
    written = op.scatter_nd(merged, index, source, "add" if call["accumulate"] else "update")
    return indexing.split(op.permute_dims(written, np.argsort(front).tolist()) if first else written)


_REDUCTIONS = {"add": "add", "sum": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min"}


def _scatter(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer supports no reductions, and no source that is larger than the index.
    data, axis = call["self"], call["dim"]
    dtype, shape = dtype_of(data), shape_of(call["index"])
    reduction = call.get("reduce") or ("add" if call.operation.kind.startswith("scatter_add") else "")
    includes = call.get("include_self", True)
    if not includes or (reduction and reduction not in _REDUCTIONS):
        raise ModelImportError(f"reduction {reduction!r} with include_self={includes} is not supported")
    if "src" in call.attributes:
        source = op.cast(call["src"], dtype)
        for position, size in enumerate(shape):
            if shape_of(source)[position] != size:
                source = op.strided_slice(source, [position], [0], [size])
    else:
        source = op.full(shape, op.cast(call["value"], dtype), dtype)
    return op.scatter_elements(data, _own_places(op, call), source, axis, _REDUCTIONS.get(reduction, "update"))


def _concatenate(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer does not promote dtypes; torch also skips empty one-dimensional tensors.
    parts = [op.cast(part, call.dtype) for part in call["tensors"] if len(shape_of(part)) == len(call.shape)]
    return op.concat(parts, call["dim"]) if len(parts) > 1 else parts[0]


def _item_of_tuple(op: Operators, call: TorchCall) -> relax.Expr:
    # For a tuple of which TVM imports one tensor, its importer returns this tensor for every position.
    source, place = call.importer.values[call.source.args[0]], call.source.args[1]
    if not isinstance(source.ty, relax.TupleType) or place >= len(source.ty.fields):
        raise ModelImportError(f"result {place} of this operator is used, which cannot be imported")
    return op.item(source, place)


def _unfold(op: Operators, call: TorchCall) -> relax.Expr:
    data, size, shape = call["self"], call["size"], shape_of(call["self"])
    axis = call["dimension"] % len(shape)
    starts = np.arange(0, shape[axis] - size + 1, call["step"])
    windows = op.take(data, constant(starts[:, None] + np.arange(size), "int64"), axis)
    return op.permute_dims(windows, [place for place in range(len(shape) + 1) if place != axis + 1] + [axis + 1])


CONVERSIONS: dict[str, Conversion] = {
    operator.getitem.__name__: _item_of_tuple,
    "select.int": _select,
    "slice.Tensor": _slice,
    "slice_scatter.default": _slice_scatter,
    "index.Tensor": _index,
    "index_put.default": _index_put,
    "index_select.default": lambda op, call: op.take(call["self"], _own_places(op, call), call["dim"]),
    # TVM's importer casts the indices to 32 bits.
    "embedding.default": lambda op, call: op.take(call["weight"], call["indices"], 0),
    "gather.default": lambda op, call: op.gather_elements(call["self"], _own_places(op, call), call["dim"]),
    **{f"scatter.{kind}": _scatter for kind in ("src", "value", "reduce", "value_reduce")},
    "scatter_add.default": _scatter,
    "scatter_reduce.two": _scatter,
    "cat.default": _concatenate,
    "split_with_sizes.default": lambda op, call: parts(op, call["self"], call["split_sizes"], call["dim"]),
    "unfold.default": _unfold,
}
"""Conversions by the name of the ATen overload."""
