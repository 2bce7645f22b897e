"""Conversions that replace TVM's import of ONNX operators, and the operators that are refused.

TVM's importer emits some operators as kernels (``emit_te``) although Relax has an operator: a kernel can be neither
split nor planned. Others are wrong or missing in TVM; the comments say which.
``tests/tvm_split/frontends/test_onnx_sweep.py`` compares each with ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.importing import BRANCH, DYNAMIC, LOOP, RANDOM
from tvm_split.frontends.operators import Operators, constant, dtype_of, numbers_of, shape_of, wide

Repair = Callable[[Operators, Any, dict[str, Any], int], relax.Expr]
"""A function of operators, inputs (None beyond the last), attributes and opset that returns the result."""


def _by_tvm(operator: str, op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    """Convert ONNX's ``operator`` with TVM's own importer."""
    convert = onnx_frontend._get_convert_map()[operator].get_converter(opset)
    return convert(op.builder, inputs, attributes, [{}, {}])


def _known(value: relax.Expr | None, what: str) -> Any:
    """The numbers of a constant input; None if it is absent. Raises ModelImportError if it is not constant."""
    numbers = numbers_of(value)
    if value is not None and numbers is None:
        raise ModelImportError(f"its {what} is computed while the network runs; it has to be a constant")
    return numbers


def _clip(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    low, high = (attributes.get("min"), attributes.get("max")) if opset < 11 else (inputs[1], inputs[2])
    return compositions.limited(op, inputs[0], low, high)


def _pad(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te. Every mode is a selection of rows, one axis after the other.
    data, rank = inputs[0], len(shape_of(inputs[0]))
    if opset < 11:
        pads, value = attributes["pads"], attributes.get("value", 0.0)
    else:
        pads, value = _known(inputs[1], "padding"), _known(inputs[2], "padding value")
    axes = _known(inputs[3], "axes") if opset >= 18 else None
    befores, afters = np.array(pads, int).reshape(2, -1).tolist()
    mode = attributes.get("mode", b"constant").decode()
    for axis, before, after in zip(range(rank) if axes is None else axes.tolist(), befores, afters, strict=True):
        data = _padded_axis(op, data, axis % rank, before, after, mode, 0 if value is None else value)
    return data


def _padded_axis(
    op: Operators, data: relax.Expr, axis: int, before: int, after: int, mode: str, value: Any
) -> relax.Expr:
    if before == after == 0:
        return data
    size = shape_of(data)[axis]
    rows = np.arange(size)[max(-before, 0) : size - max(-after, 0)]
    widths = max(before, 0), max(after, 0)
    if mode != "constant":
        padded = np.pad(rows, widths, mode=mode)  # type: ignore[call-overload]  # ONNX's modes have numpy's names
        return op.take(data, constant(padded, "int64"), axis)
    if before < 0 or after < 0:
        data = op.strided_slice(data, [axis], [max(-before, 0)], [size - max(-after, 0)])
    # TVM's full does not accept infinity.
    shapes = [[width if place == axis else each for place, each in enumerate(shape_of(data))] for width in widths]
    filling = constant(np.reshape(value, ()), dtype_of(data))
    first, last = ([op.broadcast_to(filling, shape)] if shape[axis] else [] for shape in shapes)
    return op.concat([*first, data, *last], axis) if first or last else data


def _slice(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer does not read starts, ends and axes from attributes.
    if opset < 10:
        bounds = attributes["starts"], attributes["ends"], attributes.get("axes", range(len(attributes["starts"])))
        inputs.extend(constant(list(each), "int64") for each in bounds)
    return _by_tvm("Slice", op, inputs, attributes, opset)


def _split(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    axis = attributes.get("axis", 0)
    sizes = attributes.get("split") if opset < 13 else _known(inputs[1], "list of sizes")
    if sizes is None:
        return op.split(inputs[0], attributes["tvm_custom"]["num_outputs"], axis)
    return compositions.parts(op, inputs[0], list(sizes), axis)


def _cumsum(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    data, axis = inputs[0], _known(inputs[1], "axis").item()
    is_reversed = attributes.get("reverse", 0)
    data = op.flip(data, axis) if is_reversed else data
    total = op.cumsum(data, axis, dtype_of(data), bool(attributes.get("exclusive", 0)))
    return op.flip(total, axis) if is_reversed else total


def _one_hot(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's result is always float64, not the values' dtype. Negative indices count from the end.
    depth, (off, on) = _known(inputs[1], "depth").item(), _known(inputs[2], "values")
    dtype, rank = dtype_of(inputs[2]), len(shape_of(inputs[0]))
    axis = attributes.get("axis", -1) % (rank + 1)
    indices = compositions.counted_from_front(op, op.expand_dims(inputs[0], axis), depth)
    classes = np.arange(depth).reshape([depth if place == axis else 1 for place in range(rank + 1)])
    return op.where(op.equal(indices, classes), constant(on, dtype), constant(off, dtype))


def _lp_normalization(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # Missing in TVM.
    data, axis, order = inputs[0], attributes.get("axis", -1), attributes.get("p", 2)
    if order == 1:
        size = op.sum(op.abs(data), [axis], keepdims=True)
    else:
        size = op.sqrt(op.sum(op.multiply(data, data), [axis], keepdims=True))
    return op.where(op.equal(size, 0), constant(0, dtype_of(data)), op.divide(data, size))


def _upsample(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer expects the inputs of a newer operator.
    scales = attributes.get("scales") if opset < 9 else _known(inputs[1], "scales")
    given = onnx_frontend.onnx_input()
    given.extend([inputs[0], None, constant(scales, "float32"), None])
    options = {
        "mode": attributes.get("mode", b"nearest"),
        "coordinate_transformation_mode": b"asymmetric",
        "nearest_mode": b"floor",
    }
    return _by_tvm("Resize", op, given, options, 18)


def _is_infinite(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer ignores both attributes.
    above, below = attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)
    if above and below:
        return compositions.is_infinite(op, inputs[0])
    if above or below:
        return op.equal(inputs[0], math.inf if above else -math.inf)
    return op.less(op.abs(inputs[0]), 0)


def _modulo(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    left, right = inputs
    return op.mod(left, right) if attributes.get("fmod", 0) else compositions.floor_remainder(op, left, right)


def _padded(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int, operator: str) -> relax.Expr:
    """Convert a convolution or pool with ``pads``: TVM pads for ``auto_pad`` in a kernel, and SAME_LOWER wrongly."""
    return _by_tvm(operator, op, inputs, _with_pads(inputs, attributes, operator == "ConvTranspose"), opset)


def _with_pads(inputs: Any, attributes: dict[str, Any], is_transposed: bool) -> dict[str, Any]:
    """Replace ``auto_pad`` and ``output_shape`` by ``pads``, by the formulas in ONNX's operator definitions."""
    mode, wanted = attributes.get("auto_pad", b"NOTSET"), attributes.get("output_shape")
    if mode == b"NOTSET" and wanted is None:
        return attributes
    kernel = attributes.get("kernel_shape") or shape_of(inputs[1])[2:]
    axes = len(kernel)
    strides, dilations = attributes.get("strides", [1] * axes), attributes.get("dilations", [1] * axes)
    extra = list(attributes.get("output_padding", [0] * axes))
    befores, afters = [], []
    for axis, size in enumerate(shape_of(inputs[0])[2:]):
        stride, reach = strides[axis], dilations[axis] * (kernel[axis] - 1) + 1
        if is_transposed:
            full = stride * (size - 1) + extra[axis] + reach
            target = full if mode == b"VALID" else size * stride if wanted is None else wanted[axis - axes]
            total = full - target
            extra[axis] += max(-total, 0)
        else:
            total = 0 if mode == b"VALID" else (-(-size // stride) - 1) * stride + reach - size
        smaller, larger = max(total, 0) // 2, -(-max(total, 0) // 2)
        befores.append(smaller if mode == b"SAME_UPPER" else larger)
        afters.append(larger if mode == b"SAME_UPPER" else smaller)
    kept = {name: value for name, value in attributes.items() if name not in ("auto_pad", "output_shape")}
    return {**kept, "pads": befores + afters, **({"output_padding": extra} if is_transposed else {})}


def _resize(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    """Refuse attributes that TVM's importer ignores, else convert with TVM."""
    refused = [name for name in ("antialias", "exclude_outside", "axes") if attributes.get(name)]
    policy = attributes.get("keep_aspect_ratio_policy", b"stretch")
    if policy != b"stretch":
        refused.append(f"keep_aspect_ratio_policy={policy.decode()!r}")
    if refused:
        raise ModelImportError(f"it uses {', '.join(refused)}")
    return _by_tvm("Resize", op, inputs, attributes, opset)


def _batch_norm(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    """Compose the training mode: TVM simplifies its training operator to inference, and always returns statistics."""
    data, scale, bias, mean, variance = inputs
    if not attributes.get("training_mode", 0):
        return onnx_frontend.BatchNormalization._impl_v15(op.builder, inputs, attributes, {}).fields[0]
    dtype, kept = wide(dtype_of(data)), attributes.get("momentum", 0.9)
    rank = len(shape_of(data))
    axes, channels = [0, *range(2, rank)], [1, -1] + [1] * (rank - 2)
    x = op.cast(data, dtype)
    of_batch = op.mean(x, axes, keepdims=True)
    centred = op.subtract(x, of_batch)
    spread = op.mean(op.multiply(centred, centred), axes, keepdims=True)
    result = op.multiply(centred, op.rsqrt(op.add(spread, attributes.get("epsilon", 1e-5))))
    for operator, parameter in ((op.multiply, scale), (op.add, bias)):
        result = operator(result, op.reshape(op.cast(parameter, dtype), channels))
    updated = [
        op.cast(
            op.add(op.multiply(op.cast(old, dtype), kept), op.multiply(op.squeeze(new, axes), 1 - kept)), dtype_of(old)
        )
        for old, new in ((mean, of_batch), (variance, spread))
    ]
    return relax.Tuple([op.cast(result, dtype_of(data)), *updated])


def _rms_norm(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    """Merge the axes if the norm is over all of them: TVM's operator does not compile then."""
    data, scale = inputs
    shape = shape_of(data)
    if attributes.get("axis", -1) % len(shape) != 0:
        return _by_tvm("RMSNormalization", op, inputs, attributes, opset)
    row, scale = op.reshape(data, [1, -1]), op.reshape(op.broadcast_to(scale, shape), [-1])
    return op.reshape(_by_tvm("RMSNormalization", op, [row, scale], {**attributes, "axis": 1}, opset), shape)


def _space_to_depth(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    """Convert with either mode (DCR, CRD); TVM's importer ignores it."""
    size = attributes["blocksize"]
    images, channels, height, width = shape_of(inputs[0])
    parts = [images, channels, height // size, size, width // size, size]
    order = [0, 1, 3, 5, 2, 4] if attributes.get("mode", b"DCR") == b"CRD" else [0, 3, 5, 1, 2, 4]
    blocks = op.permute_dims(op.reshape(inputs[0], parts), order)
    return op.reshape(blocks, [images, channels * size * size, height // size, width // size])


def _roi_align(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    """Convert RoiAlign like ONNX and onnxruntime: shift by half a pixel after scaling, and take the maximum of the four
    weighted neighbours. TVM's importer shifts before scaling, and takes the maximum of interpolated values.
    """
    data, regions, images = inputs
    default = b"half_pixel" if opset >= 16 else b"output_half_pixel"
    is_aligned = attributes.get("coordinate_transformation_mode", default) == b"half_pixel"
    size = attributes.get("output_height", 1), attributes.get("output_width", 1)
    samples = attributes.get("sampling_ratio", 0)
    regions = op.multiply(regions, attributes.get("spatial_scale", 1.0))
    regions = op.subtract(regions, 0.5) if is_aligned else regions
    if attributes.get("mode", b"avg") == b"avg":
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


REPAIRS: dict[str, Repair] = {
    **{name: partial(_padded, operator=name) for name in ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool")},
    "BatchNormalization": _batch_norm,
    "BitShift": lambda op, given, named, _: compositions.shifted(op, given[0], given[1], named["direction"] == b"LEFT"),
    "Clip": _clip,
    "CumSum": _cumsum,
    "Einsum": lambda op, inputs, attributes, _: op.einsum(list(inputs), attributes["equation"].decode()),  # emit_te
    "IsInf": _is_infinite,
    "LpNormalization": _lp_normalization,
    # TVM stacks and reduces the inputs, which loses NaN.
    "Max": lambda op, inputs, *_: reduce(op.maximum, inputs),
    "Min": lambda op, inputs, *_: reduce(op.minimum, inputs),
    "Mod": _modulo,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": lambda op, inputs, *_: compositions.power(op, inputs[0], inputs[1], dtype_of(inputs[0])),
    "RMSNormalization": _rms_norm,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "Round": lambda op, inputs, *_: compositions.half_to_even(op, inputs[0]),
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Tile": lambda op, inputs, *_: op.tile(inputs[0], _known(inputs[1], "number of repeats").tolist()),  # emit_te
    "Upsample": _upsample,
}
"""Conversions by the operator's name, with its domain if that is not ONNX's."""

_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")

REFUSED: dict[str, str] = {
    **dict.fromkeys(_RANDOM, RANDOM),
    **dict.fromkeys(("NonZero", "Unique", "Compress", "NonMaxSuppression"), DYNAMIC),
    **dict.fromkeys(("Loop", "Scan"), LOOP),
    "If": BRANCH,
}
"""Operators that are refused, each with the reason."""
