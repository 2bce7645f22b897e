"""Repairs of pools and of resampling images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.torch_repair_tools import (
    Importer,
    Repair,
    arguments,
    cast,
    constant,
    dtype_of,
    emit,
    result_dtype,
    result_shape,
    shape_of,
)


def _resampled(node: fx.Node, importer: Importer) -> relax.Expr:
    """Resize one axis after the other, with torch's own weights.

    Every resampling is linear and works on each axis alone: what torch makes of the unit vectors are its weights.
    """
    # TVM's importer computes nearest with half-pixel centres, ignores a given scale factor, antialiasing and the
    # coefficient of torch's bicubic (−0.75), and has no mode of one or three axes that works.
    operator: Any = node.target
    name = operator.__name__
    values = arguments(node, importer)
    data = values[next(iter(values))]
    wanted, shape = result_shape(node), shape_of(data)
    axes = len(shape) - 2
    scales = values.get("scale_factors")
    for position in range(axes):
        axis = position + 2
        scale = scales[position] if scales is not None else None
        weights = _weights(name, shape[axis], wanted[axis], scale, bool(values.get("align_corners", False)))
        data = _along(importer, data, weights, axis)
    return data


def _weights(name: str, size: int, wanted: int, scale: float | None, align_corners: bool) -> np.ndarray[Any, Any]:
    """The matrix [wanted, size] of one axis, by resizing unit vectors with torch."""
    vectors = torch.eye(size, dtype=torch.float64)[:, None]
    aten = torch.ops.aten
    scales = None if scale is None else [scale]
    wanted_size = [wanted] if scale is None else None
    if name.startswith("upsample_nearest"):
        exact = aten._upsample_nearest_exact1d.vec if "exact" in name else aten.upsample_nearest1d.vec
        resized = exact(vectors, wanted_size, scales)
    elif name.startswith("_upsample_nearest_exact"):
        resized = aten._upsample_nearest_exact1d.vec(vectors, wanted_size, scales)
    else:
        image = vectors[:, :, None]
        size_2d = None if scale is not None else [1, wanted]
        scales_2d = None if scale is None else [1.0, scale]
        kernel = {
            "upsample_bilinear2d.vec": aten.upsample_bilinear2d.vec,
            "upsample_linear1d.vec": aten.upsample_bilinear2d.vec,
            "upsample_trilinear3d.vec": aten.upsample_bilinear2d.vec,
            "_upsample_bilinear2d_aa.vec": aten._upsample_bilinear2d_aa.vec,
            "_upsample_bilinear2d_aa.default": aten._upsample_bilinear2d_aa.vec,
            "upsample_bicubic2d.vec": aten.upsample_bicubic2d.vec,
            "_upsample_bicubic2d_aa.vec": aten._upsample_bicubic2d_aa.vec,
        }[name]
        resized = kernel(image, size_2d, align_corners, scales_2d)
    return np.array(resized.reshape(size, wanted).T.numpy())


def _along(importer: Importer, data: relax.Expr, weights: np.ndarray[Any, Any], axis: int) -> relax.Expr:
    wanted, size = weights.shape
    if wanted == size and np.array_equal(weights, np.eye(size)):
        return data
    chosen = weights.argmax(axis=1)
    if np.array_equal(weights, np.eye(size)[chosen]):
        return emit(importer, relax.op.take(data, relax.const(chosen.astype(np.int64), "int64"), axis))
    dtype = dtype_of(data)
    rank = len(shape_of(data))
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    data = cast(importer, data, wide)
    if axis == rank - 1:
        product = relax.op.matmul(data, relax.const(weights.T.astype(wide), wide))
    elif axis == rank - 2:
        product = relax.op.matmul(relax.const(weights.astype(wide), wide), data)
    else:
        last = [*range(axis), *range(axis + 1, rank), axis]
        moved = emit(importer, relax.op.permute_dims(data, last))
        product = emit(importer, relax.op.matmul(moved, relax.const(weights.T.astype(wide), wide)))
        product = relax.op.permute_dims(product, [*range(axis), rank - 1, *range(axis, rank - 1)])
    return cast(importer, emit(importer, product), dtype)


def _average_pool(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer ignores divisor_override.
    values = arguments(node, importer)
    data = values["self"]
    axes = int(node.target.__name__[len("avg_pool")])
    kernel = _each(values["kernel_size"], axes)
    stride = _each(values["stride"], axes) if values["stride"] else kernel
    padding = _each(values["padding"], axes)
    is_single = len(shape_of(data)) == axes + 1
    if is_single:
        data = emit(importer, relax.op.expand_dims(data, 0))
    operator = (relax.op.nn.avg_pool1d, relax.op.nn.avg_pool2d, relax.op.nn.avg_pool3d)[axes - 1]
    divisor = values.get("divisor_override")
    if divisor and values["ceil_mode"]:
        raise ModelImportError("divisor_override together with ceil_mode is not supported")
    include = bool(values["count_include_pad"]) or bool(divisor)
    wide = "float32" if dtype_of(data) in ("float16", "bfloat16") else dtype_of(data)
    pooled = operator(
        cast(importer, data, wide),
        kernel,
        stride,
        padding * 2,
        ceil_mode=bool(values["ceil_mode"]),
        count_include_pad=include,
    )
    result = emit(importer, pooled)
    if divisor:
        factor = float(np.prod(kernel)) / divisor
        result = emit(importer, relax.op.multiply(result, constant(factor, wide)))
    result = cast(importer, result, result_dtype(node))
    return emit(importer, relax.op.squeeze(result, [0])) if is_single else result


def _each(value: Any, count: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return [int(number) for number in (numbers * count if len(numbers) == 1 else numbers)]


def _max_pool_alone(node: fx.Node, importer: Importer) -> tuple[relax.Expr, ...]:
    # TVM's importer answers with zeros where torch gives the places of the maxima: here they are missing instead.
    values = arguments(node, importer)
    data = values["self"]
    axes = int(node.target.__name__[len("max_pool")])
    implementation = (importer._max_pool1d_impl, importer._max_pool2d_impl, importer._max_pool3d_impl)[axes - 1]
    kernel = _each(values["kernel_size"], axes)
    stride = _each(values["stride"], axes) if values["stride"] else kernel
    padding, dilation = _each(values["padding"], axes), _each(values["dilation"], axes)
    return (emit(importer, implementation(data, kernel, stride, padding, dilation, bool(values["ceil_mode"]))),)


def _adaptive_pool(node: fx.Node, importer: Importer) -> Any:
    """Each axis alone: every output element takes the rows from ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉."""
    # TVM has no adaptive maximum, and its mean takes no missing sizes.
    operator: Any = node.target
    name = operator.__name__.lstrip("_")
    values = arguments(node, importer)
    data = values["self"]
    output = node.meta["val"][0] if name.startswith("adaptive_max") else node.meta["val"]
    wanted, shape = [int(size) for size in output.shape], shape_of(data)
    axes = int(name[name.index("pool") + 4])
    reduce = relax.op.max if name.startswith("adaptive_max") else relax.op.mean
    dtype = dtype_of(data)
    is_mean = reduce is relax.op.mean
    data = cast(importer, data, "float32" if is_mean and dtype in ("float16", "bfloat16") else dtype)
    whole = [axis for axis in range(len(shape) - axes, len(shape)) if wanted[axis] == 1]
    if whole:
        data = emit(importer, reduce(data, whole, keepdims=True))
    for axis in range(len(shape) - axes, len(shape)):
        size, count = shape[axis], wanted[axis]
        if count in (1, size):
            continue
        if size % count == 0:
            windows = emit(importer, relax.op.reshape(data, _with_axis_split(shape_of(data), axis, count)))
            data = emit(importer, reduce(windows, [axis + 1]))
            continue
        parts = []
        for place in range(count):
            first, last = place * size // count, -(-(place + 1) * size // count)
            rows = emit(importer, relax.op.strided_slice(data, [axis], [first], [last]))
            parts.append(emit(importer, reduce(rows, [axis], keepdims=True)))
        data = emit(importer, relax.op.concat(parts, axis))
    data = cast(importer, data, dtype)
    return data if is_mean else (data,)


def _with_axis_split(shape: list[int], axis: int, count: int) -> list[int]:
    return [*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]]


def _grid_sample(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's operator wants the coordinates before the grid's axes; its importer leaves them behind.
    values = arguments(node, importer)
    method = {0: "bilinear", 1: "nearest", 2: "bicubic"}[int(values["interpolation_mode"])]
    padding = {0: "zeros", 1: "border", 2: "reflection"}[int(values["padding_mode"])]
    grid = emit(importer, relax.op.permute_dims(values["grid"], [0, 3, 1, 2]))
    corners = bool(values["align_corners"])
    return emit(
        importer,
        relax.op.image.grid_sample(
            values["input"], grid, method=method, layout="NCHW", padding_mode=padding, align_corners=corners
        ),
    )


REPAIRS: dict[str, Repair] = {
    **{f"upsample_nearest{axes}d.vec": _resampled for axes in (1, 2, 3)},
    **{f"_upsample_nearest_exact{axes}d.vec": _resampled for axes in (1, 2, 3)},
    "upsample_linear1d.vec": _resampled,
    "upsample_bilinear2d.vec": _resampled,
    "upsample_trilinear3d.vec": _resampled,
    "upsample_bicubic2d.vec": _resampled,
    "_upsample_bilinear2d_aa.vec": _resampled,
    "_upsample_bicubic2d_aa.vec": _resampled,
    **{f"avg_pool{axes}d.default": _average_pool for axes in (1, 2, 3)},
    **{f"max_pool{axes}d_with_indices.default": _max_pool_alone for axes in (1, 2, 3)},
    **{f"adaptive_max_pool{axes}d.default": _adaptive_pool for axes in (1, 2, 3)},
    **{f"adaptive_avg_pool{axes}d.default": _adaptive_pool for axes in (1, 2, 3)},
    **{f"_adaptive_avg_pool{axes}d.default": _adaptive_pool for axes in (1, 2, 3)},
    "grid_sampler_2d.default": _grid_sample,
}
"""By the name of the ATen overload."""
