"""Conversions of indexing, scatter, concatenation, windows, reductions, scans and sorting.

All indices are made non-negative, because TVM's importer reads outside the tensor for negative ones.
"""

import math
import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, shape_of, wide
from tvm_split.frontends.torch.conversions import TorchCall, also_of_scalars


def _places(op: Operators, index: relax.Expr, size: int) -> relax.Expr:
    """Return non-negative indices for an axis of ``size`` elements. Raises ModelImportError for a mask."""
    if dtype_of(index) in ("bool", "uint8"):
        raise ModelImportError("a mask as an index gives a shape that depends on the values; use torch.where instead")
    return compositions.counted_from_front(op, index, size)


def _own_places(op: Operators, call: TorchCall) -> relax.Expr:
    """Return the non-negative indices in the argument ``index`` for axis ``dim``."""
    return _places(op, call["index"], shape_of(call["self"])[call["dim"]])


def _select(op: Operators, call: TorchCall) -> relax.Expr:
    data, axis = call["self"], call["dim"]
    return op.take(data, constant(call["index"] % shape_of(data)[axis], "int64"), axis)


def _rows(call: TorchCall) -> range:
    """The rows of axis ``dim`` that a slice takes, with bounds clamped like Python's."""
    return range(shape_of(call["self"])[call["dim"]])[call["start"] : call["end"] : call["step"]]


def _slice(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer gives an axis of negative size if the end is before the start.
    data, axis, rows = call["self"], call["dim"], _rows(call)
    if rows == range(shape_of(data)[axis]):
        return data
    return op.strided_slice(data, [axis], [rows.start], [max(rows.start, rows.stop)], [rows.step])


def _slice_scatter(op: Operators, call: TorchCall) -> relax.Expr:
    """Replace rows of a tensor: concatenate it with the source, and take each row from one of the two."""
    # TVM's importer requires an end, and does not clamp the bounds to the axis.
    data, axis, places = call["self"], call["dim"], list(_rows(call))
    if not places:
        return data
    rows = np.arange(shape_of(data)[axis])
    rows[places] = len(rows) + np.arange(len(places))
    joined = op.concat([data, op.cast(call["src"], dtype_of(data))], axis)
    return op.take(joined, constant(rows, "int64"), axis)


def _indexed_axes(call: TorchCall) -> tuple[list[int], list[int], int]:
    """Return the axes with index tensors, the other axes, and the position of the indexed ones in the result."""
    axes = [axis for axis, index in enumerate(call["indices"]) if index is not None]
    is_contiguous = axes == list(range(axes[0], axes[0] + len(axes)))
    rest = [axis for axis in range(len(shape_of(call["self"]))) if axis not in axes]
    return axes, rest, axes[0] if is_contiguous else 0


def _flat_places(op: Operators, call: TorchCall, axes: Sequence[int]) -> relax.Expr:
    """Return the positions in the merged ``axes`` for the index tensors, which broadcast."""
    sizes = [shape_of(call["self"])[axis] for axis in axes]
    places = [_places(op, call["indices"][axis], size) for axis, size in zip(axes, sizes, strict=True)]
    steps = compositions.strides(sizes)
    return reduce(
        op.add, [op.multiply(place, step) if step > 1 else place for place, step in zip(places, steps, strict=True)]
    )


def _merged(op: Operators, data: relax.Expr, axes: Sequence[int], rest: Sequence[int]) -> relax.Expr:
    """Return ``data`` with ``axes`` merged to one, before the ``rest``."""
    shape = shape_of(data)
    merged = [math.prod(shape[axis] for axis in axes), *(shape[axis] for axis in rest)]
    return op.shaped(op.transposed(data, [*axes, *rest]), merged)


def _index(op: Operators, call: TorchCall) -> relax.Expr:
    # With full slices, TVM's importer treats index tensors as an outer product, or misplaces the axes.
    data, (axes, rest, first) = call["self"], _indexed_axes(call)
    places = _flat_places(op, call, axes)
    if len(axes) == 1:
        return op.take(data, places, first)
    rows = op.take(_merged(op, data, axes, rest), places, 0)
    end = len(shape_of(places))
    return op.transposed(rows, [*range(end, end + first), *range(end), *range(end + first, len(shape_of(rows)))])


def _index_put(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer requires an index for every axis.
    data, (axes, rest, first) = call["self"], _indexed_axes(call)
    shape, places = shape_of(data), _flat_places(op, call, axes)
    index_shape, sizes = shape_of(places), [shape[axis] for axis in rest]
    count, rank = math.prod(index_shape), len(index_shape)
    source = op.repeated(op.cast(call["values"], dtype_of(data)), [*sizes[:first], *index_shape, *sizes[first:]])
    rest_places = [place for place in range(rank + len(rest)) if not first <= place < first + rank]
    source = op.shaped(op.transposed(source, [*range(first, first + rank), *rest_places]), [count, *sizes])
    mode = _REDUCTIONS["any" if call.dtype == "bool" else "add"] if call["accumulate"] else "update"
    written = op.scatter_nd(_merged(op, data, axes, rest), op.reshape(places, [count, 1]), source, mode)
    order = [*axes, *rest]
    return op.transposed(op.shaped(written, [shape[axis] for axis in order]), np.argsort(order).tolist())


_REDUCTIONS = {"add": "add", "sum": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min", "any": "max"}


def _scatter(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer supports no reductions, and no source that is larger than the index.
    data, axis = call["self"], call["dim"]
    dtype, shape = dtype_of(data), shape_of(call["index"])
    reduction = call.get("reduce") or ("add" if call.operation.kind.startswith("scatter_add") else "")
    includes = call.get("include_self", True)
    if not includes or (reduction and reduction not in _REDUCTIONS):
        raise ModelImportError(f"reduction {reduction!r} with include_self={includes} is not supported")
    if dtype == "bool" and reduction in ("add", "sum"):
        reduction = "any"
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


def _reduced(op: Operators, call: TorchCall, operator: str, data: relax.Expr | None = None) -> relax.Expr:
    """Reduce ``data``, by default the call's own, over the call's axes."""
    data = call["self"] if data is None else data
    axes = call.axes(len(shape_of(data)))
    return getattr(op, operator)(data, axes, keepdims=call.get("keepdim", False)) if axes else data


def _squeezed(op: Operators, call: TorchCall) -> relax.Expr:
    shape = shape_of(call["self"])
    axes = [axis for axis in call.axes(len(shape)) if shape[axis] == 1]
    return op.squeeze(call["self"], axes) if axes else call["self"]


def _reduction(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer accumulates integers in the input's dtype.
    return _reduced(op, call, operator, op.cast(call["self"], call.dtype))


def _extreme_and_place(op: Operators, call: TorchCall, operator: str) -> tuple[relax.Expr, relax.Expr]:
    # TVM's importer lacks min.dim, and computes max.dim by sorting.
    data, dim, keep = call["self"], call["dim"], call["keepdim"]
    return getattr(op, operator)(data, [dim], keepdims=keep), getattr(op, f"arg{operator}")(data, dim, keep)


def _truth(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer returns numbers instead of booleans for numbers, lacks the reduction over all axes, and says False
    # of all of no elements.
    data = call["self"]
    data = data if dtype_of(data) == "bool" else op.not_equal(data, 0)
    return op.cast(_reduced(op, call, operator, data), call.dtype)


def _moments(op: Operators, call: TorchCall, is_root: bool = False) -> tuple[relax.Expr, relax.Expr]:
    """Return the variance, or its square root, and the mean over the call's axes."""
    # Before the root, squares of large numbers would overflow; torch computes in float64, too.
    data = op.cast(call["self"], "float64" if is_root else wide(dtype_of(call["self"])))
    axes, keep = call.axes(len(shape_of(data))), call["keepdim"]
    count = math.prod(shape_of(data)[axis] for axis in axes)
    correction = 1 if call["correction"] is None else call["correction"]
    mean = op.mean(data, axes, keepdims=True)
    centred = op.subtract(data, mean)
    spread = op.divide(op.sum(op.multiply(centred, centred), axes, keepdims=keep), max(count - correction, 0))
    spread = op.sqrt(spread) if is_root else spread
    return op.cast(spread, call.dtype), op.cast(mean if keep else op.squeeze(mean, axes), call.dtype)


def _place(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    data, find = call["self"], getattr(op, operator)
    if call["dim"] is None:
        return op.reshape(find(op.reshape(data, [-1]), 0, False), call.shape)
    return find(data, call["dim"], call["keepdim"])


def _scan(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer scans integers in their own dtype, torch in int64.
    dtype = wide(call.dtype)
    data = op.cast(call["self"], dtype)
    return op.cast(getattr(op, operator)(data, call["dim"], dtype), call.dtype)


def _sorted(op: Operators, call: TorchCall) -> tuple[relax.Expr, relax.Expr]:
    # TVM's importer sorts NaN and bfloat16 wrongly, and its sort fails for small integers.
    data, is_descending = call["self"], call.get("largest", call.get("descending"))
    return compositions.sorted_elements(op, data, call["dim"], is_descending, call.get("k"))


def _median(op: Operators, call: TorchCall) -> Any:
    """Return the lower of the two middle elements and its position; the first NaN if there is one."""
    # TVM's importer sorts NaN and bfloat16 wrongly, and its sort fails for small integers.
    data, axis = call["self"], call.get("dim")
    flat, along = (op.reshape(data, [-1]), 0) if axis is None else (data, axis % len(shape_of(data)))
    middle = (shape_of(flat)[along] - 1) // 2
    place = op.strided_slice(compositions.sorted_places(op, flat, along, False), [along], [middle], [middle + 1])
    if is_float(dtype_of(data)):
        is_nan = op.cast(op.isnan(op.cast(flat, wide(dtype_of(data)))), "int8")
        has_nan = op.equal(op.max(is_nan, [along], keepdims=True), 1)
        place = op.where(has_nan, op.argmax(is_nan, along, True), place)
    value = op.gather_elements(flat, place, along)
    if axis is None:
        return op.reshape(value, [])
    return (value, place) if call["keepdim"] else (op.squeeze(value, [along]), op.squeeze(place, [along]))


_OVER_AXES: dict[str, Conversion] = {
    "index_select.default": lambda op, call: op.take(call["self"], _own_places(op, call), call["dim"]),
    **{f"squeeze.{kind}": _squeezed for kind in ("default", "dim", "dims")},
    "sum.dim_IntList": partial(_reduction, operator="sum"),
    **{f"mean.{kind}": partial(_reduction, operator="mean") for kind in ("default", "dim")},
    **{f"prod.{kind}": partial(_reduction, operator="prod") for kind in ("default", "dim_int")},
    **{
        f"{name}.default": partial(_reduced, operator=name.removeprefix("a")) for name in ("amax", "amin", "max", "min")
    },
    **{f"{name}.dim": partial(_extreme_and_place, operator=name) for name in ("max", "min")},
    **{
        f"{name}.{kind}": partial(_truth, operator=operator)
        for name, operator in (("any", "max"), ("all", "min"))
        for kind in ("default", "dim", "dims")
    },
    "std.correction": lambda op, call: _moments(op, call, is_root=True)[0],
    "var.correction": lambda op, call: _moments(op, call)[0],
    "var_mean.correction": _moments,
    **{f"{name}.default": partial(_place, operator=name) for name in ("argmax", "argmin")},
    **dict.fromkeys(("sort.default", "sort.stable", "topk.default"), _sorted),
    **{f"argsort.{kind}": lambda op, call: _sorted(op, call)[1] for kind in ("default", "stable")},
    **{f"median.{kind}": _median for kind in ("default", "dim")},
    **{f"{name}.default": partial(_scan, operator=name) for name in ("cumsum", "cumprod")},
}

CONVERSIONS: dict[str, Conversion] = {
    operator.getitem.__name__: _item_of_tuple,
    "select.int": _select,
    "slice.Tensor": _slice,
    "slice_scatter.default": _slice_scatter,
    "index.Tensor": _index,
    "index_put.default": _index_put,
    # TVM's importer casts the indices to 32 bits.
    "embedding.default": lambda op, call: op.take(call["weight"], call["indices"], 0),
    "gather.default": lambda op, call: op.gather_elements(call["self"], _own_places(op, call), call["dim"]),
    **{f"scatter.{kind}": _scatter for kind in ("src", "value", "reduce", "value_reduce")},
    "scatter_add.default": _scatter,
    "scatter_reduce.two": _scatter,
    "cat.default": _concatenate,
    "split_with_sizes.default": lambda op, call: compositions.parts(op, call["self"], call["split_sizes"], call["dim"]),
    "unfold.default": _unfold,
    **{name: also_of_scalars(conversion) for name, conversion in _OVER_AXES.items()},
}
"""Conversions by the name of the ATen overload."""
