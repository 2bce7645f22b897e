"""What replaces TVM's own import of ONNX operators, and which operators are refused.

TVM's importer makes some operators kernels of its own (by ``emit_te``) where Relax has an operator: such a kernel can
be neither split nor planned. Others are wrong or missing; the comments say which.
``tests/tvm_split/frontends/test_onnx_sweep.py`` compares each with ONNX.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.errors import ModelImportError
from tvm_split.frontends import common_repairs as common
from tvm_split.frontends.importing import BRANCH, DYNAMIC, LOOP, RANDOM
from tvm_split.frontends.onnx_repairs_layers import (
    Repair,
    batch_norm,
    by_tvm,
    padded,
    resize,
    rms_norm,
    roi_align,
    space_to_depth,
)
from tvm_split.frontends.operators import Operators, constant, dtype_of, numbers_of, shape_of


def _known(value: relax.Expr | None, what: str) -> Any:
    """The numbers of a constant input, or None if it is left out."""
    numbers = numbers_of(value)
    if value is not None and numbers is None:
        raise ModelImportError(f"its {what} is computed while the network runs; it has to be a constant")
    return numbers


def _clip(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    low, high = (attributes.get("min"), attributes.get("max")) if opset < 11 else (inputs[1], inputs[2])
    return common.limited(op, inputs[0], low, high)


def _pad(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te. Every mode is a choice of rows, one axis after the other.
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
        padded = np.pad(rows, widths, mode=mode)  # type: ignore[call-overload]  # ONNX calls them as numpy does
        return op.take(data, constant(padded, "int64"), axis)
    if before < 0 or after < 0:
        data = op.strided_slice(data, [axis], [max(-before, 0)], [size - max(-after, 0)])
    # TVM's full takes no infinity.
    shapes = [[width if place == axis else each for place, each in enumerate(shape_of(data))] for width in widths]
    filling = constant(np.reshape(value, ()), dtype_of(data))
    first, last = ([op.broadcast_to(filling, shape)] if shape[axis] else [] for shape in shapes)
    return op.concat([*first, data, *last], axis) if first or last else data


def _slice(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer knows no ends among the attributes.
    if opset < 10:
        bounds = attributes["starts"], attributes["ends"], attributes.get("axes", range(len(attributes["starts"])))
        inputs.extend(constant(list(each), "int64") for each in bounds)
    return by_tvm("Slice", op, inputs, attributes, opset)


def _split(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    axis = attributes.get("axis", 0)
    sizes = attributes.get("split") if opset < 13 else _known(inputs[1], "list of sizes")
    if sizes is None:
        return op.split(inputs[0], attributes["tvm_custom"]["num_outputs"], axis)
    return common.parts(op, inputs[0], list(sizes), axis)


def _cumsum(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # emit_te
    data, axis = inputs[0], _known(inputs[1], "axis").item()
    is_reversed = attributes.get("reverse", 0)
    data = op.flip(data, axis) if is_reversed else data
    total = op.cumsum(data, axis, dtype_of(data), bool(attributes.get("exclusive", 0)))
    return op.flip(total, axis) if is_reversed else total


def _one_hot(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's result is float64 whatever the values' dtype; negative indices count from the end.
    depth, (off, on) = _known(inputs[1], "depth").item(), _known(inputs[2], "values")
    dtype, rank = dtype_of(inputs[2]), len(shape_of(inputs[0]))
    axis = attributes.get("axis", -1) % (rank + 1)
    indices = common.counted_from_front(op, op.expand_dims(inputs[0], axis), depth)
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
    # TVM's importer looks for the sizes of a newer operator.
    scales = attributes.get("scales") if opset < 9 else _known(inputs[1], "scales")
    given = onnx_frontend.onnx_input()
    given.extend([inputs[0], None, constant(scales, "float32"), None])
    options = {
        "mode": attributes.get("mode", b"nearest"),
        "coordinate_transformation_mode": b"asymmetric",
        "nearest_mode": b"floor",
    }
    return by_tvm("Resize", op, given, options, 18)


def _is_infinite(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer ignores both attributes.
    above, below = attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)
    if above and below:
        return common.is_infinite(op, inputs[0])
    if above or below:
        return op.equal(inputs[0], math.inf if above else -math.inf)
    return op.less(op.abs(inputs[0]), 0)


def _modulo(op: Operators, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    left, right = inputs
    return op.mod(left, right) if attributes.get("fmod", 0) else common.floor_remainder(op, left, right)


REPAIRS: dict[str, Repair] = {
    **{name: padded(name) for name in ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool")},
    "BatchNormalization": batch_norm,
    "BitShift": lambda op, given, named, _: common.shifted(op, given[0], given[1], named["direction"] == b"LEFT"),
    "Clip": _clip,
    "CumSum": _cumsum,
    "Einsum": lambda op, inputs, attributes, _: op.einsum(list(inputs), attributes["equation"].decode()),  # emit_te
    "IsInf": _is_infinite,
    "LpNormalization": _lp_normalization,
    "Mod": _modulo,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": lambda op, inputs, *_: common.power(op, inputs[0], inputs[1], dtype_of(inputs[0])),
    "RMSNormalization": rms_norm,
    "Resize": resize,
    "RoiAlign": roi_align,
    "Round": lambda op, inputs, *_: common.half_to_even(op, inputs[0]),
    "Slice": _slice,
    "SpaceToDepth": space_to_depth,
    "Split": _split,
    "Tile": lambda op, inputs, *_: op.tile(inputs[0], _known(inputs[1], "number of repeats").tolist()),  # emit_te
    "Upsample": _upsample,
}
"""By the operator's name, with its domain if it is not ONNX's own."""

_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")

REFUSED: dict[str, str] = {
    **dict.fromkeys(_RANDOM, RANDOM),
    **dict.fromkeys(("NonZero", "Unique", "Compress", "NonMaxSuppression"), DYNAMIC),
    **dict.fromkeys(("Loop", "Scan"), LOOP),
    "If": BRANCH,
}
"""Operator name to the reason."""
