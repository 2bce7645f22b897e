"""Conversions of ONNX operators on images: resizing, regions, blocks of space.

A Resize becomes a table of indices or weights for each axis, with the coordinates, roundings and weights of
onnxruntime. Coordinates are computed in float32 as there, since a rounding may depend on their last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.onnx.call import OnnxCall
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, shape_of, wide

Array = np.ndarray[Any, Any]

_TIE = 0.5 + 1e-6
"""Half a pixel, with the tolerance in which onnxruntime takes two pixels as equally near."""

_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda places: np.ceil(places - _TIE),
    "round_prefer_ceil": lambda places: np.floor(places + _TIE),
    "floor": np.floor,
    "ceil": np.ceil,
}
_REACHES = {"linear": 1, "cubic": 2}
"""The distance from which on a pixel has no weight, by method."""


def _coordinates(mode: str, scale: np.float32, size: int, target: int, start: float, end: float) -> Array:
    """Return the source's coordinate for each of ``target`` indices of an axis of ``size``.

    ``mode`` is one of ONNX's coordinate transformations; ``start`` and ``end`` are the region of tf_crop_and_resize.
    """
    places, half = np.arange(target, dtype=np.float32), np.float32(0.5)
    if mode == "asymmetric":
        result = places / scale
    elif mode == "align_corners":
        result = places * np.float32(size - 1) / np.float32(max(target - 1, 1))
    elif mode == "tf_crop_and_resize":
        first, extent, last = np.float32(start), np.float32(end) - np.float32(start), np.float32(size - 1)
        if target > 1:
            result = first * last + places * extent * last / np.float32(target - 1)
        else:
            result = np.full(1, half * (first + np.float32(end)) * last)
    elif mode == "tf_half_pixel_for_nn":
        result = (places + half) / scale
    elif mode == "half_pixel_symmetric":
        offset = np.float32(size) / 2 * (1 - np.float32(target) / (scale * np.float32(size)))
        result = (offset + (places + half).astype(np.float64) / scale - half).astype(np.float32)
    elif mode == "pytorch_half_pixel" and target == 1:
        result = np.zeros(1)
    else:
        result = (places + half) / scale - half
    return result.astype(np.float64)


def _nearest(places: Array, size: int, rounding: str) -> Array:
    """Return the index of the pixel nearest to each coordinate."""
    return np.clip(_ROUNDINGS[rounding](places), 0, size - 1).astype(np.int64)


def _weights(
    places: Array, size: int, method: str, *, cubic: float = -0.75, stretch: float = 1.0, excludes_outside: bool = False
) -> Array:
    """Return the matrix [coordinates, pixels] of a ``linear`` or ``cubic`` interpolation.

    ``cubic`` is the coefficient of Keys's kernel. ``stretch`` widens the kernel, against aliasing. Pixels outside the
    image repeat its edge, or have no weight if it ``excludes_outside``.
    """
    reach = int(np.ceil(_REACHES[method] * stretch))
    pixels = np.floor(places)[:, None] + np.arange(-reach, reach + 2)
    distances = np.abs(pixels - places[:, None]) / stretch
    if method == "linear":
        shares = np.maximum(1 - distances, 0)
    else:
        near = ((cubic + 2) * distances - (cubic + 3)) * distances**2 + 1
        far = cubic * (((distances - 5) * distances + 8) * distances - 4)
        shares = np.where(distances <= 1, near, np.where(distances < 2, far, 0))
    if excludes_outside:
        shares = np.where((pixels < 0) | (pixels >= size), 0, shares)
    totals = shares.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(places), size))
    columns = np.clip(pixels, 0, size - 1).astype(np.int64)
    np.add.at(matrix, (np.arange(len(places))[:, None], columns), shares / np.where(totals == 0, 1, totals))
    return matrix


def resize(op: Operators, call: OnnxCall) -> relax.Expr:
    """Resize one axis after the other, by a table of indices or weights.

    TVM's importer maps coordinates by the ratio of the sizes, where ONNX maps them by the scale that it is given; it
    ignores ``antialias``, ``exclude_outside``, ``axes`` and ``keep_aspect_ratio_policy``.
    """
    data, is_old = call.operands[0], call.opset < 11
    dtype, shape, rank = dtype_of(data), shape_of(data), len(shape_of(data))
    axes = [axis % rank for axis in call.get("axes", range(rank))]
    sizes = [shape[axis] for axis in axes]
    scales, targets = _scales_and_targets(call, sizes)
    if targets == sizes:
        return data  # whatever the scales are, as in onnxruntime
    method = call.get("mode", b"nearest").decode()
    mode = call.get("coordinate_transformation_mode", b"asymmetric" if is_old else b"half_pixel").decode()
    is_cropped = mode == "tf_crop_and_resize"
    region = call.numbers(1, "region") if is_cropped else np.zeros(2 * len(axes))
    if method != "nearest":
        data = op.cast(data, wide(dtype) if is_float(dtype) else "float32")
    inside = np.ones([1] * rank, bool)
    for axis, scale, target, start, end in zip(axes, scales, targets, *np.split(region, 2), strict=True):
        if scale == 1:
            continue
        size = shape[axis]
        places = _coordinates(mode, scale, size, target, start, end)
        if method == "nearest":
            old = b"floor" if scale > 1 else b"ceil"
            rounding = old if is_old else call.get("nearest_mode", b"round_prefer_floor")
            indices = _nearest(places, size, rounding.decode())
            data = op.take(data, constant(indices, "int64"), axis)
        else:
            table = _weights(
                places, size, method, cubic=call.get("cubic_coeff_a", -0.75),
                stretch=max(1.0, float(1 / scale)) if call.get("antialias") else 1.0,
                excludes_outside=bool(call.get("exclude_outside")),
            )  # fmt: skip
            data = compositions.weighted(op, data, table, axis)
        is_inside = (places >= 0) & (places <= size - 1)
        inside = inside & is_inside.reshape([target if place == axis else 1 for place in range(rank)])
    if is_cropped and not inside.all():
        data = op.where(constant(inside, "bool"), data, call.get("extrapolation_value", 0.0))
    return op.cast(data, dtype)


def _scales_and_targets(call: OnnxCall, sizes: Sequence[int]) -> tuple[Any, Sequence[int]]:
    """Return the scale, in float32, and the new size of each axis that a Resize or Upsample names."""
    lengths = np.array(sizes, np.float32)
    place = 1 if call.opset < 11 else 2
    scales = call.get("scales") if call.opset < 9 else call.numbers(place, "scales")
    if scales is not None and len(scales):
        scales = np.asarray(scales, np.float32)
        return scales, np.floor(scales * lengths).astype(int).tolist()
    targets = call.numbers(3, "sizes")
    scales = targets.astype(np.float32) / lengths
    policy = call.get("keep_aspect_ratio_policy", b"stretch")
    if policy != b"stretch":
        scales = np.full_like(scales, scales.min() if policy == b"not_larger" else scales.max())
        targets = np.floor(scales * lengths + np.float32(0.5)).astype(int)
    return scales, targets.tolist()


def space_to_depth(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert with either mode (DCR, CRD); TVM's importer ignores it."""
    size = call["blocksize"]
    images, channels, height, width = shape_of(call.operands[0])
    parts = [images, channels, height // size, size, width // size, size]
    order = [0, 1, 3, 5, 2, 4] if call.get("mode", b"DCR") == b"CRD" else [0, 3, 5, 1, 2, 4]
    blocks = op.permute_dims(op.reshape(call.operands[0], parts), order)
    return op.reshape(blocks, [images, channels * size * size, height // size, width // size])


def roi_align(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert RoiAlign like ONNX and onnxruntime: shift by half a pixel after scaling, and take the maximum of the four
    weighted neighbours. TVM's importer shifts before scaling, and takes the maximum of interpolated values.
    """
    data, regions, images = call.operands
    default = b"half_pixel" if call.opset >= 16 else b"output_half_pixel"
    is_aligned = call.get("coordinate_transformation_mode", default) == b"half_pixel"
    size = call.get("output_height", 1), call.get("output_width", 1)
    samples = call.get("sampling_ratio", 0)
    regions = op.multiply(regions, call.get("spatial_scale", 1.0))
    regions = op.subtract(regions, 0.5) if is_aligned else regions
    if call.get("mode", b"avg") == b"avg":
        placed = op.concat([op.cast(op.expand_dims(images, 1), dtype_of(regions)), regions], 1)
        means = op.vision.roi_align(data, placed, size, 1.0, samples, is_aligned, layout="NCHW", mode="avg")
        if samples or not is_aligned:
            return means
        # The number of samples follows the region's size: for an empty region TVM computes 0 / 0, ONNX defines 0.
        left, top, right, bottom = (op.strided_slice(regions, [1], [side], [side + 1]) for side in range(4))
        is_empty = op.logical_or(op.less_equal(right, left), op.less_equal(bottom, top))
        return op.where(op.expand_dims(is_empty, [2, 3]), 0, means)
    if samples == 0:
        raise ModelImportError(
            "its mode is max and its sampling_ratio 0, with which the number of samples depends on the regions; "
            "give it a sampling_ratio"
        )
    count, channels = shape_of(regions)[0], shape_of(data)[1]
    height, width = shape_of(data)[2:]
    down = _samples(op, regions, 1, is_aligned, size[0] * samples, height)
    along = _samples(op, regions, 0, is_aligned, size[1] * samples, width)
    planes = op.reshape(op.take(data, images, 0), [count, channels, height * width])
    points = size[0] * size[1] * samples * samples
    largest = None
    for row, row_weight in down:
        for column, column_weight in along:
            places = op.add(op.multiply(op.expand_dims(row, 2), width), op.expand_dims(column, 1))
            places = op.broadcast_to(op.reshape(places, [count, 1, points]), [count, channels, points])
            weights = op.multiply(op.expand_dims(row_weight, 2), op.expand_dims(column_weight, 1))
            values = op.multiply(op.gather_elements(planes, places, 2), op.reshape(weights, [count, 1, points]))
            largest = values if largest is None else op.maximum(largest, values)
    return op.max(op.reshape(largest, [count, channels, size[0], samples, size[1], samples]), [3, 5])


def _samples(
    op: Operators, regions: relax.Expr, first: int, is_aligned: bool, points: int, size: int
) -> list[tuple[relax.Expr, relax.Expr]]:
    """Return, for evenly spaced points of each region on one axis, the two neighbours, each with its weight.

    Indices and weights have shape [regions, points]; the weights of points outside the image are 0.
    """
    start, end = (op.strided_slice(regions, [1], [side], [side + 1]) for side in (first, first + 2))
    extent = op.subtract(end, start)
    extent = extent if is_aligned else op.maximum(extent, 1)
    places = op.add(start, op.multiply(extent, (np.arange(points) + 0.5)[None] / points))
    is_inside = op.logical_and(op.greater_equal(places, -1), op.less_equal(places, size))
    inside = op.cast(is_inside, dtype_of(regions))
    places = op.clip(places, 0, size - 1)
    before = op.floor(places)
    after = op.minimum(op.add(before, 1), size - 1)
    share = op.subtract(places, before)
    return [
        (op.cast(before, "int64"), op.multiply(op.subtract(1, share), inside)),
        (op.cast(after, "int64"), op.multiply(share, inside)),
    ]
