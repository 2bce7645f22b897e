"""What replaces TVM's own import of ONNX operators, and which operators are refused.

TVM's importer makes some operators kernels of its own (by ``emit_te``) where Relax has an operator: such a kernel can
be neither split nor planned. Others are wrong or missing; the comments say which.
``tests/tvm_split/frontends/test_onnx_sweep.py`` compares each with ONNX.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.frontends import onnx_repairs_arithmetic, onnx_repairs_layers
from tvm_split.frontends.onnx_repair_tools import Builder, Repair, cast, constant, dtype_of, known, shape_of


def _clip(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    data = inputs[0]
    low, high = (attributes.get("min"), attributes.get("max")) if opset < 11 else (inputs[1], inputs[2])
    for limit, operator in ((low, relax.op.maximum), (high, relax.op.minimum)):
        if limit is not None:
            bound = limit if isinstance(limit, relax.Expr) else constant(limit, dtype_of(data))
            data = builder.emit(operator(data, bound))
    return data


def _tile(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    return relax.op.tile(inputs[0], [int(count) for count in known(inputs[1], "number of repeats")])


def _einsum(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    return relax.op.einsum(list(inputs), attributes["equation"].decode())


def _pad(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te. Every mode is a choice of rows, one axis after the other.
    data = inputs[0]
    rank = len(shape_of(data))
    if opset < 11:
        pads, value = [int(width) for width in attributes["pads"]], attributes.get("value", 0.0)
    else:
        pads = [int(width) for width in known(inputs[1], "padding")]
        filling = known(inputs[2], "padding value")
        value = 0 if filling is None else filling.item()
    axes = known(inputs[3], "axes") if opset >= 18 else None
    chosen = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    mode = attributes.get("mode", b"constant").decode()
    for position, axis in enumerate(chosen):
        before, after = pads[position], pads[position + len(pads) // 2]
        data = _padded_axis(builder, data, axis, before, after, mode, value)
    return data


def _padded_axis(
    builder: Builder, data: relax.Expr, axis: int, before: int, after: int, mode: str, value: float
) -> relax.Expr:
    size = shape_of(data)[axis]
    if before == after == 0:
        return data
    if mode == "constant":
        if before < 0 or after < 0:
            first, last = max(-before, 0), size - max(-after, 0)
            data = builder.emit(relax.op.strided_slice(data, [axis], [first], [last]))
        parts = [data]
        for width, place in ((before, 0), (after, len(parts) + 1)):
            if width > 0:
                shape = shape_of(data)
                shape[axis] = width
                # TVM's full takes no infinity.
                filled = relax.op.broadcast_to(constant(value, dtype_of(data)), shape)
                parts.insert(place, builder.emit(filled))
        return builder.emit(relax.op.concat(parts, axis)) if len(parts) > 1 else data
    numpy_mode = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}[mode]
    rows = np.arange(size)[max(-before, 0) : size - max(-after, 0)]
    rows = np.pad(rows, (max(before, 0), max(after, 0)), mode=numpy_mode)  # type: ignore[call-overload]
    return builder.emit(relax.op.take(data, relax.const(rows.astype(np.int64), "int64"), axis))


def _split(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's split refuses parts without elements.
    data, axis = inputs[0], int(attributes.get("axis", 0))
    sizes = attributes.get("split") if opset < 13 else known(inputs[1], "list of sizes")
    if sizes is None or 0 not in sizes:
        implementation = onnx_frontend.Split._impl_v1 if opset < 13 else onnx_frontend.Split._impl_v13
        return implementation(builder, inputs, attributes, [{}, {}])
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [
        builder.emit(relax.op.strided_slice(data, [axis], [first], [last])) for first, last in itertools.pairwise(ends)
    ]
    return relax.Tuple(parts)


def _cumsum(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    data, axis = inputs[0], int(known(inputs[1], "axis").item())
    is_reversed = bool(attributes.get("reverse", 0))
    data = builder.emit(relax.op.flip(data, axis)) if is_reversed else data
    total = builder.emit(relax.op.cumsum(data, axis, dtype_of(data), bool(attributes.get("exclusive", 0))))
    return relax.op.flip(total, axis) if is_reversed else total


def _power(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer wants one dtype, its kernel takes floats only and gives NaN for bases below 0.
    base, exponent = inputs[0], inputs[1]
    dtype = dtype_of(base)
    if isinstance(exponent, tvm.ir.GenericConst) and exponent.value.numpy().size == 1:
        number = float(exponent.value.numpy().astype("float64").item())
        if number.is_integer() and 1 <= number <= 16:
            shape = np.broadcast_shapes(tuple(shape_of(base)), exponent.value.numpy().shape)
            result = base
            for _ in range(int(number) - 1):
                result = builder.emit(relax.op.multiply(result, base))
            return result if list(shape) == shape_of(base) else relax.op.broadcast_to(result, list(shape))
        if number == 0.5 and "float" in dtype:
            return relax.op.sqrt(base)
    wide = dtype if "float" in dtype else "float64"
    powers = relax.op.power(cast(builder, base, wide), cast(builder, exponent, wide))
    return powers if wide == dtype else cast(builder, builder.emit(relax.op.round(builder.emit(powers))), dtype)


def _one_hot(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's result is float64 whatever the values' dtype; negative indices count from the end.
    depth = int(np.asarray(known(inputs[1], "depth")).item())
    off, on = known(inputs[2], "values")
    dtype = dtype_of(inputs[2])
    rank = len(shape_of(inputs[0]))
    axis = int(attributes.get("axis", -1)) % (rank + 1)
    indices = builder.emit(relax.op.expand_dims(cast(builder, inputs[0], "int64"), axis))
    is_negative = builder.emit(relax.op.less(indices, constant(0, "int64")))
    shifted = builder.emit(relax.op.add(indices, constant(depth, "int64")))
    indices = builder.emit(relax.op.where(is_negative, shifted, indices))
    classes = np.arange(depth).reshape([depth if place == axis else 1 for place in range(rank + 1)])
    is_class = builder.emit(relax.op.equal(indices, relax.const(classes, "int64")))
    return relax.op.where(is_class, constant(on, dtype), constant(off, dtype))


def _lp_normalization(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # Missing in TVM.
    data, axis, order = inputs[0], int(attributes.get("axis", -1)), int(attributes.get("p", 2))
    if order == 1:
        size = builder.emit(relax.op.sum(builder.emit(relax.op.abs(data)), [axis], keepdims=True))
    else:
        squares = builder.emit(relax.op.multiply(data, data))
        size = builder.emit(relax.op.sqrt(builder.emit(relax.op.sum(squares, [axis], keepdims=True))))
    quotient = builder.emit(relax.op.divide(data, size))
    is_zero = builder.emit(relax.op.equal(size, constant(0, dtype_of(data))))
    return relax.op.where(is_zero, constant(0, dtype_of(data)), quotient)


def _upsample(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer looks for the sizes of a newer operator.
    scales = attributes.get("scales") if opset < 9 else known(inputs[1], "scales")
    given = onnx_frontend.onnx_input()
    given.extend([inputs[0], None, relax.const(np.asarray(scales, np.float32), "float32"), None])
    options = {
        "mode": attributes.get("mode", b"nearest"),
        "coordinate_transformation_mode": b"asymmetric",
        "nearest_mode": b"floor",
    }
    return onnx_frontend.Resize._impl_v18(builder, given, options, [{}, {}])


def _round(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM rounds halves away from zero; ONNX rounds them to even.
    data = inputs[0]
    dtype = dtype_of(data)
    below = builder.emit(relax.op.floor(data))
    rest = builder.emit(relax.op.subtract(data, below))
    halved = builder.emit(relax.op.multiply(below, constant(0.5, dtype)))
    is_odd = relax.op.not_equal(relax.op.floor(halved), halved)
    is_half = relax.op.equal(rest, constant(0.5, dtype))
    up = relax.op.logical_or(relax.op.greater(rest, constant(0.5, dtype)), relax.op.logical_and(is_half, is_odd))
    return relax.op.add(below, relax.op.astype(builder.emit(up), dtype))


REPAIRS: dict[str, Repair] = {
    **onnx_repairs_arithmetic.REPAIRS,
    **onnx_repairs_layers.REPAIRS,
    "Clip": _clip,
    "Tile": _tile,
    "Einsum": _einsum,
    "Pad": _pad,
    "Split": _split,
    "CumSum": _cumsum,
    "Pow": _power,
    "OneHot": _one_hot,
    "LpNormalization": _lp_normalization,
    "Upsample": _upsample,
    "Round": _round,
}
"""By the operator's name, with its domain if it is not ONNX's own."""

_RANDOM = "its result is random; a split network gives the same answer to the same input"
_DYNAMIC = "the shape of its result depends on the values of its input"
_LOOP = "it loops while it runs"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"), _RANDOM
    ),
    **dict.fromkeys(("NonZero", "Unique", "Compress", "NonMaxSuppression"), _DYNAMIC),
    **dict.fromkeys(("Loop", "Scan"), _LOOP),
    "If": "it chooses what to compute while it runs",
}
"""Operator name to the reason."""
