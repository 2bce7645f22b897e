"""Repairs of layers: norms of the batch, regions of images, blocks of space."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.errors import ModelImportError
from tvm_split.frontends.onnx_repair_tools import Builder, Repair, cast, constant, dtype_of, shape_of


def _batch_norm(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's operator for training is simplified to the one for inference, and TVM's importer gives the statistics also
    # where there is no training.
    data, scale, bias, mean, variance = inputs
    if not attributes.get("training_mode", 0):
        return onnx_frontend.BatchNormalization._impl_v15(builder, inputs, attributes, {}).fields[0]
    dtype, kept = dtype_of(data), float(attributes.get("momentum", 0.9))
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    rank = len(shape_of(data))
    axes, channels = [0, *range(2, rank)], [1, -1] + [1] * (rank - 2)
    x = cast(builder, data, wide)
    of_batch = builder.emit(relax.op.mean(x, axes, keepdims=True))
    centred = builder.emit(relax.op.subtract(x, of_batch))
    spread = builder.emit(relax.op.mean(builder.emit(relax.op.multiply(centred, centred)), axes, keepdims=True))
    stretched = builder.emit(relax.op.add(spread, constant(attributes.get("epsilon", 1e-5), wide)))
    result = builder.emit(relax.op.multiply(centred, builder.emit(relax.op.rsqrt(stretched))))
    for operator, parameter in ((relax.op.multiply, scale), (relax.op.add, bias)):
        shaped = builder.emit(relax.op.reshape(cast(builder, parameter, wide), channels))
        result = builder.emit(operator(result, shaped))
    updated = []
    for old, new in ((mean, of_batch), (variance, spread)):
        before = builder.emit(relax.op.multiply(cast(builder, old, wide), constant(kept, wide)))
        added = builder.emit(relax.op.multiply(builder.emit(relax.op.squeeze(new, axes)), constant(1 - kept, wide)))
        updated.append(cast(builder, builder.emit(relax.op.add(before, added)), dtype_of(old)))
    return relax.Tuple([cast(builder, result, dtype), *updated])


def _rms_norm(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's operator does not compile over all axes.
    data, scale = inputs
    shape = shape_of(data)
    if attributes.get("axis", -1) % len(shape) != 0:
        return onnx_frontend.RMSNormalization._impl_v23(builder, inputs, attributes, {})
    scale = builder.emit(relax.op.reshape(builder.emit(relax.op.broadcast_to(scale, shape)), [-1]))
    row = builder.emit(relax.op.reshape(data, [1, -1]))
    norm = onnx_frontend.RMSNormalization._impl_v23(builder, [row, scale], {**attributes, "axis": 1}, {})
    return relax.op.reshape(builder.emit(norm), shape)


def _space_to_depth(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer ignores the mode.
    size = int(attributes["blocksize"])
    images, channels, height, width = shape_of(inputs[0])
    parts = [images, channels, height // size, size, width // size, size]
    order = [0, 1, 3, 5, 2, 4] if attributes.get("mode", b"DCR") == b"CRD" else [0, 3, 5, 1, 2, 4]
    blocks = builder.emit(relax.op.permute_dims(builder.emit(relax.op.reshape(inputs[0], parts)), order))
    return relax.op.reshape(blocks, [images, channels * size * size, height // size, width // size])


def _roi_align(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer moves regions by half a pixel before they are scaled, and its maximum is that of interpolated
    # values; ONNX's and onnxruntime's is that of the four weighted neighbours.
    data, regions, images = inputs
    dtype = dtype_of(regions)
    default = b"half_pixel" if opset >= 16 else b"output_half_pixel"
    is_aligned = attributes.get("coordinate_transformation_mode", default) == b"half_pixel"
    size = int(attributes.get("output_height", 1)), int(attributes.get("output_width", 1))
    samples = int(attributes.get("sampling_ratio", 0))
    regions = builder.emit(relax.op.multiply(regions, constant(attributes.get("spatial_scale", 1.0), dtype)))
    if is_aligned:
        regions = builder.emit(relax.op.subtract(regions, constant(0.5, dtype)))
    if attributes.get("mode", b"avg") == b"avg":
        numbers = cast(builder, builder.emit(relax.op.expand_dims(images, 1)), dtype)
        placed = builder.emit(relax.op.concat([numbers, regions], 1))
        means = relax.op.vision.roi_align(data, placed, size, 1.0, samples, is_aligned, layout="NCHW", mode="avg")
        if samples or not is_aligned:
            return means
        # As many samples as a region has pixels: for one without area TVM divides nothing by nothing, ONNX says 0.
        left, top, right, bottom = (
            builder.emit(relax.op.strided_slice(regions, [1], [side], [side + 1])) for side in range(4)
        )
        is_empty = builder.emit(
            relax.op.logical_or(
                builder.emit(relax.op.less_equal(right, left)), builder.emit(relax.op.less_equal(bottom, top))
            )
        )
        is_empty = builder.emit(relax.op.reshape(is_empty, [shape_of(regions)[0], 1, 1, 1]))
        return relax.op.where(is_empty, constant(0, dtype_of(data)), builder.emit(means))
    if samples == 0:
        raise ModelImportError(
            "its mode is max and its sampling_ratio 0, with which the number of samples depends on the regions; "
            "give it a sampling_ratio"
        )
    count, channels = shape_of(regions)[0], shape_of(data)[1]
    height, width = shape_of(data)[2:]
    down = _samples(builder, regions, 1, is_aligned, size[0] * samples, height)
    along = _samples(builder, regions, 0, is_aligned, size[1] * samples, width)
    planes = builder.emit(relax.op.take(data, images, 0))
    planes = builder.emit(relax.op.reshape(planes, [count, channels, height * width]))
    largest = None
    for row, row_weight in down:
        for column, column_weight in along:
            places = builder.emit(
                relax.op.multiply(builder.emit(relax.op.expand_dims(row, 2)), constant(width, "int64"))
            )
            places = builder.emit(relax.op.add(places, builder.emit(relax.op.expand_dims(column, 1))))
            weights = builder.emit(
                relax.op.multiply(
                    builder.emit(relax.op.expand_dims(row_weight, 2)),
                    builder.emit(relax.op.expand_dims(column_weight, 1)),
                )
            )
            points = size[0] * size[1] * samples * samples
            places = builder.emit(relax.op.reshape(places, [count, 1, points]))
            places = builder.emit(relax.op.broadcast_to(places, [count, channels, points]))
            values = builder.emit(relax.op.gather_elements(planes, places, 2))
            values = builder.emit(
                relax.op.multiply(values, builder.emit(relax.op.reshape(weights, [count, 1, points])))
            )
            largest = values if largest is None else builder.emit(relax.op.maximum(largest, values))
    bins = builder.emit(relax.op.reshape(largest, [count, channels, size[0], samples, size[1], samples]))
    return relax.op.max(bins, [3, 5])


def _samples(
    builder: Builder, regions: relax.Expr, first: int, is_aligned: bool, points: int, size: int
) -> list[tuple[relax.Expr, relax.Expr]]:
    """For evenly spaced points of each region on one axis, the neighbours before and after, each with its weight.

    Both are [regions, points]; the weights of points outside the image are 0.
    """
    dtype = dtype_of(regions)
    start = builder.emit(relax.op.strided_slice(regions, [1], [first], [first + 1]))
    end = builder.emit(relax.op.strided_slice(regions, [1], [first + 2], [first + 3]))
    extent = builder.emit(relax.op.subtract(end, start))
    if not is_aligned:
        extent = builder.emit(relax.op.maximum(extent, constant(1, dtype)))
    shares = constant((np.arange(points) + 0.5)[None] / points, dtype)
    places = builder.emit(relax.op.add(start, builder.emit(relax.op.multiply(extent, shares))))
    is_inside = builder.emit(
        relax.op.logical_and(
            builder.emit(relax.op.greater_equal(places, constant(-1, dtype))),
            builder.emit(relax.op.less_equal(places, constant(size, dtype))),
        )
    )
    places = builder.emit(relax.op.clip(places, 0, size - 1))
    before = builder.emit(relax.op.floor(places))
    after = builder.emit(
        relax.op.minimum(builder.emit(relax.op.add(before, constant(1, dtype))), constant(size - 1, dtype))
    )
    share = builder.emit(relax.op.subtract(places, before))
    inside = cast(builder, is_inside, dtype)
    rest = builder.emit(relax.op.subtract(constant(1, dtype), share))
    return [
        (cast(builder, before, "int64"), builder.emit(relax.op.multiply(rest, inside))),
        (cast(builder, after, "int64"), builder.emit(relax.op.multiply(share, inside))),
    ]


REPAIRS: dict[str, Repair] = {
    "BatchNormalization": _batch_norm,
    "RMSNormalization": _rms_norm,
    "SpaceToDepth": _space_to_depth,
    "RoiAlign": _roi_align,
}
"""By the operator's name."""
