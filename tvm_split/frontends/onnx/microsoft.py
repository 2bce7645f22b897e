"""Conversions of onnxruntime's own operators (domain ``com.microsoft``), which its optimiser writes into models.

They are defined in docs/ContribOperators.md of onnxruntime. Others are refused by name.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.onnx.conversions import CONVERSIONS, OnnxCall, in_float32
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of, wide


def operands_of(call: OnnxCall, count: int) -> list[Any]:
    """The first ``count`` operands; None for those that are left out."""
    return [*call.operands, *[None] * count][:count]


def _heads(op: Operators, value: relax.Expr, count: int) -> relax.Expr:
    """Return [batch, heads, rows, width] of [batch, rows, heads · width]."""
    batch, rows, width = shape_of(value)
    return op.permute_dims(op.reshape(value, [batch, rows, count, width // count]), [0, 2, 1, 3])


def by_onnx(op: Operators, call: OnnxCall, operator: str, operands: Sequence[Any], **attributes: Any) -> relax.Expr:
    """Convert a call of ONNX's ``operator`` with these operands; attributes are added to those of ``call``."""
    operation = replace(call.operation, kind=operator, source=onnx.NodeProto(op_type=operator))
    plain = replace(call, operation=operation, operands=operands, attributes={**call.attributes, **attributes})
    convert = CONVERSIONS.get(operator)
    result = plain.by_tvm() if convert is None else convert(op, plain)
    return op.builder.emit(result if isinstance(result, relax.Expr) else result[0])


def _attended(
    op: Operators, call: OnnxCall, heads: Sequence[relax.Expr], mask: Any, bias: Any, past: Sequence[Any]
) -> list[relax.Expr]:
    """Return attention's result [batch, rows, heads · width], the keys and the values.

    ``heads`` are query, key and value [batch, heads, rows, width]. The returned keys and values begin with those of the
    ``past``, if there are any.
    """
    query, *pair = heads
    key, value = (new if old is None else op.concat([old, new], 2) for old, new in zip(past, pair, strict=True))
    (batch, _, rows, _), columns, dtype = shape_of(query), shape_of(key)[2], wide(dtype_of(query))
    biases = [] if bias is None else [op.cast(bias, dtype)]
    if mask is not None and shape_of(mask)[1:] != [1]:  # onnxruntime takes a single column as no mask
        hidden = constant(call.get("mask_filter_value", -10000.0), dtype)
        biases.append(op.where(_shown(op, mask, batch, columns), constant(0, dtype), hidden))
    if call.get("unidirectional", 0):
        before = 0 if past[0] is None else shape_of(past[0])[2]
        allowed = np.tril(np.ones((rows, columns), bool), before)
        allowed[-1] = True  # as in onnxruntime, also if there are more columns than rows
        biases.append(constant(np.where(allowed, 0, -np.inf), dtype))
    result = compositions.attention(op, query, key, value, call.get("scale"), biases)
    return [op.reshape(op.permute_dims(result, [0, 2, 1, 3]), [batch, rows, -1]), key, value]


def _shown(op: Operators, mask: relax.Expr, batch: int, columns: int) -> relax.Expr:
    """Return whether attention may read each column by ``mask``: bool [batch, 1, 1 or rows, columns].

    The mask has a number for each column, or each row and column (0: hidden), or the end of the columns of each batch
    element. After the ends it may have the beginnings, or lengths that onnxruntime ignores.
    """
    shape, places = shape_of(mask), constant(np.arange(columns), dtype_of(mask))
    if shape in ([batch], [2 * batch], [3 * batch + 2]):
        shown = op.less(places, op.expand_dims(op.strided_slice(mask, [0], [0], [batch]), 1))
        if shape == [2 * batch]:
            begins = op.strided_slice(mask, [0], [batch], [2 * batch])
            shown = op.logical_and(shown, op.greater_equal(places, op.expand_dims(begins, 1)))
    elif len(shape) in (2, 3) and (shape[0], shape[-1]) == (batch, columns):
        shown = op.greater(mask, 0)
    else:
        raise ModelImportError(
            f"its mask has the shape {shape}; [{batch}], [{2 * batch}], [{3 * batch + 2}], [{batch}, 1], "
            f"[{batch}, {columns}] and [{batch}, rows, {columns}] can be imported"
        )
    return op.expand_dims(shown, [1] if len(shape) == 3 else [1, 2])


def _attention(op: Operators, call: OnnxCall) -> list[relax.Expr]:
    # TVM's importer refuses a scale, a past, and masks of lengths or of the future.
    data, weight, bias, mask, past, added = operands_of(call, 6)
    for name in ("do_rotary", "past_present_share_buffer"):
        if call.get(name, 0):
            raise ModelImportError(f"its attribute {name} cannot be imported")
    sizes = call.get("qkv_hidden_sizes") or [shape_of(weight)[1] // 3] * 3
    product = op.matmul(data, weight)
    parts = compositions.parts(op, product if bias is None else op.add(product, bias), sizes, 2)
    heads = [_heads(op, op.item(parts, place), call["num_heads"]) for place in range(3)]
    olds = [None, None] if past is None else [op.take(past, constant(place, "int64"), 0) for place in (0, 1)]
    result, *pair = _attended(op, call, heads, mask, added, olds)
    if not any(call.operation.outputs[1:]):
        return [result]
    return [result, op.concat([op.expand_dims(present, 0) for present in pair], 0)]


def _multi_head_attention(op: Operators, call: OnnxCall) -> list[relax.Expr]:
    *inputs, bias, mask, added, past_key, past_value = operands_of(call, 8)
    if any(value is None or len(shape_of(value)) == 5 for value in inputs):
        raise ModelImportError("its key or value is packed into another input; separate them")
    if bias is not None:
        widths = [shape_of(value)[-1] * (call["num_heads"] if len(shape_of(value)) == 4 else 1) for value in inputs]
        if [sum(widths)] != shape_of(bias):
            raise ModelImportError(f"its bias has the shape {shape_of(bias)}, not [{sum(widths)}]")
        parts = compositions.parts(op, bias, widths, 0)
        # Keys and values that have heads already have their bias too.
        inputs = [
            op.add(value, op.item(parts, place)) if len(shape_of(value)) == 3 else value
            for place, value in enumerate(inputs)
        ]
    heads = [value if len(shape_of(value)) == 4 else _heads(op, value, call["num_heads"]) for value in inputs]
    return _attended(op, call, heads, mask, added, [past_key, past_value])


def _skip_norm(op: Operators, call: OnnxCall, operator: str) -> list[Any]:
    is_centred = operator == "LayerNormalization"
    data, skip, weight, *rest = operands_of(call, 5 if is_centred else 4)
    if any(call.operation.outputs[1:3]):
        raise ModelImportError("its mean and deviation cannot be imported, and one of them is read")
    total = reduce(op.add, [data, skip, *(value for value in rest[-1:] if value is not None)])
    weights = [weight, rest[0]] if is_centred else [weight]
    result = by_onnx(op, call, operator, [total, *weights], epsilon=call.get("epsilon", 1e-12))
    return [result, result, result, total]


def _embed_norm(op: Operators, call: OnnxCall) -> list[relax.Expr]:
    result, counts = call.by_tvm().fields
    return [result, counts, result.args[0]]


def _fused_matmul(op: Operators, call: OnnxCall) -> relax.Expr:
    operands = []
    for value, name in zip(call.operands, "AB", strict=True):
        axes = [*range(len(shape_of(value)))]
        if len(axes) > 1 and call.get(f"transBatch{name}", 0):
            axes.insert(-1, axes.pop(0))
        if len(axes) > 1 and call.get(f"trans{name}", 0):
            axes.append(axes.pop(-2))
        operands.append(op.transposed(value, axes))
    return op.multiply(op.matmul(*operands), call.get("alpha", 1.0))


_ACTIVATIONS = ("Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "HardSwish", "Softplus", "Softsign")


def _fused(op: Operators, call: OnnxCall, operator: str) -> relax.Expr:
    """Convert ONNX's ``operator`` together with the addition and the activation that are fused with it."""
    *operands, added = operands_of(call, 4)
    result = by_onnx(op, call, operator, operands)
    result = result if added is None else op.add(result, added)
    parameters = call.get("activation_params") or [call.get(f"activation_{name}") for name in ("alpha", "beta")]
    name = call.get("activation", b"").decode()
    if name == "Clip":
        return compositions.limited(op, result, *parameters)
    if name and name not in _ACTIVATIONS:
        raise ModelImportError(f"its activation {name} cannot be imported")
    numbers = zip(("alpha", "beta"), parameters, strict=False)
    attributes = {name: number for name, number in numbers if number is not None}
    return by_onnx(op, replace(call, attributes=attributes), name, [result]) if name else result


def _gelu(op: Operators, call: OnnxCall, operator: str) -> relax.Expr:
    return getattr(op.nn, operator)(reduce(op.add, [value for value in call.operands if value is not None]))


_IN_FLOAT32: dict[str, Conversion] = {
    **dict.fromkeys(("Gelu", "BiasGelu"), partial(_gelu, operator="gelu")),
    "FastGelu": partial(_gelu, operator="gelu_tanh"),
    "QuickGelu": lambda op, call: op.multiply(
        call.operands[0], op.sigmoid(op.multiply(call.operands[0], call.get("alpha", 1.702)))
    ),
    "SkipLayerNormalization": partial(_skip_norm, operator="LayerNormalization"),
    "SkipSimplifiedLayerNormalization": partial(_skip_norm, operator="RMSNormalization"),
}

MICROSOFT: dict[str, Conversion] = {
    "SimplifiedLayerNormalization": lambda op, call: by_onnx(op, call, "RMSNormalization", call.operands),
    **{f"com.microsoft.{name}": in_float32(convert) for name, convert in _IN_FLOAT32.items()},
    "com.microsoft.Attention": _attention,
    "com.microsoft.MultiHeadAttention": _multi_head_attention,
    "com.microsoft.EmbedLayerNormalization": _embed_norm,
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.FusedConv": partial(_fused, operator="Conv"),
    "com.microsoft.FusedGemm": partial(_fused, operator="Gemm"),
}
"""Conversions by domain and name; the simplified norm is in ONNX's domain."""
