"""Conversions that replace those of TVM's TFLite importer; docstrings and comments say what TVM does wrong or lacks."""

import math
from functools import partial
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from tvm import relax
from tvm.relax.frontend.tflite.tflite_frontend import get_pad_value

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.convert import Call, Conversion
from tvm_split.frontends.operators import Operators, constant, shape_of


class TfliteCall(Call):
    """An operator; attributes are its options. Its inputs are tensors of TVM's importer, not expressions."""

    @property
    def inputs(self) -> Any:
        return self.importer.tvm.get_input_tensors(self.source[0])

    def expr(self, place: int) -> relax.Expr:
        """An input; a quantised one is dequantised."""
        tensor, expr = self.inputs[place], self.raw(place)
        return self.importer.builder.emit(self.importer.tvm.dequantize(expr, tensor)) if tensor.qnn_params else expr

    def raw(self, place: int) -> relax.Expr:
        """An input without dequantisation."""
        return self.importer.tvm.get_tensor_expr(self.inputs[place])

    def integers(self, place: int) -> list[int]:
        """The integers of a constant input, such as axes. Raises ModelImportError if it is not constant."""
        tensor = self.inputs[place]
        if self.importer.tvm.has_expr(tensor.tensor_idx):
            raise ModelImportError(f"its input {place} is computed while it runs; it has to be known beforehand")
        return [int(number) for number in np.asarray(self.importer.tvm.get_tensor_value(tensor)).reshape(-1)]

    def activated(self, expr: relax.Expr) -> relax.Expr:
        """Apply the fused activation, and quantise the result if the output tensor is quantised."""
        activation = self["fusedActivationFunction"]
        return self.quantized(self.importer.tvm.convert_fused_activation_function(expr, activation))

    def quantized(self, expr: relax.Expr) -> relax.Expr:
        """Quantise the result if the output tensor is quantised."""
        (output,) = self.importer.tvm.get_output_tensors(self.source[0])
        return self.importer.tvm.quantize(expr, output) if output.qnn_params else expr


def _softmax(op: Operators, call: TfliteCall) -> relax.Expr:
    """Convert softmax with ``beta``, which TVM ignores."""
    beta = float(call.get("beta") or 1.0)
    data = call.expr(0)
    return call.quantized(op.nn.softmax(data if beta == 1.0 else op.multiply(data, beta), axis=-1))


def _gelu(op: Operators, call: TfliteCall) -> relax.Expr:
    """Convert GELU; TVM computes the exact function instead of the approximation by tanh."""
    data = call.expr(0)
    return call.quantized(op.nn.gelu_tanh(data) if call["approximate"] else op.nn.gelu(data))


def _argument(op: Operators, call: TfliteCall, name: str) -> relax.Expr:
    """Convert argmax or argmin; TVM returns 64-bit indices even for a 32-bit output."""
    (axis,) = call.integers(1)
    return op.cast(getattr(op, name)(call.raw(0), axis=axis), call.dtype)


def _cumulated(op: Operators, call: TfliteCall) -> relax.Expr:
    """Convert a cumulative sum; TVM refuses reverse ones."""
    (axis,) = call.integers(1)
    total = compositions.cumulative_sum(op, call.expr(0), axis, bool(call["exclusive"]), bool(call["reverse"]))
    return call.quantized(total)


def _mirrored(op: Operators, call: TfliteCall) -> relax.Expr:
    """Convert mirror padding; TVM refuses ``SYMMETRIC``, which repeats the border, and quantised tensors."""
    data, widths = call.raw(0), call.integers(1)
    mode = "symmetric" if call["mode"] == schema.MirrorPadMode.SYMMETRIC else "reflect"
    for axis, pair in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        data = compositions.padded_with_rows(op, data, axis, pair, mode)
    return data


def _space_to_batch(op: Operators, call: TfliteCall) -> relax.Expr:
    """Compose from reshapes and a transposition; TVM emits a call with non-tensor arguments that does not compile."""
    block = call.integers(1)
    data, widths = call.raw(0), call.integers(2)
    count = len(block)
    rest = len(shape_of(data)) - count - 1
    filling = float(call.inputs[0].qnn_params["zero_point"].value.numpy()) if call.inputs[0].qnn_params else 0.0
    if any(widths):
        data = op.nn.pad(data, [0, 0, *widths, *[0, 0] * rest], "constant", filling)
    batch, *space = shape_of(data)
    blocks = [part for size, step in zip(space, block, strict=False) for part in (size // step, step)]
    data = op.reshape(data, [batch, *blocks, *space[count:]])
    inner, outer = range(2, 2 * count + 1, 2), range(1, 2 * count, 2)
    data = op.permute_dims(data, [*inner, 0, *outer, *range(2 * count + 1, 2 * count + 1 + rest)])
    return op.reshape(data, call.shape)


def _batch_to_space(op: Operators, call: TfliteCall) -> relax.Expr:
    """Compose the inverse of ``SPACE_TO_BATCH_ND``, for the same reason."""
    block = call.integers(1)
    data, cuts = call.raw(0), call.integers(2)
    count = len(block)
    batch, *space = shape_of(data)
    rest = len(space) - count
    batch //= int(np.prod(block))
    data = op.reshape(data, [*block, batch, *space])
    axes = [axis for place in range(count) for axis in (count + 1 + place, place)]
    data = op.permute_dims(data, [count, *axes, *range(2 * count + 1, 2 * count + 1 + rest)])
    data = op.reshape(data, [batch, *(size * step for size, step in zip(space, block, strict=False)), *space[count:]])
    if any(cuts):
        sizes = shape_of(data)[1 : count + 1]
        ends = [size - after for size, after in zip(sizes, cuts[1::2], strict=True)]
        data = op.strided_slice(data, list(range(1, count + 1)), cuts[::2], ends)
    return data


def _gathered(op: Operators, call: TfliteCall) -> relax.Expr:
    """Gather by flat indices; TVM emits multi-axis indices in an order that cannot be lowered."""
    data, indices = call.raw(0), call.raw(1)
    sizes, depth = shape_of(data), shape_of(indices)[-1]
    flat = op.reshape(data, [math.prod(sizes[:depth]), *sizes[depth:]])
    return op.take(flat, compositions.flat_index(op, op.cast(indices, "int32"), compositions.strides(sizes[:depth])), 0)


def _fully_connected(op: Operators, call: TfliteCall) -> relax.Expr:
    """Convert a dense layer; TVM does not flatten inputs of images, or of sequences without ``KeepNumDims``."""
    data, weight = call.expr(0), call.expr(1)
    length = shape_of(weight)[1]
    rows = call.shape[:-1] if call["keepNumDims"] and len(call.shape) > 1 else [math.prod(shape_of(data)) // length]
    result = op.matmul(op.reshape(data, [*rows, length]), op.permute_dims(weight, [1, 0]))
    has_bias = len(call.inputs) > 2 and call.inputs[2].tensor_idx != -1
    return call.activated(relax.op.add(result, _bias(call)) if has_bias else result)


def _bias(call: TfliteCall) -> relax.Expr:
    """Return the real values of a bias; an int32 bias without a scale has input scale times weight scale."""
    tensor = call.inputs[2]
    if tensor.qnn_params or not call.inputs[0].qnn_params:
        return call.expr(2)
    steps = [call.inputs[place].qnn_params["scale"].value.numpy() for place in (0, 1)]
    return constant(call.importer.tvm.get_tensor_value(tensor) * (steps[0] * steps[1]), "float32")


def _multiplied(op: Operators, call: TfliteCall) -> relax.Expr:
    """Convert a batched product of matrices; TVM refuses quantised ones."""
    left, right = call.expr(0), call.expr(1)
    rank = len(shape_of(left))
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    left = op.permute_dims(left, swapped) if call["adjX"] else left
    right = op.permute_dims(right, swapped) if call["adjY"] else right
    return call.quantized(op.matmul(left, right))


def _averaged(op: Operators, call: TfliteCall) -> relax.Expr:
    """Convert average pooling; TVM truncates integer averages, which TFLite rounds, and needs symmetric padding."""
    data = call.expr(0)
    window = [call[name] for name in ("filterHeight", "filterWidth")]
    steps = [call[name] for name in ("strideH", "strideW")]
    padding = [0, 0, 0, 0]
    if call["padding"] == schema.Padding.SAME:
        pairs = [get_pad_value(*axis_sizes) for axis_sizes in zip(shape_of(data)[1:3], window, steps, strict=True)]
        padding = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
    return call.activated(op.nn.avg_pool2d(data, window, steps, padding, layout="NHWC"))


CONVERSIONS: dict[str, Conversion] = {
    "SOFTMAX": _softmax,
    "GELU": _gelu,
    # TVM does nothing if the operator has no options.
    "CAST": lambda op, call: op.cast(call.raw(0), call.dtype),
    "ARG_MAX": partial(_argument, name="argmax"),
    "ARG_MIN": partial(_argument, name="argmin"),
    "CUMSUM": _cumulated,
    # TVM cannot read EXPAND_DIMS, and ignores SQUEEZE of all axes.
    **dict.fromkeys(("EXPAND_DIMS", "SQUEEZE"), lambda op, call: op.reshape(call.raw(0), call.shape)),
    "MIRROR_PAD": _mirrored,
    "SPACE_TO_BATCH_ND": _space_to_batch,
    "BATCH_TO_SPACE_ND": _batch_to_space,
    # TVM swaps the table and the indices.
    "EMBEDDING_LOOKUP": lambda op, call: op.take(call.raw(1), call.raw(0), axis=0),
    "GATHER_ND": _gathered,
    "FULLY_CONNECTED": _fully_connected,
    "BATCH_MATMUL": _multiplied,
    "AVERAGE_POOL_2D": _averaged,
}
"""Conversions by the kind of operator."""
