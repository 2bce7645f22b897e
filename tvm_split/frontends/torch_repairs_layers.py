"""Repairs of layers: convolutions, products of matrices, norms, attention, pools, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import fx
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.torch_repair_tools import (
    Importer,
    Repair,
    arguments,
    cast,
    constant,
    dtype_name,
    dtype_of,
    emit,
    result_dtype,
    result_shape,
    shape_of,
)

_CONVOLUTIONS = {
    1: (relax.op.nn.conv1d, "NCW", "OIW"),
    2: (relax.op.nn.conv2d, "NCHW", "OIHW"),
    3: (relax.op.nn.conv3d, "NCDHW", "OIDHW"),
}
_TRANSPOSED = {
    1: (relax.op.nn.conv1d_transpose, "NCW", "IOW"),
    2: (relax.op.nn.conv2d_transpose, "NCHW", "IOHW"),
    3: (relax.op.nn.conv3d_transpose, "NCDHW", "IODHW"),
}


def _each(value: Any, count: int) -> list[int]:
    """Torch writes one number for all axes, or one for each."""
    numbers = [value] if isinstance(value, int) else list(value)
    return [int(number) for number in (numbers * count if len(numbers) == 1 else numbers)]


def _convolution(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer fixes the result to float32, knows no padding="same", and takes no inputs without a batch.
    values = arguments(node, importer)
    data, weight, bias = values["input"], values["weight"], values["bias"]
    axes = len(shape_of(weight)) - 2
    stride, dilation = _each(values["stride"], axes), _each(values["dilation"], axes)
    transposed = bool(values.get("transposed", False))
    is_single = len(shape_of(data)) == axes + 1
    if is_single:
        data = emit(importer, relax.op.expand_dims(data, 0))
    if isinstance(values["padding"], str):
        data, padding = _padded_by_name(importer, data, shape_of(weight)[2:], dilation, values["padding"])
    else:
        padding = _each(values["padding"], axes)
    common = {"strides": stride, "padding": padding * 2, "dilation": dilation, "groups": int(values["groups"])}
    if transposed:
        operator, data_layout, weight_layout = _TRANSPOSED[axes]
        common["output_padding"] = _each(values["output_padding"], axes)
    else:
        operator, data_layout, weight_layout = _CONVOLUTIONS[axes]
    result = emit(importer, operator(data, weight, **common, data_layout=data_layout, kernel_layout=weight_layout))
    if bias is not None:
        shaped = emit(importer, relax.op.reshape(bias, [1, -1] + [1] * axes))
        result = emit(importer, relax.op.add(result, shaped))
    return emit(importer, relax.op.squeeze(result, [0])) if is_single else result


def _padded_by_name(
    importer: Importer, data: relax.Expr, kernel: Sequence[int], dilation: Sequence[int], padding: str
) -> tuple[relax.Expr, list[int]]:
    if padding == "valid":
        return data, [0] * len(kernel)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if all(total % 2 == 0 for total in totals):
        return data, [total // 2 for total in totals]
    pairs = [side for total in totals for side in (total // 2, total - total // 2)]
    return emit(importer, relax.op.nn.pad(data, [0, 0, 0, 0, *pairs])), [0] * len(kernel)


def _matmul(left_name: str, right_name: str) -> Repair:
    # TVM's importer fixes the result to float32.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        values = arguments(node, importer)
        return _product(importer, values[left_name], values[right_name])

    return convert


def _product(importer: Importer, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    if len(shape_of(left)) == len(shape_of(right)) == 1:
        return emit(importer, relax.op.sum(emit(importer, relax.op.multiply(left, right))))
    return emit(importer, relax.op.matmul(left, right))


def _product_and_sum(left_name: str, right_name: str) -> Repair:
    # TVM's importer fixes the result to float32.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        values = arguments(node, importer)
        dtype = result_dtype(node)
        product = _scaled(importer, _product(importer, values[left_name], values[right_name]), values["alpha"], dtype)
        if values["beta"] == 0:
            return product
        return emit(importer, relax.op.add(product, _scaled(importer, values["self"], values["beta"], dtype)))

    return convert


def _scaled(importer: Importer, value: relax.Expr, factor: float, dtype: str) -> relax.Expr:
    return value if factor == 1 else emit(importer, relax.op.multiply(value, constant(factor, dtype)))


def _linear(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer fixes the result to float32.
    values = arguments(node, importer)
    weight = emit(importer, relax.op.permute_dims(values["weight"]))
    result = emit(importer, relax.op.matmul(values["input"], weight))
    return result if values["bias"] is None else emit(importer, relax.op.add(result, values["bias"]))


def _attention(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer ignores scale and enable_gqa, takes no boolean mask, and neither three nor five axes.
    values = arguments(node, importer)
    query, key, value = values["query"], values["key"], values["value"]
    if values["dropout_p"]:
        raise ModelImportError(f"it drops out with probability {values['dropout_p']}; call model.eval()")
    if values["enable_gqa"]:
        key, value = _repeated_heads(importer, key, query), _repeated_heads(importer, value, query)
    dtype = result_dtype(node)
    rows, width = shape_of(query)[-2:]
    columns = shape_of(key)[-2]
    scale = 1 / math.sqrt(width) if values["scale"] is None else float(values["scale"])
    order = [*range(len(shape_of(key)) - 2), len(shape_of(key)) - 1, len(shape_of(key)) - 2]
    scores = emit(importer, relax.op.matmul(query, emit(importer, relax.op.permute_dims(key, order))))
    # The softmax of half precision is computed in float32, as torch does.
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    scores = emit(importer, relax.op.multiply(cast(importer, scores, wide), constant(scale, wide)))
    mask, shown = values["attn_mask"], None
    if values["is_causal"]:
        allowed = np.tril(np.ones((rows, columns), bool))
        scores = emit(importer, relax.op.add(scores, relax.const(np.where(allowed, 0, -np.inf).astype(wide), wide)))
    if mask is not None:
        if dtype_of(mask) == "bool":
            mask = emit(importer, relax.op.where(mask, constant(0, wide), constant(-np.inf, wide)))
        mask = cast(importer, mask, wide)
        shown = _shown_rows(importer, mask)
        # The softmax of nothing but -inf is NaN, and torch's attention answers 0 there: so it is of something finite,
        # and its product is multiplied by 0. Not a choice, of which TVM's CUDA makes vectors that nvcc does not take.
        mask = emit(importer, relax.op.maximum(mask, constant(float(np.finfo(wide).min) / 2, wide)))
        scores = emit(importer, relax.op.add(scores, mask))
    weights = emit(importer, relax.op.nn.softmax(scores, -1))
    result = emit(importer, relax.op.matmul(cast(importer, weights, dtype), value))
    return result if shown is None else emit(importer, relax.op.multiply(result, cast(importer, shown, dtype)))


def _shown_rows(importer: Importer, mask: relax.Expr) -> relax.Expr:
    """1 for the rows of which a mask shows something, 0 for those it hides altogether, [..., rows, 1]."""
    dtype = dtype_of(mask)
    hides = emit(importer, relax.op.equal(mask, constant(-np.inf, dtype)))
    shows = emit(importer, relax.op.where(hides, constant(0, dtype), constant(1, dtype)))
    count = emit(importer, relax.op.sum(shows, [-1], keepdims=True))
    return emit(importer, relax.op.minimum(count, constant(1, dtype)))


def _repeated_heads(importer: Importer, value: relax.Expr, query: relax.Expr) -> relax.Expr:
    times = shape_of(query)[-3] // shape_of(value)[-3]
    return value if times == 1 else emit(importer, relax.op.repeat(value, times, len(shape_of(value)) - 3))


def _weights_or(
    importer: Importer, weight: relax.Expr | None, bias: relax.Expr | None, shape: Sequence[int], dtype: str
) -> tuple[relax.Expr, relax.Expr]:
    ones = relax.const(np.ones(shape).astype(np.dtype(dtype)), dtype)
    zeros = relax.const(np.zeros(shape).astype(np.dtype(dtype)), dtype)
    return (
        ones if weight is None else cast(importer, weight, dtype),
        zeros if bias is None else cast(importer, bias, dtype),
    )


def _widened(importer: Importer, data: relax.Expr) -> relax.Expr:
    """Norms of half precision are computed in float32, as torch does; TVM has some of them in float32 only."""
    return cast(importer, data, "float32") if dtype_of(data) in ("float16", "bfloat16") else data


def _layer_norm(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer looks up a missing weight or bias.
    values = arguments(node, importer)
    data, shape = _widened(importer, values["input"]), [int(size) for size in values["normalized_shape"]]
    weight, bias = _weights_or(importer, values["weight"], values["bias"], shape, dtype_of(data))
    axes = list(range(-len(shape), 0))
    result = emit(importer, relax.op.nn.layer_norm(data, weight, bias, axes, float(values["eps"])))
    return cast(importer, result, result_dtype(node))


def _group_norm(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer looks up a missing weight or bias, and its operator has no inputs of two axes.
    values = arguments(node, importer)
    data = _widened(importer, values["input"])
    shape = shape_of(data)
    weight, bias = _weights_or(importer, values["weight"], values["bias"], shape[1:2], dtype_of(data))
    if len(shape) == 2:
        data = emit(importer, relax.op.expand_dims(data, 2))
    groups, axes = int(values["num_groups"]), list(range(2, max(len(shape), 3)))
    result = emit(importer, relax.op.nn.group_norm(data, weight, bias, groups, 1, axes, float(values["eps"])))
    result = cast(importer, result, result_dtype(node))
    return emit(importer, relax.op.squeeze(result, [2])) if len(shape) == 2 else result


def _batch_norm(node: fx.Node, importer: Importer) -> tuple[relax.Expr, ...]:
    # TVM's importer returns a tensor for torch's tuple.
    values = arguments(node, importer)
    data = _widened(importer, values["input"])
    channels = shape_of(data)[1:2]
    weight, bias = _weights_or(importer, values["weight"], values["bias"], channels, dtype_of(data))
    mean = cast(importer, values["running_mean"], dtype_of(data))
    variance = cast(importer, values["running_var"], dtype_of(data))
    result = emit(
        importer,
        relax.op.nn.batch_norm(
            data, weight, bias, mean, variance, axis=1, epsilon=float(values["eps"]), momentum=0.1, training=False
        ),
    )
    return (cast(importer, emit(importer, relax.TupleGetItem(result, 0)), result_dtype(node)),)


def _batch_norm_of_input(node: fx.Node, importer: Importer) -> tuple[relax.Expr, ...]:
    # TVM's importer returns a tensor for torch's tuple, half precision loses the mean, and TVM's operator for training
    # is simplified to the one for inference.
    values = arguments(node, importer)
    data, dtype = values["input"], dtype_of(values["input"])
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    shape = shape_of(data)
    axes = [0, *range(2, len(shape))]
    x = cast(importer, data, wide)
    mean = emit(importer, relax.op.mean(x, axes, keepdims=True))
    centred = emit(importer, relax.op.subtract(x, mean))
    variance = emit(importer, relax.op.mean(emit(importer, relax.op.multiply(centred, centred)), axes, keepdims=True))
    scale = emit(importer, relax.op.rsqrt(emit(importer, relax.op.add(variance, constant(values["eps"], wide)))))
    result = emit(importer, relax.op.multiply(centred, scale))
    channels = [1, shape[1]] + [1] * (len(shape) - 2)
    for operator, parameter in ((relax.op.multiply, values["weight"]), (relax.op.add, values["bias"])):
        if parameter is not None:
            shaped = emit(importer, relax.op.reshape(cast(importer, parameter, wide), channels))
            result = emit(importer, operator(result, shaped))
    statistics = [emit(importer, relax.op.squeeze(each, axes)) for each in (mean, scale)]
    results = tuple(
        cast(importer, each, dtype_name(right.dtype))
        for each, right in zip((result, *statistics), node.meta["val"], strict=False)
    )
    if "running_mean" not in values:
        return results
    count = math.prod(shape[axis] for axis in axes)
    unbiased = emit(importer, relax.op.multiply(variance, constant(count / (count - 1), wide)))
    targets = (statistics[0], emit(importer, relax.op.squeeze(unbiased, axes)))
    updated = [
        cast(importer, _moved(importer, cast(importer, old, wide), target, values["momentum"]), dtype_name(right.dtype))
        for old, target, right in zip(
            (values["running_mean"], values["running_var"]), targets, node.meta["val"][3:], strict=True
        )
    ]
    return (*results, *updated)


def _moved(importer: Importer, value: relax.Expr, target: relax.Expr, share: float) -> relax.Expr:
    """(1 - share) · value + share · target."""
    dtype = dtype_of(value)
    kept = emit(importer, relax.op.multiply(value, constant(1 - share, dtype)))
    added = emit(importer, relax.op.multiply(target, constant(share, dtype)))
    return emit(importer, relax.op.add(kept, added))


def _softmax(operator: Callable[..., relax.Expr]) -> Repair:
    # TVM's importer ignores the dtype that the softmax is computed in.
    def convert(node: fx.Node, importer: Importer) -> relax.Expr:
        values = arguments(node, importer)
        dtype = result_dtype(node)
        wide = "float32" if dtype in ("float16", "bfloat16") else dtype
        data = cast(importer, values["self"], wide)
        if not shape_of(data):
            data = emit(importer, relax.op.reshape(data, [1]))
            return cast(importer, emit(importer, relax.op.reshape(operator(data, 0), [])), dtype)
        return cast(importer, emit(importer, operator(data, int(values["dim"]))), dtype)

    return convert


def _elu(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's importer ignores scale and input_scale.
    values = arguments(node, importer)
    x = values["self"]
    dtype = dtype_of(x)
    scaled = _scaled(importer, x, values["input_scale"], dtype)
    grown = emit(importer, relax.op.subtract(relax.op.exp(scaled), constant(1, dtype)))
    negative = emit(importer, relax.op.multiply(grown, constant(values["alpha"] * values["scale"], dtype)))
    positive = _scaled(importer, x, values["scale"], dtype)
    return emit(importer, relax.op.where(emit(importer, relax.op.greater(x, constant(0, dtype))), positive, negative))


def _hardtanh(node: fx.Node, importer: Importer) -> relax.Expr:
    values = arguments(node, importer)
    return emit(importer, relax.op.clip(values["self"], values["min_val"], values["max_val"]))


def _prelu(node: fx.Node, importer: Importer) -> relax.Expr:
    # TVM's operator takes one slope for each channel, torch also one for all.
    values = arguments(node, importer)
    x, slope = values["self"], values["weight"]
    rank = len(shape_of(x))
    if rank > 1 and shape_of(slope) != [1]:
        slope = emit(importer, relax.op.reshape(slope, [1, -1] + [1] * (rank - 2)))
    zero = constant(0, dtype_of(x))
    return emit(
        importer,
        relax.op.where(emit(importer, relax.op.greater(x, zero)), x, emit(importer, relax.op.multiply(x, slope))),
    )


def _reshape_to_result(node: fx.Node, importer: Importer) -> relax.Expr:
    return emit(importer, relax.op.reshape(next(iter(arguments(node, importer).values())), result_shape(node)))


REPAIRS: dict[str, Repair] = {
    **{f"conv{axes}d.{kind}": _convolution for axes in (1, 2, 3) for kind in ("default", "padding")},
    "convolution.default": _convolution,
    "mm.default": _matmul("self", "mat2"),
    "bmm.default": _matmul("self", "mat2"),
    "matmul.default": _matmul("self", "other"),
    "dot.default": _matmul("self", "tensor"),
    "mv.default": _matmul("self", "vec"),
    "addmm.default": _product_and_sum("mat1", "mat2"),
    "addmv.default": _product_and_sum("mat", "vec"),
    "baddbmm.default": _product_and_sum("batch1", "batch2"),
    "linear.default": _linear,
    "scaled_dot_product_attention.default": _attention,
    "layer_norm.default": _layer_norm,
    "group_norm.default": _group_norm,
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    "_native_batch_norm_legit.no_stats": _batch_norm_of_input,
    "_native_batch_norm_legit_functional.default": _batch_norm_of_input,
    "softmax.int": _softmax(relax.op.nn.softmax),
    "log_softmax.int": _softmax(relax.op.nn.log_softmax),
    "_softmax.default": _softmax(relax.op.nn.softmax),
    "_log_softmax.default": _softmax(relax.op.nn.log_softmax),
    "elu.default": _elu,
    "hardtanh.default": _hardtanh,
    "prelu.default": _prelu,
    "view.default": _reshape_to_result,
    "reshape.default": _reshape_to_result,
}
"""By the name of the ATen overload."""
