"""Repairs of reductions, scans and searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import fx
from tvm import relax

from tvm_split.frontends.torch_repair_tools import (
    Importer,
    Repair,
    arguments,
    cast,
    constant,
    dtype_of,
    emit,
    float_dtype,
    reduced_axes,
    result_dtype,
    result_shape,
    shape_of,
)


def _wide(dtype: str) -> str:
    """What torch accumulates half precision in."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _reduced(node: fx.Node, importer: Importer, operator: Callable[..., relax.Expr], dtype: str) -> relax.Expr:
    """Apply ``operator`` in ``dtype`` over the node's axes, cast to the node's own dtype."""
    values = arguments(node, importer)
    data = cast(importer, values["self"], dtype)
    axes = reduced_axes(values.get("dim"), len(shape_of(data)))
    if axes:
        data = emit(importer, operator(data, axes, keepdims=bool(values.get("keepdim", False))))
    return cast(importer, data, result_dtype(node))


def _reduction(operator: Callable[..., relax.Expr]) -> Repair:
    # TVM's importer accumulates half precision in itself, and integers in their own dtype.
    return lambda node, importer: _reduced(node, importer, operator, _wide(result_dtype(node)))


def _extreme(operator: Callable[..., relax.Expr]) -> Repair:
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        dtype = dtype_of(arguments(node, importer)["self"])
        return _reduced(node, importer, operator, "int8" if dtype == "bool" else dtype)

    return convert


def _extreme_and_place(operator: Callable[..., relax.Expr], place: Callable[..., relax.Expr]) -> Repair:
    # TVM's importer has no min.dim, and finds max.dim by sorting.
    def convert(node: fx.Node, importer: Importer) -> tuple[relax.Expr, relax.Expr]:
        values = arguments(node, importer)
        data, dim, keep = values["self"], int(values["dim"]), bool(values["keepdim"])
        if not shape_of(data):
            return data, relax.const(np.int64(0), "int64")
        return emit(importer, operator(data, [dim], keepdims=keep)), emit(
            importer, place(_comparable(importer, data), dim, keep)
        )

    return convert


def _boolean(operator: Callable[..., relax.Expr]) -> Repair:
    # TVM's importer answers with numbers for a tensor of numbers, and has no reduction over all axes.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        values = arguments(node, importer)
        data = values["self"]
        if dtype_of(data) != "bool":
            data = emit(importer, relax.op.not_equal(data, constant(0, dtype_of(data))))
        axes = reduced_axes(values.get("dim"), len(shape_of(data)))
        data = cast(importer, data, "int8")
        if axes:
            data = emit(importer, operator(data, axes, keepdims=bool(values.get("keepdim", False))))
        return emit(importer, relax.op.not_equal(data, constant(0, "int8")))

    return convert


def _variance(node: fx.Node, importer: Importer) -> relax.Expr:
    return _spread(node, importer)[0]


def _deviation(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer ignores the correction.
    values = arguments(node, importer)
    variance, _, _ = _moments(importer, values)
    return cast(importer, emit(importer, relax.op.sqrt(variance)), result_dtype(node))


def _spread(node: fx.Node, importer: Importer) -> tuple[relax.Expr, relax.Expr]:
    variance, mean, _ = _moments(importer, arguments(node, importer))
    return cast(importer, variance, result_dtype(node)), cast(importer, mean, result_dtype(node))


def _moments(importer: Importer, values: dict[str, Any]) -> tuple[relax.Expr, relax.Expr, int]:
    data = cast(importer, values["self"], _wide(dtype_of(values["self"])))
    dtype, shape = dtype_of(data), shape_of(data)
    axes = reduced_axes(values["dim"], len(shape))
    keep = bool(values["keepdim"])
    count = int(np.prod([shape[axis] for axis in axes], dtype=np.int64))
    correction = 1 if values["correction"] is None else float(values["correction"])
    mean = emit(importer, relax.op.mean(data, axes, keepdims=True))
    centred = emit(importer, relax.op.subtract(data, mean))
    total = emit(importer, relax.op.sum(emit(importer, relax.op.multiply(centred, centred)), axes, keepdims=keep))
    divisor = max(count - correction, 0)
    variance = emit(importer, relax.op.divide(total, constant(divisor, dtype)))
    return variance, mean if keep else emit(importer, relax.op.squeeze(mean, axes)), count


def _comparable(importer: Importer, data: relax.Expr) -> relax.Expr:
    """The data as TVM can find the place of an extreme in it: of bfloat16 its LLVM backend cannot, float32 is exact."""
    return cast(importer, data, "float32") if dtype_of(data) == "bfloat16" else data


def _place(operator: Callable[..., relax.Expr]) -> Repair:
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        values = arguments(node, importer)
        data, dim = _comparable(importer, values["self"]), values["dim"]
        if dim is None:
            flat = emit(importer, relax.op.reshape(data, [-1]))
            found = emit(importer, operator(flat, 0, False))
            return emit(importer, relax.op.reshape(found, result_shape(node)))
        return emit(importer, operator(data, int(dim), bool(values["keepdim"])))

    return convert


def _scan(operator: Callable[..., relax.Expr]) -> Repair:
    # TVM's importer scans integers in their own dtype, torch in int64.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        values = arguments(node, importer)
        dtype = result_dtype(node)
        data = cast(importer, values["self"], _wide(dtype))
        if not shape_of(data):
            return cast(importer, data, dtype)
        return cast(importer, emit(importer, operator(data, int(values["dim"]), _wide(dtype))), dtype)

    return convert


def _norm(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer divides by an order of 0, and accumulates half precision in itself.
    values = arguments(node, importer)
    order = float(values["ord"])
    data = cast(importer, values["self"], _wide(float_dtype(dtype_of(values["self"]))))
    dtype = dtype_of(data)
    axes, keep = reduced_axes(values["dim"], len(shape_of(data))), bool(values["keepdim"])
    size = emit(importer, relax.op.abs(data))
    if order == 0:
        counted = cast(importer, emit(importer, relax.op.not_equal(data, constant(0, dtype))), dtype)
        result = emit(importer, relax.op.sum(counted, axes, keepdims=keep))
    elif np.isinf(order):
        result = emit(importer, (relax.op.max if order > 0 else relax.op.min)(size, axes, keepdims=keep))
    elif order == 1:
        result = emit(importer, relax.op.sum(size, axes, keepdims=keep))
    elif order == 2:
        squares = emit(importer, relax.op.multiply(data, data))
        result = emit(importer, relax.op.sqrt(emit(importer, relax.op.sum(squares, axes, keepdims=keep))))
    else:
        powers = emit(importer, relax.op.power(size, constant(order, dtype)))
        total = emit(importer, relax.op.sum(powers, axes, keepdims=keep))
        result = emit(importer, relax.op.power(total, constant(1 / order, dtype)))
    return cast(importer, result, result_dtype(node))


def _median(node: fx.Node, importer: Importer) -> Any:
    # TVM's median of an even number of elements is not the lower of the two in the middle.
    values = arguments(node, importer)
    data = values["self"]
    has_axis = "dim" in values
    axis = int(values["dim"]) if has_axis else 0
    if not has_axis:
        data = emit(importer, relax.op.reshape(data, [-1]))
    order = emit(importer, relax.op.argsort(data, axis, dtype="int64"))
    middle = relax.const(np.int64((shape_of(data)[axis] - 1) // 2), "int64")
    ordered = emit(importer, relax.op.gather_elements(data, order, axis))
    results = [emit(importer, relax.op.take(part, middle, axis)) for part in (ordered, order)]
    if not has_axis:
        return results[0]
    if values["keepdim"]:
        results = [emit(importer, relax.op.expand_dims(part, axis)) for part in results]
    return tuple(results)


def _sort(node: fx.Node, importer: Importer) -> tuple[relax.Expr, relax.Expr]:
    values = arguments(node, importer)
    data, axis = values["self"], int(values["dim"])
    order = emit(importer, relax.op.argsort(data, axis, bool(values["descending"]), dtype="int64"))
    return emit(importer, relax.op.gather_elements(data, order, axis)), order


def _logsumexp(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    data = values["self"]
    axes, keep = reduced_axes(values["dim"], len(shape_of(data))), bool(values["keepdim"])
    largest = emit(importer, relax.op.max(data, axes, keepdims=True))
    total = emit(importer, relax.op.sum(relax.op.exp(relax.op.subtract(data, largest)), axes, keepdims=True))
    result = emit(importer, relax.op.add(emit(importer, relax.op.log(total)), largest))
    return result if keep else emit(importer, relax.op.squeeze(result, axes))


REPAIRS: dict[str, Repair] = {
    **{f"sum.{kind}": _reduction(relax.op.sum) for kind in ("default", "dim_IntList")},
    **{f"mean.{kind}": _reduction(relax.op.mean) for kind in ("default", "dim")},
    **{f"prod.{kind}": _reduction(relax.op.prod) for kind in ("default", "dim_int")},
    "amax.default": _extreme(relax.op.max),
    "amin.default": _extreme(relax.op.min),
    "max.default": _extreme(relax.op.max),
    "min.default": _extreme(relax.op.min),
    "max.dim": _extreme_and_place(relax.op.max, relax.op.argmax),
    "min.dim": _extreme_and_place(relax.op.min, relax.op.argmin),
    **{f"any.{kind}": _boolean(relax.op.max) for kind in ("default", "dim", "dims")},
    **{f"all.{kind}": _boolean(relax.op.min) for kind in ("default", "dim", "dims")},
    "var.correction": _variance,
    "std.correction": _deviation,
    "var_mean.correction": _spread,
    "argmax.default": _place(relax.op.argmax),
    "argmin.default": _place(relax.op.argmin),
    "cumsum.default": _scan(relax.op.cumsum),
    "cumprod.default": _scan(relax.op.cumprod),
    "linalg_vector_norm.default": _norm,
    "median.default": _median,
    "median.dim": _median,
    "sort.default": _sort,
    "logsumexp.default": _logsumexp,
}
"""By the name of the ATen overload."""
