"""Conversions of reductions, scans, sorting and searches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from tvm import relax

from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of, wide
from tvm_split.frontends.torch.conversions.call import TorchCall


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


def _median(op: Operators, call: TorchCall) -> Any:
    # For an even number of elements, torch returns the lower of the two in the middle; TVM does not.
    has_axis = "dim" in call.attributes
    data, axis = (call["self"], call["dim"]) if has_axis else (op.reshape(call["self"], [-1]), 0)
    order = op.argsort(data, axis, dtype="int64")
    middle = constant((shape_of(data)[axis] - 1) // 2, "int64")
    results = [op.take(part, middle, axis) for part in (op.gather_elements(data, order, axis), order)]
    if not has_axis:
        return results[0]
    return tuple(op.expand_dims(part, axis) if call["keepdim"] else part for part in results)


def _sort(op: Operators, call: TorchCall) -> tuple[relax.Expr, relax.Expr]:
    order = op.argsort(call["self"], call["dim"], call["descending"], dtype="int64")
    return op.gather_elements(call["self"], order, call["dim"]), order


CONVERSIONS: dict[str, Conversion] = {
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
    **{f"median.{kind}": _median for kind in ("default", "dim")},
    "sort.default": _sort,
}
"""Conversions by the name of the ATen overload."""
