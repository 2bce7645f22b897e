"""Conversions of onnxruntime's own operators (domain ``com.microsoft``), which its optimiser writes into models.

They are defined in docs/ContribOperators.md of onnxruntime. Others are refused by name.
"""

from collections.abc import Callable, Sequence
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


def _operands(call: OnnxCall, count: int) -> list[Any]:
    """The first operands; None for those that are left out."""
    return [*call.operands, *[None] * count][:count]


def _halves(op: Operators, value: relax.Expr) -> list[relax.Expr]:
    parts = op.split(value, 2, 0)
    return [op.item(parts, place) for place in range(2)]


def _heads(op: Operators, value: relax.Expr, count: int) -> relax.Expr:
    """Return [batch, heads, rows, width] of [batch, rows, heads · width]."""
    batch, rows, width = shape_of(value)
    return op.permute_dims(op.reshape(value, [batch, rows, count, width // count]), [0, 2, 1, 3])


def _attended(
    op: Operators, call: OnnxCall, heads: Sequence[relax.Expr], mask: Any, bias: Any, past: Sequence[Any]
) -> list[relax.Expr]:
    """Return the attention to query, key and value [batch, heads, rows, width] as [batch, rows, width]; key and value.

    Key and value begin with those of the ``past``, if there are any.
    """
    query, *pair = heads
    key, value = (new if old is None else op.concat([old, new], 2) for old, new in zip(past, pair, strict=True))
    (batch, _, rows, _), columns, dtype = shape_of(query), shape_of(key)[2], wide(dtype_of(query))
    biases = [] if bias is None else [op.cast(bias, dtype)]
    if mask is not None:
        hidden = constant(call.get("mask_filter_value", -10000.0), dtype)
        biases.append(op.where(_shown(op, mask, batch, columns), constant(0, dtype), hidden))
    if call.get("unidirectional", 0):
        before = 0 if past[0] is None else shape_of(past[0])[2]
        allowed = np.tril(np.ones((rows, columns), bool), before)
        biases.append(constant(np.where(allowed, 0, -np.inf), dtype))
    result = compositions.attention(op, query, key, value, call.get("scale"), biases)
    return [op.reshape(op.permute_dims(result, [0, 2, 1, 3]), [batch, rows, -1]), key, value]


def _shown(op: Operators, mask: relax.Expr, batch: int, columns: int) -> relax.Expr:
    """Return where a mask shows, [batch, 1, 1 or rows, columns].

    The mask has a number for each column, or each row and column, or the end of the columns of each batch element;
    the beginnings may follow the ends.
    """
    shape, places = shape_of(mask), constant(np.arange(columns), dtype_of(mask))
    if shape in ([batch], [2 * batch]):
        ends, *begins = _halves(op, mask) if shape[0] != batch else [mask]
        shown = op.less(places, op.expand_dims(ends, 1))
        if begins:
            shown = op.logical_and(shown, op.greater_equal(places, op.expand_dims(begins[0], 1)))
    elif len(shape) in (2, 3) and (shape[0], shape[-1]) == (batch, columns):
        shown = op.greater(mask, 0)
    else:
        raise ModelImportError(
            f"its mask has the shape {shape}; [{batch}], [{2 * batch}], [{batch}, {columns}] and "
            f"[{batch}, rows, {columns}] can be imported"
        )
    return op.expand_dims(shown, [1] if len(shape) == 3 else [1, 2])


def _attention(op: Operators, call: OnnxCall) -> list[relax.Expr]:
    # TVM's importer refuses a scale, a past, and masks of lengths or of the future.
    data, weight, bias, mask, past, added = _operands(call, 6)
    _refuse(call, "do_rotary", "past_present_share_buffer")
    sizes = call.get("qkv_hidden_sizes") or [shape_of(weight)[1] // 3] * 3
    product = op.matmul(data, weight)
    parts = compositions.parts(op, product if bias is None else op.add(product, bias), sizes, 2)
    heads = [_heads(op, op.item(parts, place), call["num_heads"]) for place in range(3)]
    olds = [None, None] if past is None else [op.squeeze(part, [0]) for part in _halves(op, past)]
    result, *pair = _attended(op, call, heads, mask, added, olds)
    if not any(call.operation.outputs[1:]):
        return [result]
    return [result, op.concat([op.expand_dims(present, 0) for present in pair], 0)]


def _multi_head_attention(op: Operators, call: OnnxCall) -> list[relax.Expr]:
    *inputs, bias, mask, added, past_key, past_value = _operands(call, 8)
    if any(value is None or len(shape_of(value)) == 5 for value in inputs):
        raise ModelImportError("its key or value is packed into another input; separate them")
    if bias is not None:
        parts = compositions.parts(op, bias, [shape_of(value)[-1] for value in inputs], 0)
        inputs = [op.add(value, op.item(parts, place)) for place, value in enumerate(inputs)]
    heads = [value if len(shape_of(value)) == 4 else _heads(op, value, call["num_heads"]) for value in inputs]
    return _attended(op, call, heads, mask, added, [past_key, past_value])


def _refuse(call: OnnxCall, *names: str) -> None:
    """Raise ModelImportError if one of these attributes is set."""
    for name in names:
        if call.get(name, 0):
            raise ModelImportError(f"its attribute {name} cannot be imported")


def _skip_norm(op: Operators, call: OnnxCall, is_centred: bool) -> list[Any]:
    data, skip, weight, *rest = _operands(call, 5 if is_centred else 4)
    if any(call.operation.outputs[1:3]):
        raise ModelImportError("its mean and deviation cannot be imported, and one of them is read")
    total = reduce(op.add, [data, skip, *(value for value in rest[-1:] if value is not None)])
    epsilon, shape = call.get("epsilon", 1e-12), shape_of(weight)
    if is_centred:
        shift = constant(np.zeros(shape), dtype_of(weight)) if rest[0] is None else rest[0]
        result = op.nn.layer_norm(total, weight, shift, axes=[-1], epsilon=epsilon)
    else:
        result = op.nn.rms_norm(total, weight, axes=[-1], epsilon=epsilon)
    return [result, result, result, total]


def _rms_norm(op: Operators, call: OnnxCall) -> relax.Expr:
    data, weight = call.operands
    axis, rank = call.get("axis", -1), len(shape_of(data))
    return op.nn.rms_norm(data, weight, axes=[*range(axis % rank, rank)], epsilon=call.get("epsilon", 1e-5))


def _fused_matmul(op: Operators, call: OnnxCall) -> relax.Expr:
    _refuse(call, "transBatchA", "transBatchB")
    operands = []
    for value, name in zip(call.operands, ("transA", "transB"), strict=True):
        if call.get(name, 0) and len(shape_of(value)) > 1:
            *outer, rows, columns = range(len(shape_of(value)))
            value = op.permute_dims(value, [*outer, columns, rows])
        operands.append(value)
    return op.multiply(op.matmul(*operands), call.get("alpha", 1.0))


_ACTIVATIONS: dict[str, Callable[..., relax.Expr]] = {
    "": lambda op, x: x,
    "Relu": lambda op, x: op.nn.relu(x),
    "Tanh": lambda op, x: op.tanh(x),
    "Sigmoid": lambda op, x: op.sigmoid(x),
    "LeakyRelu": lambda op, x, slope: op.nn.leakyrelu(x, slope),
    "Clip": lambda op, x, low, high: compositions.limited(op, x, low, high),
    "HardSigmoid": lambda op, x, slope, shift: compositions.limited(op, op.add(op.multiply(x, slope), shift), 0, 1),
}


def _fused(op: Operators, call: OnnxCall, operator: str) -> relax.Expr:
    """Convert ONNX's ``operator``, an addition and an activation."""
    source = onnx.NodeProto()
    source.CopyFrom(call.source)
    source.op_type, source.domain = operator, ""
    *operands, added = _operands(call, 4)
    plain = replace(call, operation=replace(call.operation, kind=operator, source=source), operands=operands)
    convert = CONVERSIONS.get(operator)
    result = op.builder.emit(plain.by_tvm() if convert is None else convert(op, plain))
    result = result if added is None else op.add(result, added)
    single = [call.get(f"activation_{name}") for name in ("alpha", "beta")]
    parameters = call.get("activation_params") or [number for number in single if number is not None]
    name = call.get("activation", b"").decode()
    if name not in _ACTIVATIONS:
        raise ModelImportError(f"its activation {name} cannot be imported")
    return _ACTIVATIONS[name](op, result, *parameters)


def _gelu(op: Operators, call: OnnxCall, operator: str) -> relax.Expr:
    return getattr(op.nn, operator)(reduce(op.add, [value for value in call.operands if value is not None]))


def _quick_gelu(op: Operators, call: OnnxCall) -> relax.Expr:
    (x,) = call.operands
    return op.multiply(x, op.sigmoid(op.multiply(x, call.get("alpha", 1.702))))


_IN_FLOAT32: dict[str, Conversion] = {
    **dict.fromkeys(("Gelu", "BiasGelu"), partial(_gelu, operator="gelu")),
    "FastGelu": partial(_gelu, operator="gelu_tanh"),
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": partial(_skip_norm, is_centred=True),
    "SkipSimplifiedLayerNormalization": partial(_skip_norm, is_centred=False),
    "EmbedLayerNormalization": lambda op, call: call.by_tvm(),
}

MICROSOFT: dict[str, Conversion] = {
    "SimplifiedLayerNormalization": in_float32(_rms_norm),
    **{f"com.microsoft.{name}": in_float32(convert) for name, convert in _IN_FLOAT32.items()},
    "com.microsoft.Attention": _attention,
    "com.microsoft.MultiHeadAttention": _multi_head_attention,
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.FusedConv": partial(_fused, operator="Conv"),
    "com.microsoft.FusedGemm": partial(_fused, operator="Gemm"),
}
"""Conversions by domain and name; the simplified norm is in ONNX's domain."""
