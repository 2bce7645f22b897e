"""Conversions that replace those of TVM's TFLite importer; each docstring says what TVM does wrong or lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from tvm import relax
from tvm.relax.frontend.tflite.tflite_frontend import get_pad_value

from tvm_split.errors import ModelImportError
from tvm_split.frontends.operators import Operators, shape_of

Repair = Callable[["Given"], relax.Expr]


class Given:
    """The argument of a conversion: an operator with its inputs, output and options."""

    def __init__(self, converter: Any, op: Any) -> None:
        self.converter, self._op = converter, op
        self.inputs: Sequence[Any] = converter.get_input_tensors(op)
        (self.output,) = converter.get_output_tensors(op)
        self.op = Operators(converter.bb)

    def expr(self, place: int) -> relax.Expr:
        """An input; a quantised one is dequantised."""
        tensor = self.inputs[place]
        expr = self.converter.get_tensor_expr(tensor)
        return self.op.builder.emit(self.converter.dequantize(expr, tensor)) if tensor.qnn_params else expr

    def raw(self, place: int) -> relax.Expr:
        """An input without dequantisation."""
        return self.converter.get_tensor_expr(self.inputs[place])

    def numbers(self, place: int) -> list[int]:
        """The integers of a constant input, such as axes. Raises ModelImportError if it is not constant."""
        tensor = self.inputs[place]
        if self.converter.has_expr(tensor.tensor_idx):
            raise ModelImportError(f"its input {place} is computed while it runs; it has to be known beforehand")
        return [int(number) for number in np.asarray(self.converter.get_tensor_value(tensor)).reshape(-1)]

    @property
    def shape(self) -> list[int]:
        """The shape of the result."""
        return [int(size) for size in self.converter.get_tensor_shape(self.output)]

    @property
    def dtype(self) -> str:
        return str(self.converter.get_tensor_type_str(self.output.tensor.Type()))

    def option(self, table: str, field: str) -> Any:
        options = self._op.BuiltinOptions()
        if options is None:
            return None
        read = getattr(schema, f"{table}Options")()
        read.Init(options.Bytes, options.Pos)
        return getattr(read, field)()

    def quantized(self, expr: relax.Expr) -> relax.Expr:
        """Quantise the result if the output tensor is quantised."""
        return self.converter.quantize(expr, self.output) if self.output.qnn_params else expr


def _softmax(given: Given) -> relax.Expr:
    """Convert softmax with ``beta``, which TVM ignores."""
    beta = float(given.option("Softmax", "Beta") or 1.0)
    data = given.expr(0)
    return given.quantized(given.op.nn.softmax(data if beta == 1.0 else given.op.multiply(data, beta), axis=-1))


def _gelu(given: Given) -> relax.Expr:
    """Convert GELU; TVM computes the tanh approximation exactly."""
    data = given.expr(0)
    approximates = given.option("Gelu", "Approximate")
    return given.quantized(given.op.nn.gelu_tanh(data) if approximates else given.op.nn.gelu(data))


def _cast(given: Given) -> relax.Expr:
    """Cast to the output's dtype; TVM does nothing if the operator has no options."""
    return given.op.cast(given.raw(0), given.dtype)


def _argument(name: str) -> Repair:
    """Convert argmax or argmin; TVM returns 64-bit indices even for a 32-bit output."""

    def repair(given: Given) -> relax.Expr:
        (axis,) = given.numbers(1)
        return given.op.cast(getattr(given.op, name)(given.raw(0), axis=axis), given.dtype)

    return repair


def _cumulated(given: Given) -> relax.Expr:
    """Convert a cumulative sum; TVM refuses reverse ones."""
    (axis,) = given.numbers(1)
    data = given.expr(0)
    is_reverse = bool(given.option("Cumsum", "Reverse"))
    turned = given.op.flip(data, axis) if is_reverse else data
    total = given.op.cumsum(turned, axis=axis, exclusive=bool(given.option("Cumsum", "Exclusive")))
    return given.quantized(given.op.flip(total, axis) if is_reverse else total)


def _reshaped(given: Given) -> relax.Expr:
    """Reshape to the output's shape; TVM cannot read ``EXPAND_DIMS``, and ignores ``SQUEEZE`` of all axes."""
    return given.op.reshape(given.raw(0), given.shape)


def _mirrored(given: Given) -> relax.Expr:
    """Convert mirror padding; TVM refuses ``SYMMETRIC``, which repeats the border, and quantised tensors."""
    data = given.raw(0)
    widths = np.reshape(given.numbers(1), (-1, 2))
    repeats_border = given.option("MirrorPad", "Mode") == schema.MirrorPadMode.SYMMETRIC
    for axis, (before, after) in enumerate(widths):
        size = shape_of(data)[axis]
        first = np.arange(before - 1, -1, -1) + (not repeats_border)
        last = size - 1 - np.arange(after) - (not repeats_border)
        if before or after:
            places = np.concatenate([first, np.arange(size), last]).astype("int64")
            data = given.op.take(data, relax.const(places), axis=axis)
    return data


def _space_to_batch(given: Given) -> relax.Expr:
    """Compose from reshapes and a transposition; TVM emits a call with non-tensor arguments that does not compile."""
    op, block = given.op, given.numbers(1)
    data, widths = given.raw(0), given.numbers(2)
    count = len(block)
    rest = len(shape_of(data)) - count - 1
    filling = float(given.inputs[0].qnn_params["zero_point"].value.numpy()) if given.inputs[0].qnn_params else 0.0
    if any(widths):
        data = op.nn.pad(data, [0, 0, *widths, *[0, 0] * rest], "constant", filling)
    batch, *space = shape_of(data)
    blocks = [part for size, step in zip(space, block, strict=False) for part in (size // step, step)]
    data = op.reshape(data, [batch, *blocks, *space[count:]])
    inner, outer = range(2, 2 * count + 1, 2), range(1, 2 * count, 2)
    data = op.permute_dims(data, [*inner, 0, *outer, *range(2 * count + 1, 2 * count + 1 + rest)])
    return op.reshape(data, given.shape)


def _batch_to_space(given: Given) -> relax.Expr:
    """Compose the inverse of ``SPACE_TO_BATCH_ND``, for the same reason."""
    op, block = given.op, given.numbers(1)
    data, cuts = given.raw(0), given.numbers(2)
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


def _looked_up(given: Given) -> relax.Expr:
    """Convert an embedding lookup; TVM swaps the table and the indices."""
    return given.op.take(given.raw(1), given.raw(0), axis=0)


def _gathered(given: Given) -> relax.Expr:
    """Gather by flat indices; TVM emits multi-axis indices in an order that cannot be lowered."""
    op, data, indices = given.op, given.raw(0), given.raw(1)
    sizes, lying = shape_of(data), shape_of(indices)
    depth = lying[-1]
    flat = op.reshape(data, [int(np.prod(sizes[:depth])), *sizes[depth:]])
    steps = np.cumprod([1, *sizes[1:depth][::-1]])[::-1].astype("int32").copy()
    place = op.sum(op.multiply(op.cast(indices, "int32"), relax.const(steps)), axis=[-1])
    return op.take(flat, place, axis=0)


def _fully_connected(given: Given) -> relax.Expr:
    """Convert a dense layer; TVM does not flatten inputs of images, or of sequences without ``KeepNumDims``."""
    op, converter = given.op, given.converter
    weight = given.expr(1)
    length = shape_of(weight)[1]
    data = given.expr(0)
    rows = given.shape if given.option("FullyConnected", "KeepNumDims") else [int(np.prod(shape_of(data))) // length]
    data = op.reshape(data, [*(rows[:-1] if len(rows) > 1 else rows), length])
    result = relax.op.matmul(data, relax.op.permute_dims(weight, [1, 0]))
    if len(given.inputs) > 2 and given.inputs[2].tensor_idx != -1:
        result = relax.op.add(converter.bb.normalize(result), _bias(given))
    activation = given.option("FullyConnected", "FusedActivationFunction")
    return given.quantized(converter.convert_fused_activation_function(converter.bb.normalize(result), activation))


def _bias(given: Given) -> relax.Expr:
    """Return the real values of a bias; without own scale, int32 steps are input scale times weight scale."""
    tensor = given.inputs[2]
    if tensor.qnn_params or not given.inputs[0].qnn_params:
        return given.expr(2)
    steps = [given.inputs[place].qnn_params["scale"].value.numpy() for place in (0, 1)]
    return relax.const((given.converter.get_tensor_value(tensor) * (steps[0] * steps[1])).astype("float32"))


def _multiplied(given: Given) -> relax.Expr:
    """Convert a batched product of matrices; TVM refuses quantised ones."""
    left, right = given.expr(0), given.expr(1)
    turned = [given.option("BatchMatMul", name) for name in ("AdjX", "AdjY")]
    rank = len(shape_of(left))
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    factors = [
        given.op.permute_dims(each, swapped) if turn else each for each, turn in zip((left, right), turned, strict=True)
    ]
    return given.quantized(given.op.matmul(*factors))


def _averaged(given: Given) -> relax.Expr:
    """Convert average pooling; TVM truncates integer averages, which TFLite rounds, and needs symmetric padding."""
    data = given.expr(0)
    window = [given.option("Pool2D", name) for name in ("FilterHeight", "FilterWidth")]
    steps = [given.option("Pool2D", name) for name in ("StrideH", "StrideW")]
    padding = [0, 0, 0, 0]
    if given.option("Pool2D", "Padding") == schema.Padding.SAME:
        pairs = [get_pad_value(*each) for each in zip(shape_of(data)[1:3], window, steps, strict=True)]
        padding = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
    result = given.op.nn.avg_pool2d(data, window, steps, padding, layout="NHWC")
    activation = given.option("Pool2D", "FusedActivationFunction")
    return given.quantized(given.converter.convert_fused_activation_function(result, activation))


REPAIRS: dict[str, Repair] = {
    "SOFTMAX": _softmax,
    "GELU": _gelu,
    "CAST": _cast,
    "ARG_MAX": _argument("argmax"),
    "ARG_MIN": _argument("argmin"),
    "CUMSUM": _cumulated,
    "EXPAND_DIMS": _reshaped,
    "SQUEEZE": _reshaped,
    "RESHAPE": _reshaped,
    "MIRROR_PAD": _mirrored,
    "SPACE_TO_BATCH_ND": _space_to_batch,
    "BATCH_TO_SPACE_ND": _batch_to_space,
    "EMBEDDING_LOOKUP": _looked_up,
    "GATHER_ND": _gathered,
    "FULLY_CONNECTED": _fully_connected,
    "BATCH_MATMUL": _multiplied,
    "AVERAGE_POOL_2D": _averaged,
}
"""Conversions by the kind of operator."""
