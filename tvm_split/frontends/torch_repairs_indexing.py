"""Repairs of indexing, scattering and joining: TVM reads outside the tensor at a negative index, without an error."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from torch import fx
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.torch_repair_tools import (
    Importer,
    Repair,
    arguments,
    cast,
    dtype_of,
    emit,
    result_dtype,
    result_shape,
    shape_of,
)


def _whole(value: int) -> relax.Expr:
    return relax.const(np.int64(value), "int64")


def _counted_from_front(importer: Importer, index: relax.Expr, size: int) -> relax.Expr:
    """Indices in 0 … size − 1; torch counts negative ones from the end."""
    if dtype_of(index) in ("bool", "uint8"):
        raise ModelImportError("a mask as an index gives a shape that depends on the values; use torch.where instead")
    index = cast(importer, index, "int64")
    if isinstance(index, tvm.ir.GenericConst):
        values = index.value.numpy()
        return relax.const(np.where(values < 0, values + size, values), "int64")
    is_negative = emit(importer, relax.op.less(index, _whole(0)))
    return emit(importer, relax.op.where(is_negative, emit(importer, relax.op.add(index, _whole(size))), index))


def _select(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    data, axis, index = values["self"], int(values["dim"]), int(values["index"])
    size = shape_of(data)[axis]
    return emit(importer, relax.op.take(data, _whole(index % size), axis))


def _bounds(size: int, start: Any, end: Any) -> tuple[int, int]:
    """Python's rule for the ends of a slice."""
    first, last, _ = slice(None if start is None else int(start), None if end is None else int(end)).indices(size)
    return first, max(first, last)


def _slice(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer passes the ends on without limiting them to the axis.
    values = arguments(node, importer)
    data, axis, step = values["self"], int(values["dim"]), int(values["step"])
    size = shape_of(data)[axis]
    first, last = _bounds(size, values["start"], values["end"])
    if (first, last, step) == (0, size, 1):
        return data
    return emit(importer, relax.op.strided_slice(data, [axis], [first], [last], [step]))


def _slice_scatter(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer takes no missing end.
    values = arguments(node, importer)
    data, source, axis, step = values["self"], values["src"], int(values["dim"]), int(values["step"])
    size = shape_of(data)[axis]
    first, last = _bounds(size, values["start"], values["end"])
    return _written(importer, data, source, axis % len(shape_of(data)), list(range(first, last, step)))


def _select_scatter(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    data, axis = values["self"], int(values["dim"]) % len(shape_of(values["self"]))
    source = emit(importer, relax.op.expand_dims(values["src"], axis))
    return _written(importer, data, source, axis, [int(values["index"]) % shape_of(data)[axis]])


def _written(importer: Importer, data: relax.Expr, source: relax.Expr, axis: int, places: list[int]) -> relax.Expr:
    """``data`` with ``source`` at ``places`` of ``axis``: every row is read from one of the two, joined."""
    size = shape_of(data)[axis]
    if not places:
        return data
    source = cast(importer, source, dtype_of(data))
    joined = emit(importer, relax.op.concat([data, source], axis))
    rows = np.arange(size)
    rows[places] = size + np.arange(len(places))
    return emit(importer, relax.op.take(joined, relax.const(rows.astype(np.int64), "int64"), axis))


class _Indexing:
    """Index tensors on some axes of a tensor (torch's and numpy's advanced indexing), as one flat index.

    The indexed axes are brought together at ``first`` and merged; one index into the merged axis says the same.
    """

    def __init__(self, importer: Importer, data: relax.Expr, indices: Sequence[relax.Expr | None]) -> None:
        self.importer = importer
        shape = shape_of(data)
        self.axes = [axis for axis, index in enumerate(indices) if index is not None]
        contiguous = self.axes == list(range(self.axes[0], self.axes[0] + len(self.axes)))
        self.first = self.axes[0] if contiguous else 0
        others = [axis for axis in range(len(shape)) if axis not in self.axes]
        self.order = others[: self.first] + self.axes + others[self.first :]
        self.before = [shape[axis] for axis in others[: self.first]]
        self.after = [shape[axis] for axis in others[self.first :]]
        self.sizes = [shape[axis] for axis in self.axes]
        self.shape = shape
        self.flat = self._flat_index([index for index in indices if index is not None])

    def _flat_index(self, indices: Sequence[relax.Expr]) -> relax.Expr:
        total: relax.Expr | None = None
        for position, (index, size) in enumerate(zip(indices, self.sizes, strict=True)):
            stride = math.prod(self.sizes[position + 1 :])
            part = _counted_from_front(self.importer, index, size)
            if stride != 1:
                part = emit(self.importer, relax.op.multiply(part, _whole(stride)))
            total = part if total is None else emit(self.importer, relax.op.add(total, part))
        return total

    def merged(self, data: relax.Expr) -> relax.Expr:
        if self.order != sorted(self.order):
            data = emit(self.importer, relax.op.permute_dims(data, self.order))
        if len(self.axes) > 1:
            data = emit(self.importer, relax.op.reshape(data, [*self.before, math.prod(self.sizes), *self.after]))
        return data

    def split(self, merged: relax.Expr) -> relax.Expr:
        """The inverse of ``merged``."""
        if len(self.axes) > 1:
            merged = emit(self.importer, relax.op.reshape(merged, [self.shape[axis] for axis in self.order]))
        if self.order != sorted(self.order):
            back = [self.order.index(axis) for axis in range(len(self.order))]
            merged = emit(self.importer, relax.op.permute_dims(merged, back))
        return merged


def _index(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer treats index tensors beside full slices as an outer product, or puts the axes elsewhere.
    values = arguments(node, importer)
    indexing = _Indexing(importer, values["self"], values["indices"])
    return emit(importer, relax.op.take(indexing.merged(values["self"]), indexing.flat, indexing.first))


def _index_put(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer needs an index for every axis.
    values = arguments(node, importer)
    data, dtype = values["self"], dtype_of(values["self"])
    indexing = _Indexing(importer, data, values["indices"])
    index_shape = shape_of(indexing.flat)
    chosen_shape = [*indexing.before, *index_shape, *indexing.after]
    source = emit(importer, relax.op.broadcast_to(cast(importer, values["values"], dtype), chosen_shape))
    count, first = math.prod(index_shape), indexing.first
    merged = indexing.merged(data)
    source = emit(importer, relax.op.reshape(source, [*indexing.before, count, *indexing.after]))
    if first:
        front = [first, *range(first), *range(first + 1, len(shape_of(merged)))]
        merged = emit(importer, relax.op.permute_dims(merged, front))
        source = emit(importer, relax.op.permute_dims(source, front))
    index = emit(importer, relax.op.reshape(indexing.flat, [count, 1]))
    reduction = "add" if values["accumulate"] else "update"
    written = emit(importer, relax.op.scatter_nd(merged, index, source, reduction))
    if first:
        back = [*range(1, first + 1), 0, *range(first + 1, len(front))]
        written = emit(importer, relax.op.permute_dims(written, back))
    return indexing.split(written)


def _index_select(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    axis = int(values["dim"])
    index = _counted_from_front(importer, values["index"], shape_of(values["self"])[axis])
    return emit(importer, relax.op.take(values["self"], index, axis))


def _take(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    index = _counted_from_front(importer, values["index"], math.prod(shape_of(values["self"])))
    return emit(importer, relax.op.take(emit(importer, relax.op.reshape(values["self"], [-1])), index, 0))


def _embedding(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer casts the indices to 32 bits.
    values = arguments(node, importer)
    return emit(importer, relax.op.take(values["weight"], values["indices"], 0))


def _gather(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    axis = int(values["dim"])
    index = _counted_from_front(importer, values["index"], shape_of(values["self"])[axis])
    return emit(importer, relax.op.gather_elements(values["self"], index, axis))


_REDUCTIONS = {"add": "add", "sum": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min"}


def _scatter(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer has no reductions, and takes no source that is larger than the index.
    values = arguments(node, importer)
    data, axis, index = values["self"], int(values["dim"]), values["index"]
    dtype, shape = dtype_of(data), shape_of(index)
    name = node.target.__name__
    reduction = values.get("reduce") or ("add" if name.startswith("scatter_add") else "")
    includes = values.get("include_self") is not False
    if not includes or (reduction and reduction not in _REDUCTIONS):
        raise ModelImportError(f"reduction {reduction!r} with include_self={includes} is not supported")
    if "src" in values:
        source = cast(importer, values["src"], dtype)
        for position, size in enumerate(shape):
            if shape_of(source)[position] != size:
                source = emit(importer, relax.op.strided_slice(source, [position], [0], [size]))
    else:
        source = emit(importer, relax.op.full(shape, cast(importer, values["value"], dtype), dtype))
    index = _counted_from_front(importer, index, shape_of(data)[axis])
    kind = _REDUCTIONS[reduction] if reduction else "update"
    return emit(importer, relax.op.scatter_elements(data, index, source, axis, kind))


def _concatenate(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer does not promote dtypes; torch also skips empty one-dimensional tensors.
    values = arguments(node, importer)
    dtype = result_dtype(node)
    rank = len(result_shape(node))
    parts = [cast(importer, part, dtype) for part in values["tensors"] if len(shape_of(part)) == rank]
    return emit(importer, relax.op.concat(parts, int(values["dim"]))) if len(parts) > 1 else parts[0]


def _split(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's split refuses parts without elements.
    values = arguments(node, importer)
    ends = np.cumsum([0, *values["split_sizes"]]).tolist()
    axis = int(values["dim"])
    if 0 not in values["split_sizes"]:
        return emit(importer, relax.op.split(values["self"], ends[1:-1], axis))
    parts = [
        emit(importer, relax.op.strided_slice(values["self"], [axis], [first], [last]))
        for first, last in itertools.pairwise(ends)
    ]
    return relax.Tuple(parts)


def _item_of_tuple(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer returns a lone tensor for every place of a tuple that it imports only in part.
    source, place = importer.env[node.args[0]], node.args[1]
    if isinstance(source, relax.Tuple):
        source = list(source.fields)
    if isinstance(source, list | tuple):
        if place >= len(source):
            raise ModelImportError(f"result {place} of this operator is used, only {len(source)} can be imported")
        return source[place]
    if isinstance(source.ty, relax.TupleType):
        return emit(importer, relax.TupleGetItem(source, place))
    raise ModelImportError(f"result {place} of this operator is used, only one can be imported")


def _unfold(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    data, size, step = values["self"], int(values["size"]), int(values["step"])
    rank = len(shape_of(data))
    axis = int(values["dimension"]) % rank
    starts = np.arange(0, shape_of(data)[axis] - size + 1, step)
    windows = relax.const((starts[:, None] + np.arange(size)).astype(np.int64), "int64")
    taken = emit(importer, relax.op.take(data, windows, axis))
    order = [place for place in range(rank + 1) if place != axis + 1] + [axis + 1]
    return emit(importer, relax.op.permute_dims(taken, order))


REPAIRS: dict[str, Repair] = {
    operator.getitem.__name__: _item_of_tuple,
    "select.int": _select,
    "slice.Tensor": _slice,
    "slice_scatter.default": _slice_scatter,
    "select_scatter.default": _select_scatter,
    "index.Tensor": _index,
    "index_put.default": _index_put,
    "index_select.default": _index_select,
    "take.default": _take,
    "embedding.default": _embedding,
    "gather.default": _gather,
    **{f"scatter.{kind}": _scatter for kind in ("src", "value", "reduce", "value_reduce")},
    "scatter_add.default": _scatter,
    "scatter_reduce.two": _scatter,
    "cat.default": _concatenate,
    "split_with_sizes.default": _split,
    "unfold.default": _unfold,
}
"""By the name of the ATen overload."""
