"""Conversions of pooling and of image resampling."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import torch
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, shape_of, wide
from tvm_split.frontends.torch.conversions.call import TorchCall, each_axis

RESAMPLINGS = (
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""torch's resampling operators that have an overload ``vec``."""


def _resampled(op: Operators, call: TorchCall) -> relax.Expr:
    """Resize one axis after the other by a matrix of torch's own weights.

    All resamplings are linear and separable by axis, so the unit vectors, resized by torch, are the weights.
    """
    # TVM's importer computes nearest with half-pixel centres, ignores a given scale factor, antialiasing and the
    # coefficient of torch's bicubic (−0.75), and has no mode of one or three axes that works.
    data, scales = call.operands[0], call.get("scale_factors")
    for axis in range(2, len(call.shape)):
        scale = None if scales is None else scales[axis - 2]
        size = shape_of(data)[axis]
        weights = _weights(call.operation.kind, size, call.shape[axis], scale, call.get("align_corners", False))
        data = compositions.weighted(op, data, weights, axis)
    return data


def _weights(name: str, size: int, target: int, scale: float | None, align_corners: bool) -> np.ndarray[Any, Any]:
    """The matrix [target, size] of one axis, by resizing unit vectors with torch."""
    # Each kind has an operator for two axes; the linear one is bilinear.
    kernel = re.sub("[123]d", "2d", re.sub("(bi|tri)?linear", "bilinear", name.removesuffix(".vec")))
    wanted_size, scales = (None, [1.0, scale]) if scale else ([1, target], None)
    corners = [] if "nearest" in kernel else [align_corners]
    vectors = torch.eye(size, dtype=torch.float64)[:, None, None]
    resized = getattr(torch.ops.aten, kernel).vec(vectors, wanted_size, *corners, scales)
    return np.array(resized.reshape(size, target).T.numpy())


def _pooled(op: Operators, call: TorchCall, data: relax.Expr, operator: str, **options: Any) -> relax.Expr:
    """Pool ``data``, with or without a batch axis, in the call's windows; these do not overlap if it has no stride."""
    axes = int(operator[-2])
    kernel, padding = each_axis(call["kernel_size"], axes), each_axis(call["padding"], axes)
    stride = each_axis(call["stride"], axes) if call["stride"] else kernel
    is_single = len(call.shape) == axes + 1
    data = op.expand_dims(data, 0) if is_single else data
    result = getattr(op.nn, operator)(data, kernel, stride, padding * 2, ceil_mode=call["ceil_mode"], **options)
    return op.squeeze(result, [0]) if is_single else result


def _average_pool(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer ignores divisor_override.
    divisor = call.get("divisor_override")
    if divisor and call["ceil_mode"]:
        raise ModelImportError("divisor_override together with ceil_mode is not supported")
    data = op.cast(call["self"], wide(call.dtype))
    result = _pooled(op, call, data, operator, count_include_pad=call["count_include_pad"] or bool(divisor))
    if divisor:
        result = op.multiply(result, float(np.prod(each_axis(call["kernel_size"], int(operator[-2])))) / divisor)
    return op.cast(result, call.dtype)


def _max_pool(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer refuses windows without a stride.
    return _pooled(op, call, call["self"], operator, dilation=each_axis(call["dilation"], int(operator[-2])))


def _max_pool_alone(op: Operators, call: TorchCall, operator: str) -> tuple[relax.Expr, ...]:
    # TVM's importer returns zeros for the positions of the maxima; this conversion omits the positions.
    return (_max_pool(op, call, operator),)


def _adaptive_pool(op: Operators, call: TorchCall) -> Any:
    """Pool one axis after the other: output element i of m reduces the rows ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉ of n (exclusive)."""
    # TVM has no adaptive maximum, and its mean requires all sizes.
    is_mean = "avg" in call.operation.kind
    data, reduce = call["self"], op.mean if is_mean else op.max
    rank, axes = len(call.shape), int(call.operation.kind.partition("pool")[2][0])
    if is_mean:
        data = op.cast(data, wide(call.dtype))
    whole = [axis for axis in range(rank - axes, rank) if call.shape[axis] == 1]
    if whole:
        data = reduce(data, whole, keepdims=True)
    for axis in range(rank - axes, rank):
        shape, count = shape_of(data), call.shape[axis]
        size = shape[axis]
        if count in (1, size):
            continue
        if size % count == 0:
            windows = op.reshape(data, [*shape[:axis], count, size // count, *shape[axis + 1 :]])
            data = reduce(windows, [axis + 1])
            continue
        parts = []
        for place in range(count):
            first, last = place * size // count, -(-(place + 1) * size // count)
            parts.append(reduce(op.strided_slice(data, [axis], [first], [last]), [axis], keepdims=True))
        data = op.concat(parts, axis)
    data = op.cast(data, call.dtype)
    return data if is_mean else (data,)


def _grid_sample(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's operator takes coordinates as axis 1 of the grid; its importer leaves them as the last axis.
    return op.image.grid_sample(
        call["input"],
        op.permute_dims(call["grid"], [0, 3, 1, 2]),
        method=("bilinear", "nearest", "bicubic")[call["interpolation_mode"]],
        layout="NCHW",
        padding_mode=("zeros", "border", "reflection")[call["padding_mode"]],
        align_corners=call["align_corners"],
    )


CONVERSIONS: dict[str, Conversion] = {
    **{f"{name}.vec": _resampled for name in RESAMPLINGS},
    **{f"avg_pool{axes}d.default": partial(_average_pool, operator=f"avg_pool{axes}d") for axes in (1, 2, 3)},
    **{f"max_pool{axes}d.default": partial(_max_pool, operator=f"max_pool{axes}d") for axes in (1, 2, 3)},
    **{
        f"max_pool{axes}d_with_indices.default": partial(_max_pool_alone, operator=f"max_pool{axes}d")
        for axes in (2, 3)
    },
    **{f"adaptive_max_pool{axes}d.default": _adaptive_pool for axes in (2, 3)},
    **{f"adaptive_avg_pool{axes}d.default": _adaptive_pool for axes in (1, 2, 3)},
    "grid_sampler_2d.default": _grid_sample,
}
"""Conversions by the name of the ATen overload."""
