"""Conversions of indexing, scatter, concatenation, reductions, scans and sorting.

TVM's importer reads outside the tensor for negative indices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.compositions import counted_from_front, parts
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of, wide
from tvm_split.frontends.torch.conversions import TorchCall


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


def _reduced(op: Operators, call: TorchCall, operator: str, data: relax.Expr) -> relax.Expr:
    """Reduce ``data`` over the call's axes."""
    axes = call.axes(len(shape_of(data)))
    return getattr(op, operator)(data, axes, keepdims=call.get("keepdim", False)) if axes else data


def _reduction(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer accumulates in the input's dtype, also for half precision and integers.
    return op.cast(_reduced(op, call, operator, op.cast(call["self"], wide(call.dtype))), call.dtype)


def _extreme(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    data = op.cast(call["self"], "int8") if call.dtype == "bool" else call["self"]
    return op.cast(_reduced(op, call, operator, data), call.dtype)


def _extreme_and_place(op: Operators, call: TorchCall, operator: str) -> tuple[relax.Expr, relax.Expr]:
    # TVM's importer lacks min.dim, and computes max.dim by sorting.
    data, dim, keep = call["self"], call["dim"], call["keepdim"]
    if not shape_of(data):
        return data, constant(0, "int64")
    place = getattr(op, f"arg{operator}")(_comparable(op, data), dim, keep)
    return getattr(op, operator)(data, [dim], keepdims=keep), place


def _any(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer returns numbers instead of booleans for numbers, and lacks the reduction over all axes.
    data = call["self"]
    data = data if dtype_of(data) == "bool" else op.not_equal(data, 0)
    return op.not_equal(_reduced(op, call, "max", op.cast(data, "int8")), 0)


def _moments(op: Operators, call: TorchCall) -> tuple[relax.Expr, relax.Expr]:
    """Return the variance and the mean over the call's axes."""
    data = op.cast(call["self"], wide(dtype_of(call["self"])))
    axes, keep = call.axes(len(shape_of(data))), call["keepdim"]
    count = math.prod(shape_of(data)[axis] for axis in axes)
    correction = 1 if call["correction"] is None else call["correction"]
    mean = op.mean(data, axes, keepdims=True)
    centred = op.subtract(data, mean)
    variance = op.divide(op.sum(op.multiply(centred, centred), axes, keepdims=keep), max(count - correction, 0))
    return op.cast(variance, call.dtype), op.cast(mean if keep else op.squeeze(mean, axes), call.dtype)


def _comparable(op: Operators, data: relax.Expr) -> relax.Expr:
    """Cast bfloat16 to float32, which is exact: TVM's LLVM backend has no argmax or argmin of bfloat16."""
    return op.cast(data, "float32") if dtype_of(data) == "bfloat16" else data


def _place(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    data, find = _comparable(op, call["self"]), getattr(op, operator)
    if call["dim"] is None:
        return op.reshape(find(op.reshape(data, [-1]), 0, False), call.shape)
    return find(data, call["dim"], call["keepdim"])


def _scan(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer scans integers in their own dtype, torch in int64.
    dtype = wide(call.dtype)
    data = op.cast(call["self"], dtype)
    return op.cast(getattr(op, operator)(data, call["dim"], dtype) if call.shape else data, call.dtype)


CONVERSIONS: dict[str, Conversion] = {
    operator.getitem.__name__: _item_of_tuple,
    "select.int": _select,
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
    "sum.dim_IntList": partial(_reduction, operator="sum"),
    **{f"mean.{kind}": partial(_reduction, operator="mean") for kind in ("default", "dim")},
    **{f"prod.{kind}": partial(_reduction, operator="prod") for kind in ("default", "dim_int")},
    **{
        f"{name}.default": partial(_extreme, operator=name.removeprefix("a")) for name in ("amax", "amin", "max", "min")
    },
    **{f"{name}.dim": partial(_extreme_and_place, operator=name) for name in ("max", "min")},
    **{f"any.{kind}": _any for kind in ("default", "dim", "dims")},
    "var.correction": lambda op, call: _moments(op, call)[0],
    "var_mean.correction": _moments,
    **{f"{name}.default": partial(_place, operator=name) for name in ("argmax", "argmin")},
    **{f"{name}.default": partial(_scan, operator=name) for name in ("cumsum", "cumprod")},
}
"""Conversions by the name of the ATen overload."""
