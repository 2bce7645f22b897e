"""Conversions that replace TVM's import of ONNX operators, and the operators that are refused.

TVM's importer emits some operators as kernels (``emit_te``) although Relax has an operator: a kernel can be neither
split nor planned. Others are wrong or missing in TVM; the comments say which.
``tests/tvm_split/frontends/test_onnx_sweep.py`` compares each with ONNX.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.convert import BRANCH, DYNAMIC, LOOP, RANDOM, Call, Conversion
from tvm_split.frontends.onnx.resizing import resize
from tvm_split.frontends.operators import Operators, constant, dtype_of, is_float, numbers_of, shape_of, wide


class OnnxCall(Call):
    """A call with attributes as ONNX names them; operands beyond the last are None."""

    @property
    def opset(self) -> int:
        """The model's opset version of the default domain ``ai.onnx``."""
        return int(self.importer.opset)

    def by_tvm(self, operands: Sequence[Any] | None = None, attributes: Mapping[str, Any] | None = None) -> relax.Expr:
        """Return the result of TVM's importer for this call, with its own or the given operands and attributes."""
        inputs = onnx_frontend.onnx_input()
        inputs.extend(self.operands if operands is None else operands)
        convert = onnx_frontend._get_convert_map()[self.source.op_type]
        custom = {"name": self.operation.layer, "num_outputs": len(self.operation.outputs)}
        attributes = {**(self.attributes if attributes is None else attributes), "tvm_custom": custom}
        return convert.get_converter(self.opset)(self.importer.builder, inputs, attributes, [{}, {}])


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


def _split_to_sequence(op: Operators, call: OnnxCall) -> relax.Tuple:
    """Split into a Relax tuple; TVM's importer runs forever on operators that read its own form of a sequence."""
    data, axis, sizes = call.operands[0], call.get("axis", 0), call.numbers(1, "list of sizes")
    length = shape_of(data)[axis]
    if sizes is None or sizes.ndim == 0:
        size = 1 if sizes is None else sizes.item()
        counts = [min(size, length - first) for first in range(0, length, size)]
    else:
        counts = sizes.tolist()
    whole = compositions.parts(op, data, counts, axis)
    parts = [op.item(whole, place) for place in range(len(counts))]
    return relax.Tuple(
        [op.squeeze(part, [axis]) for part in parts] if sizes is None and not call.get("keepdims", 1) else parts
    )


def _sequence_insert(op: Operators, call: OnnxCall) -> relax.Tuple:
    # TVM's importer inserts at -1 after the last element; ONNX, like Python, inserts before it.
    elements, place = list(call.operands[0].fields), call.numbers(2, "position")
    elements.insert(len(elements) if place is None else place.item(), call.operands[1])
    return relax.Tuple(elements)


def _dropout(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM's importer ignores the mode.
    if call.numbers(2, "mode"):
        raise ModelImportError(RANDOM)
    return call.operands[0]


def _cumsum(op: Operators, call: OnnxCall) -> relax.Expr:
    # emit_te
    is_exclusive, is_reversed = bool(call.get("exclusive", 0)), bool(call.get("reverse", 0))
    return compositions.cumulative_sum(op, call.operands[0], call.numbers(1, "axis").item(), is_exclusive, is_reversed)


def _reduced(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert a reduction; with ``noop_with_empty_axes`` and no axes, an axis of size 1 is added and reduced.

    Then ONNX returns the absolute value or square, but TVM the input. TVM's means of integers have another dtype, its
    roots and logarithms of integers fail.
    """
    data, axes, attributes = call.operands[0], call.operands[1], call.attributes
    if call.get("noop_with_empty_axes", 0) and (axes is None or 0 in shape_of(axes)):
        last = len(shape_of(data))
        data, axes, attributes = op.expand_dims(data, [last]), constant([last], "int64"), {"keepdims": 0}
    dtype = dtype_of(data)
    if call.operation.kind.endswith("LogSumExp") and is_float(dtype):
        # TVM subtracts the maximum also where it is infinite.
        known = attributes.get("axes") if axes is None else numbers_of(axes)
        numbers = call.numbers(1, "axes") if known is None and axes is not None else known
        rank = len(shape_of(data))
        listed = range(rank) if numbers is None or not len(numbers) else [int(axis) % rank for axis in numbers]
        return compositions.log_sum_exp(op, data, sorted(listed), bool(attributes.get("keepdims", 1)))
    is_truncated = not is_float(dtype) and call.operation.kind.endswith(("Mean", "L2", "LogSum", "LogSumExp"))
    data = op.cast(data, "float64") if is_truncated else data
    return op.cast(op.builder.emit(call.by_tvm([data, axes], attributes)), dtype)


def _squeeze(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM's importer fails for axes in attributes.
    axes = call.get("axes") if call.opset < 13 else call.numbers(1, "axes")
    return op.squeeze(call.operands[0], None if axes is None else [int(axis) for axis in axes])


def _dynamically_quantised(op: Operators, call: OnnxCall) -> relax.Tuple:
    """Quantise to uint8 with the range of the data and 0; the scale of nothing but zeros is 1, as in onnxruntime."""
    data = call.operands[0]
    low, high = op.minimum(op.min(data), 0), op.maximum(op.max(data), 0)
    scale = op.divide(op.subtract(high, low), 255)
    scale = op.where(op.equal(scale, 0), 1, scale)
    zero = compositions.limited(op, compositions.half_to_even(op, op.divide(op.negative(low), scale)), 0, 255)
    steps = op.add(compositions.half_to_even(op, op.divide(data, scale)), zero)
    return relax.Tuple([op.cast(compositions.limited(op, steps, 0, 255), "uint8"), scale, op.cast(zero, "uint8")])


def _one_hot(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM's result is always float64, not the values' dtype. Negative indices count from the end.
    depth, (off, on) = int(call.numbers(1, "depth").item()), call.numbers(2, "values")
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
    """Convert a convolution or pool with ``pads``: TVM emits a kernel for ``auto_pad``, and SAME_LOWER is wrong.

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
            total = full - (size * stride if output_shape is None else output_shape[axis - axes])
            extra[axis] += 0 if output_shape is None else max(-total, 0)
        else:
            total = (-(-size // stride) - 1) * stride + reach - size
        total = 0 if mode == b"VALID" and output_shape is None else max(total, 0)
        smaller, larger = total // 2, -(-total // 2)
        befores.append(smaller if mode == b"SAME_UPPER" else larger)
        afters.append(larger if mode == b"SAME_UPPER" else smaller)
    attributes = {name: value for name, value in call.attributes.items() if name not in ("auto_pad", "output_shape")}
    changed = {"pads": befores + afters, **({"output_padding": extra} if is_transposed else {})}
    return call.by_tvm(attributes={**attributes, **changed})


def _batch_norm(op: Operators, call: OnnxCall) -> Any:
    """Compose the training mode: TVM simplifies its training operator to inference, and always returns statistics."""
    data, scale, bias, mean, variance = call.operands
    # Below opset 14, a batch norm trains if it has more than one output.
    if not (call.get("training_mode", 0) if call.opset >= 14 else len(call.operation.outputs) > 1):
        return call.by_tvm().fields[0]
    momentum, rank = call.get("momentum", 0.9), len(shape_of(data))
    axes, channels = [0, *range(2, rank)], [1, -1] + [1] * (rank - 2)
    of_batch = op.mean(data, axes, keepdims=True)
    centred = op.subtract(data, of_batch)
    spread = op.mean(op.multiply(centred, centred), axes, keepdims=True)
    normed = op.multiply(centred, op.rsqrt(op.add(spread, call.get("epsilon", 1e-5))))
    result = op.add(op.multiply(normed, op.reshape(scale, channels)), op.reshape(bias, channels))
    updated = [
        op.add(op.multiply(old, momentum), op.multiply(op.squeeze(new, axes), 1 - momentum))
        for old, new in ((mean, of_batch), (variance, spread))
    ]
    return [result, *updated]


def _prelu(op: Operators, call: OnnxCall) -> relax.Expr:
    # Slopes that do not fit the last axis are those of the channels, below opset 7; TVM's importer fails.
    data, slope = call.operands
    if shape_of(slope) not in ([1], shape_of(data)[-1:]) and len(shape_of(slope)) == 1:
        slope = op.reshape(slope, [-1, *[1] * (len(shape_of(data)) - 2)])
    return op.where(op.less(data, 0), op.multiply(data, slope), data)


def _layer_norm(op: Operators, call: OnnxCall) -> relax.Expr:
    # TVM does not broadcast the weights, and returns placeholders for the statistics.
    data, *weights = call.operands
    shape = shape_of(data)[call.get("axis", -1) % len(shape_of(data)) :]
    weights = [None if weight is None else op.repeated(weight, shape) for weight in weights]
    return call.by_tvm([data, *weights]).fields[0]


def _rms_norm(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert an RMS norm; one over all axes is computed over a merged axis, since TVM's does not compile."""
    data, scale = call.operands
    shape = shape_of(data)
    axis = call.get("axis", -1) % len(shape)
    scale = op.repeated(scale, shape[axis:])
    if axis != 0:
        return call.by_tvm([data, scale])
    row, scale = op.reshape(data, [1, -1]), op.reshape(scale, [-1])
    return op.reshape(call.by_tvm([row, scale], {**call.attributes, "axis": 1}), shape)


def _top_k(op: Operators, call: OnnxCall) -> tuple[relax.Expr, relax.Expr]:
    # TVM's importer refuses results in any order (sorted=0), and has no order for NaN.
    count = call["k"] if call.opset < 10 else call.numbers(1, "number of elements").item()
    return compositions.sorted_elements(op, call.operands[0], call.get("axis", -1), bool(call.get("largest", 1)), count)


def _space_to_depth(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert with either mode (DCR, CRD); TVM's importer ignores the mode."""
    size = call["blocksize"]
    images, channels, height, width = shape_of(call.operands[0])
    parts = [images, channels, height // size, size, width // size, size]
    order = [0, 1, 3, 5, 2, 4] if call.get("mode", b"DCR") == b"CRD" else [0, 3, 5, 1, 2, 4]
    blocks = op.permute_dims(op.reshape(call.operands[0], parts), order)
    return op.reshape(blocks, [images, channels * size * size, height // size, width // size])


def _roi_align(op: Operators, call: OnnxCall) -> relax.Expr:
    """Convert with the shift by half a pixel after scaling, as in onnxruntime; TVM's importer shifts before scaling."""
    if call.get("mode", b"avg") != b"avg":
        raise ModelImportError("it takes the maximum of its samples; only their mean (mode avg) can be imported")
    data, regions, images = call.operands
    default = b"half_pixel" if call.opset >= 16 else b"output_half_pixel"
    is_aligned = call.get("coordinate_transformation_mode", default) == b"half_pixel"
    size = call.get("output_height", 1), call.get("output_width", 1)
    samples = call.get("sampling_ratio", 0)
    regions = op.multiply(regions, call.get("spatial_scale", 1.0))
    regions = op.subtract(regions, 0.5) if is_aligned else regions
    placed = op.concat([op.cast(op.expand_dims(images, 1), dtype_of(regions)), regions], 1)
    means = op.vision.roi_align(data, placed, size, 1.0, samples, is_aligned, layout="NCHW", mode="avg")
    if samples or not is_aligned:
        return means
    # The number of samples follows the region's size: for an empty region TVM computes 0 / 0, ONNX defines 0.
    left, top, right, bottom = (op.strided_slice(regions, [1], [side], [side + 1]) for side in range(4))
    is_empty = op.logical_or(op.less_equal(right, left), op.less_equal(bottom, top))
    return op.where(op.expand_dims(is_empty, [2, 3]), 0, means)


def in_float32(convert: Conversion) -> Conversion:
    """Return a conversion that computes half precision in float32, as onnxruntime does, and converts results back."""

    def converted(op: Operators, call: OnnxCall) -> Any:
        is_half = [value is not None and wide(dtype_of(value)) != dtype_of(value) for value in call.operands]
        if not any(is_half):
            return convert(op, call)
        dtype = dtype_of(call.operands[is_half.index(True)])
        operands = onnx_frontend.onnx_input()
        operands.extend(
            op.cast(value, "float32") if half else value for value, half in zip(call.operands, is_half, strict=True)
        )
        result = convert(op, replace(call, operands=operands))
        result = op.builder.emit(result) if isinstance(result, relax.Expr) else relax.Tuple(list(result))
        results = result.fields if isinstance(result, relax.Tuple) else [result]
        kinds = zip(results, call.operation.results, strict=False)
        return [op.cast(value, getattr(kind, "dtype", "") or dtype) for value, kind in kinds]

    return converted


_OWN: dict[str, Conversion] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"), _padded),
    "BatchNormalization": _batch_norm,
    "BitShift": lambda op, call: compositions.shifted(
        op, call.operands[0], call.operands[1], call["direction"] == b"LEFT"
    ),
    "Clip": _clip,
    "CumSum": _cumsum,
    "Dropout": _dropout,
    # TVM subtracts 1 from exp(x), which loses the digits of a small x.
    "Celu": lambda op, call: compositions.elu(
        op, call.operands[0], call.get("alpha", 1.0), input_scale=1 / call.get("alpha", 1.0)
    ),
    "Elu": lambda op, call: compositions.elu(op, call.operands[0], call.get("alpha", 1.0)),
    "Selu": lambda op, call: compositions.elu(
        op, call.operands[0], call.get("alpha", 1.67326319217681884765625), call.get("gamma", 1.05070102214813232421875)
    ),
    "DynamicQuantizeLinear": _dynamically_quantised,
    "Einsum": lambda op, call: op.einsum(list(call.operands), call["equation"].decode()),  # emit_te
    "IsInf": _is_infinite,
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_normalization,
    # TVM stacks and reduces the inputs, which loses NaN.
    "Max": lambda op, call: reduce(op.maximum, call.operands),
    "Min": lambda op, call: reduce(op.minimum, call.operands),
    "Mod": _modulo,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": lambda op, call: compositions.power(op, call.operands[0], call.operands[1], dtype_of(call.operands[0])),
    "PRelu": _prelu,
    "RMSNormalization": _rms_norm,
    **dict.fromkeys(("Resize", "Upsample"), resize),
    **dict.fromkeys((f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "SumSquare")), _reduced),
    "RoiAlign": _roi_align,
    "Round": lambda op, call: compositions.half_to_even(op, call.operands[0]),
    "SequenceAt": lambda op, call: call.operands[0].fields[call.numbers(1, "position").item()],
    "SequenceInsert": _sequence_insert,
    "Sign": lambda op, call: compositions.sign(op, call.operands[0]),
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Squeeze": _squeeze,
    "Split": _split,
    "SplitToSequence": _split_to_sequence,
    # TVM stacks and reduces the inputs; additions fuse into the operator before them.
    "Sum": lambda op, call: reduce(op.add, call.operands),
    "ThresholdedRelu": lambda op, call: op.where(
        op.greater(call.operands[0], call.get("alpha", 1.0)), call.operands[0], 0
    ),  # TVM's takes float32 only
    "Tile": lambda op, call: op.tile(call.operands[0], call.numbers(1, "number of repeats").tolist()),  # emit_te
    "TopK": _top_k,
}

_IN_FLOAT32 = (
    *(f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Prod", "Sum", "SumSquare")),
    *(f"{kind}Normalization" for kind in ("Batch", "Group", "Instance", "Layer", "Lp", "MeanVariance", "RMS")),
    *("AveragePool", "GlobalAveragePool", "LpPool", "GlobalLpPool", "LRN", "Softmax", "LogSoftmax", "CumSum", "Sum"),
    *("Mean", "Einsum", "Softplus", "Gelu", "Mish", "Elu", "Selu", "HardSwish", "Softsign", "GridSample"),
)
"""Operators of many steps, computed in float32: half precision rounds each step, and squares or sums may overflow."""

CONVERSIONS: dict[str, Conversion] = {
    **_OWN,
    **{name: in_float32(_OWN.get(name, lambda op, call: call.by_tvm())) for name in _IN_FLOAT32},
}
"""Conversions by the operator's name, with its domain if that is not ONNX's."""

_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")

REFUSED: dict[str, str] = {
    **dict.fromkeys(_RANDOM, RANDOM),
    **dict.fromkeys(("NonZero", "Unique", "Compress", "NonMaxSuppression"), DYNAMIC),
    **dict.fromkeys(("Loop", "Scan"), LOOP),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), "its steps are a loop; load the torch module or its .pt2 file instead"),
    "If": BRANCH,
}
"""Operators that are refused, each with the reason."""
