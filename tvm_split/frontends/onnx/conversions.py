"""Conversions that replace TVM's import of ONNX operators, and the operators that are refused.

TVM's importer emits some operators as kernels (``emit_te``) although Relax has an operator: a kernel can be neither
split nor planned. Others are wrong or missing in TVM; the comments say which.
``tests/tvm_split/frontends/test_onnx_sweep.py`` compares each with ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.convert import BRANCH, DYNAMIC, LOOP, RANDOM, Call, Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of, wide


class OnnxCall(Call):
    """A call with attributes as ONNX names them; operands beyond the last are None."""

    @property
    def opset(self) -> int:
        """The version of the model's operators."""
        return int(self.importer.opset)

    def by_tvm(
        self, operands: Sequence[Any] | None = None, attributes: Mapping[str, Any] | None = None, operator: str = ""
    ) -> relax.Expr:
        """Return what TVM's importer makes of this call, or of it with other operands, attributes or operator."""
        inputs = onnx_frontend.onnx_input()
        inputs.extend(self.operands if operands is None else operands)
        convert = onnx_frontend._get_convert_map()[operator or self.source.op_type]
        custom = {"name": self.operation.layer, "num_outputs": len(self.operation.outputs)}
        attributes = {**(self.attributes if attributes is None else attributes), "tvm_custom": custom}
        # An operator that stands for this one is called as its newest version.
        converter = convert.get_converter(18 if operator else self.opset)
        return converter(self.importer.builder, inputs, attributes, [{}, {}])


def _clip(op: Operators, call: OnnxCall) -> relax.Expr:
    # emit_te
    low, high = (call.get("min"), call.get("max")) if call.opset < 11 else (call.operands[1], call.operands[2])
    return compositions.limited(op, call.operands[0], low, high)


def _pad(op: Operators, call: OnnxCall) -> relax.Expr:
    # emit_te. Every mode is a selection of rows, one axis after the other.
    data, rank = call.operands[0], len(shape_of(call.operands[0]))
    if call.opset < 11:
        pads, value = call["pads"], call.get("value", 0.0)
    else:
        pads, value = call.numbers(1, "padding"), call.numbers(2, "padding value")
    axes = call.numbers(3, "axes") if call.opset >= 18 else None
    befores, afters = np.array(pads, int).reshape(2, -1).tolist()
    mode = call.get("mode", b"constant").decode()
    for axis, before, after in zip(range(rank) if axes is None else axes.tolist(), befores, afters, strict=True):
        data = _padded_axis(op, data, axis % rank, before, after, mode, 0 if value is None else value)
    return data


def _padded_axis(
    op: Operators, data: relax.Expr, axis: int, before: int, after: int, mode: str, value: Any
) -> relax.Expr:
    size, widths = shape_of(data)[axis], (max(before, 0), max(after, 0))
    if before < 0 or after < 0:
        data = op.strided_slice(data, [axis], [max(-before, 0)], [size - max(-after, 0)])
    if mode != "constant":
        return compositions.padded_with_rows(op, data, axis, widths, mode)  # ONNX's modes have numpy's names
    # TVM's full does not accept infinity.
    shapes = [[width if place == axis else size for place, size in enumerate(shape_of(data))] for width in widths]
    filling = constant(np.reshape(value, ()), dtype_of(data))
    first, last = ([op.broadcast_to(filling, shape)] if shape[axis] else [] for shape in shapes)
    return op.concat([*first, data, *last], axis) if first or last else data


def _slice(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM's importer does not read starts, ends and axes from attributes.
    if call.opset < 10:
        bounds = call["starts"], call["ends"], call.get("axes", range(len(call["starts"])))
        return call.by_tvm([call.operands[0], *(constant(list(numbers), "int64") for numbers in bounds)])
    return call.by_tvm()


def _split(op: Operators, call: OnnxCall) -> relax.Expr:
    axis = call.get("axis", 0)
    sizes = call.get("split") if call.opset < 13 else call.numbers(1, "list of sizes")
    if sizes is None:
        return op.split(call.operands[0], len(call.operation.outputs), axis)
    return compositions.parts(op, call.operands[0], list(sizes), axis)


def _cumsum(op: Operators, call: OnnxCall) -> relax.Expr:
    # emit_te
    is_exclusive, is_reversed = bool(call.get("exclusive", 0)), bool(call.get("reverse", 0))
    return compositions.cumulative_sum(op, call.operands[0], call.numbers(1, "axis").item(), is_exclusive, is_reversed)


def _one_hot(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM's result is always float64, not the values' dtype. Negative indices count from the end.
    depth, (off, on) = call.numbers(1, "depth").item(), call.numbers(2, "values")
    dtype, rank = dtype_of(call.operands[2]), len(shape_of(call.operands[0]))
    axis = call.get("axis", -1) % (rank + 1)
    indices = compositions.counted_from_front(op, op.expand_dims(call.operands[0], axis), depth)
    classes = np.arange(depth).reshape([depth if place == axis else 1 for place in range(rank + 1)])
    return op.where(op.equal(indices, classes), constant(on, dtype), constant(off, dtype))


def _lp_normalization(op: Operators, call: OnnxCall) -> relax.Expr:
    # Missing in TVM.
    data, axis, order = call.operands[0], call.get("axis", -1), call.get("p", 2)
    if order == 1:
        size = op.sum(op.abs(data), [axis], keepdims=True)
    else:
        size = op.sqrt(op.sum(op.multiply(data, data), [axis], keepdims=True))
    return op.where(op.equal(size, 0), constant(0, dtype_of(data)), op.divide(data, size))


def _upsample(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM's importer expects the inputs of a newer operator.
    scales = call.get("scales") if call.opset < 9 else call.numbers(1, "scales")
    options = {
        "mode": call.get("mode", b"nearest"),
        "coordinate_transformation_mode": b"asymmetric",
        "nearest_mode": b"floor",
    }
    return call.by_tvm([call.operands[0], None, constant(scales, "float32"), None], options, "Resize")


def _is_infinite(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM's importer ignores both attributes.
    above, below = call.get("detect_positive", 1), call.get("detect_negative", 1)
    if above and below:
        return compositions.is_infinite(op, call.operands[0])
    if above or below:
        return op.equal(call.operands[0], math.inf if above else -math.inf)
    return op.less(op.abs(call.operands[0]), 0)


def _modulo(op: Operators, call: OnnxCall) -> relax.Expr:
    left, right = call.operands
    return op.mod(left, right) if call.get("fmod", 0) else compositions.floor_remainder(op, left, right)


def _padded(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert a convolution or pool with ``pads``: TVM pads for ``auto_pad`` in a kernel, and SAME_LOWER wrongly.

    ``auto_pad`` and ``output_shape`` become ``pads`` by the formulas in ONNX's operator definitions.
    """
    mode, output_shape = call.get("auto_pad", b"NOTSET"), call.get("output_shape")
    if mode == b"NOTSET" and output_shape is None:
        return call.by_tvm()
    is_transposed = call.operation.kind == "ConvTranspose"
    kernel = call.get("kernel_shape") or shape_of(call.operands[1])[2:]
    axes = len(kernel)
    strides, dilations = call.get("strides", [1] * axes), call.get("dilations", [1] * axes)
    extra = list(call.get("output_padding", [0] * axes))
    befores, afters = [], []
    for axis, size in enumerate(shape_of(call.operands[0])[2:]):
        stride, reach = strides[axis], dilations[axis] * (kernel[axis] - 1) + 1
        if is_transposed:
            full = stride * (size - 1) + extra[axis] + reach
            target = full if mode == b"VALID" else size * stride if output_shape is None else output_shape[axis - axes]
            total = full - target
            extra[axis] += max(-total, 0)
        else:
            total = 0 if mode == b"VALID" else (-(-size // stride) - 1) * stride + reach - size
        smaller, larger = max(total, 0) // 2, -(-max(total, 0) // 2)
        befores.append(smaller if mode == b"SAME_UPPER" else larger)
        afters.append(larger if mode == b"SAME_UPPER" else smaller)
    attributes = {name: value for name, value in call.attributes.items() if name not in ("auto_pad", "output_shape")}
    changed = {"pads": befores + afters, **({"output_padding": extra} if is_transposed else {})}
    return call.by_tvm(attributes={**attributes, **changed})


def _resize(op: Operators, call: OnnxCall) -> relax.Expr:
    """Refuse attributes that TVM's importer ignores, else convert with TVM."""
    refused = [name for name in ("antialias", "exclude_outside", "axes") if call.get(name)]
    policy = call.get("keep_aspect_ratio_policy", b"stretch")
    if policy != b"stretch":
        refused.append(f"keep_aspect_ratio_policy={policy.decode()!r}")
    if refused:
        raise ModelImportError(f"it uses {', '.join(refused)}")
    return call.by_tvm()


def _batch_norm(op: Operators, call: OnnxCall) -> relax.Expr:
    """Compose the training mode: TVM simplifies its training operator to inference, and always returns statistics."""
    data, scale, bias, mean, variance = call.operands
    if not call.get("training_mode", 0):
        return onnx_frontend.BatchNormalization._impl_v15(op.builder, call.operands, dict(call.attributes), {}).fields[
            0
        ]
    dtype, momentum = wide(dtype_of(data)), call.get("momentum", 0.9)
    rank = len(shape_of(data))
    axes, channels = [0, *range(2, rank)], [1, -1] + [1] * (rank - 2)
    x = op.cast(data, dtype)
    of_batch = op.mean(x, axes, keepdims=True)
    centred = op.subtract(x, of_batch)
    spread = op.mean(op.multiply(centred, centred), axes, keepdims=True)
    result = op.multiply(centred, op.rsqrt(op.add(spread, call.get("epsilon", 1e-5))))
    for operator, parameter in ((op.multiply, scale), (op.add, bias)):
        result = operator(result, op.reshape(op.cast(parameter, dtype), channels))
    updated = [
        op.cast(
            op.add(op.multiply(op.cast(old, dtype), momentum), op.multiply(op.squeeze(new, axes), 1 - momentum)),
            dtype_of(old),
        )
        for old, new in ((mean, of_batch), (variance, spread))
    ]
    return relax.Tuple([op.cast(result, dtype_of(data)), *updated])


def _rms_norm(op: Operators, call: OnnxCall) -> relax.Expr:
    """Merge the axes if the norm is over all of them: TVM's operator does not compile then."""
    data, scale = call.operands
    shape = shape_of(data)
    if call.get("axis", -1) % len(shape) != 0:
        return call.by_tvm()
    row, scale = op.reshape(data, [1, -1]), op.reshape(op.broadcast_to(scale, shape), [-1])
    return op.reshape(call.by_tvm([row, scale], {**call.attributes, "axis": 1}), shape)


def _space_to_depth(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert with either mode (DCR, CRD); TVM's importer ignores it."""
    size = call["blocksize"]
    images, channels, height, width = shape_of(call.operands[0])
    parts = [images, channels, height // size, size, width // size, size]
    order = [0, 1, 3, 5, 2, 4] if call.get("mode", b"DCR") == b"CRD" else [0, 3, 5, 1, 2, 4]
    blocks = op.permute_dims(op.reshape(call.operands[0], parts), order)
    return op.reshape(blocks, [images, channels * size * size, height // size, width // size])


def _roi_align(op: Operators, call: OnnxCall) -> relax.Expr:
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


CONVERSIONS: dict[str, Conversion] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"), _padded),
    "BatchNormalization": _batch_norm,
    "BitShift": lambda op, call: compositions.shifted(
        op, call.operands[0], call.operands[1], call["direction"] == b"LEFT"
    ),
    "Clip": _clip,
    "CumSum": _cumsum,
    "Einsum": lambda op, call: op.einsum(list(call.operands), call["equation"].decode()),  # emit_te
    "IsInf": _is_infinite,
    "LpNormalization": _lp_normalization,
    # TVM stacks and reduces the inputs, which loses NaN.
    "Max": lambda op, call: reduce(op.maximum, call.operands),
    "Min": lambda op, call: reduce(op.minimum, call.operands),
    "Mod": _modulo,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": lambda op, call: compositions.power(op, call.operands[0], call.operands[1], dtype_of(call.operands[0])),
    "RMSNormalization": _rms_norm,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "Round": lambda op, call: compositions.half_to_even(op, call.operands[0]),
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Tile": lambda op, call: op.tile(call.operands[0], call.numbers(1, "number of repeats").tolist()),  # emit_te
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
