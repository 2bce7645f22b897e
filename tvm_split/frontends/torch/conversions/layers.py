"""Conversions of layers: convolutions, products of matrices, norms, attention, activations, pooling, resampling."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends import compositions
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of, wide
from tvm_split.frontends.torch.conversions import TorchCall, also_of_scalars, each_axis

_LAYOUTS = {1: ("NCW", "OIW", "IOW"), 2: ("NCHW", "OIHW", "IOHW"), 3: ("NCDHW", "OIDHW", "IODHW")}
"""Layouts by the number of spatial axes: of data, of weights, and of a transposed convolution's weights."""


def _convolution(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer fixes the result to float32.
    data, weight, is_transposed = call["input"], call["weight"], call.get("transposed", False)
    axes = len(shape_of(weight)) - 2
    is_single = len(call.shape) == axes + 1
    data = op.expand_dims(data, 0) if is_single else data
    data_layout, plain, transposed = _LAYOUTS[axes]
    options = {
        "strides": each_axis(call["stride"], axes),
        "padding": each_axis(call["padding"], axes) * 2,
        "dilation": each_axis(call["dilation"], axes),
        "groups": call["groups"],
        "data_layout": data_layout,
        "kernel_layout": transposed if is_transposed else plain,
    }
    if is_transposed:
        options["output_padding"] = each_axis(call["output_padding"], axes)
    convolution = getattr(op.nn, f"conv{axes}d_transpose" if is_transposed else f"conv{axes}d")
    result = convolution(data, weight, **options)
    if call["bias"] is not None:
        result = op.add(result, op.reshape(call["bias"], [1, -1] + [1] * axes))
    return op.squeeze(result, [0]) if is_single else result


def _matmul(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer fixes the result to float32.
    left, right = call.operands[:2]
    if len(shape_of(left)) == len(shape_of(right)) == 1:
        return op.sum(op.multiply(left, right))
    return op.matmul(left, right)


def _linear(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer fixes the result to float32.
    result = op.matmul(call["input"], op.permute_dims(call["weight"]))
    return result if call["bias"] is None else op.add(result, call["bias"])


def _attention(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer ignores scale and enable_gqa, and refuses boolean masks and inputs of three or five axes.
    query, key, value = call["query"], call["key"], call["value"]
    if call["dropout_p"]:
        raise ModelImportError(f"it drops out with probability {call['dropout_p']}; call model.eval()")
    if call["enable_gqa"]:
        key, value = _repeated_heads(op, key, query), _repeated_heads(op, value, query)
    dtype, mask, shown, biases = wide(call.dtype), call["attn_mask"], None, []
    if call["is_causal"]:
        allowed = np.tril(np.ones((shape_of(query)[-2], shape_of(key)[-2]), bool))
        biases.append(constant(np.where(allowed, 0, -np.inf), dtype))
    if mask is not None:
        if dtype_of(mask) == "bool":
            mask = op.where(mask, constant(0, dtype), constant(-np.inf, dtype))
        mask = op.cast(mask, dtype)
        shown = _shown_rows(op, mask)
        # For a row of only -inf, softmax gives NaN but torch's attention 0. So the mask is made finite, and the result
        # multiplied by 0; for a `where` instead, TVM generates CUDA vectors that nvcc rejects.
        biases.append(op.maximum(mask, float(np.finfo(dtype).min) / 2))
    result = compositions.attention(op, query, key, value, call["scale"], biases)
    return result if shown is None else op.multiply(result, op.cast(shown, call.dtype))


def _shown_rows(op: Operators, mask: relax.Expr) -> relax.Expr:
    """Return 0 for rows that a mask hides completely, else 1; the shape is [..., rows, 1]."""
    dtype = dtype_of(mask)
    shows = op.where(op.equal(mask, -np.inf), constant(0, dtype), constant(1, dtype))
    return op.minimum(op.sum(shows, [-1], keepdims=True), 1)


def _repeated_heads(op: Operators, value: relax.Expr, query: relax.Expr) -> relax.Expr:
    times = shape_of(query)[-3] // shape_of(value)[-3]
    return value if times == 1 else op.repeat(value, times, len(shape_of(value)) - 3)


def _normed(op: Operators, call: TorchCall, shape: Sequence[int]) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Return a norm's data, weight and bias of ``shape``; ones and zeros stand for a missing weight or bias.

    Half precision is cast to float32, as in torch; TVM has some of the norms in float32 only.
    """
    dtype = wide(dtype_of(call["input"]))
    weight = constant(np.ones(shape), dtype) if call["weight"] is None else op.cast(call["weight"], dtype)
    bias = constant(np.zeros(shape), dtype) if call["bias"] is None else op.cast(call["bias"], dtype)
    return op.cast(call["input"], dtype), weight, bias


def _layer_norm(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer fails if weight or bias is missing.
    shape = call["normalized_shape"]
    result = op.nn.layer_norm(*_normed(op, call, shape), list(range(-len(shape), 0)), call["eps"])
    return op.cast(result, call.dtype)


def _group_norm(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's importer fails if weight or bias is missing, and its operator does not accept inputs of two axes.
    data, weight, bias = _normed(op, call, call.shape[1:2])
    if len(call.shape) == 2:
        data = op.expand_dims(data, 2)
    axes = list(range(2, len(shape_of(data))))
    result = op.cast(op.nn.group_norm(data, weight, bias, call["num_groups"], 1, axes, call["eps"]), call.dtype)
    return op.squeeze(result, [2]) if len(call.shape) == 2 else result


def _batch_norm(op: Operators, call: TorchCall) -> tuple[relax.Expr, ...]:
    # TVM's importer returns a tensor instead of a tuple.
    data, weight, bias = _normed(op, call, call.shape[1:2])
    mean, variance = (op.cast(call[f"running_{statistic}"], dtype_of(data)) for statistic in ("mean", "var"))
    options = {"axis": 1, "epsilon": call["eps"], "momentum": 0.1, "training": False}
    return (op.cast(op.item(op.nn.batch_norm(data, weight, bias, mean, variance, **options), 0), call.dtype),)


def _softmax(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    return getattr(op.nn, operator)(call["self"], call["dim"])


RESAMPLINGS = (
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""torch's resampling operators that have an overload ``vec``."""


def _resampled(op: Operators, call: TorchCall) -> relax.Expr:
    """Resize one axis after the other by a matrix of torch's own weights.

    All resamplings are linear and separable by axis, so the unit vectors, resized by torch, are the weights.
    """
    # TVM's importer computes nearest with half-pixel centres, ignores a given scale factor, antialiasing and the
    # coefficient of torch's bicubic (−0.75), and has no mode of one or three axes that works.
    dtype = call.dtype if "nearest" in call.operation.kind else wide(call.dtype)
    data, scales = op.cast(call.operands[0], dtype), call.get("scale_factors")
    for axis in range(2, len(call.shape)):
        scale = None if scales is None else scales[axis - 2]
        size = shape_of(data)[axis]
        weights = _weights(call.operation.kind, size, call.shape[axis], scale, call.get("align_corners", False))
        data = compositions.weighted(op, data, weights, axis)
    return op.cast(data, call.dtype)


def _weights(name: str, size: int, target: int, scale: float | None, align_corners: bool) -> np.ndarray[Any, Any]:
    """The matrix [target, size] of one axis, by resizing unit vectors with torch."""
    # Each kind has an operator for two axes; the linear one is bilinear.
    kernel = re.sub("[123]d", "2d", re.sub("(bi|tri)?linear", "bilinear", name.removesuffix(".vec")))
    wanted_size, scales = (None, [1.0, scale]) if scale else ([1, target], None)
    corners = [] if "nearest" in kernel else [align_corners]
    vectors = torch.eye(size, dtype=torch.float64)[:, None, None]
    resized = getattr(torch.ops.aten, kernel).vec(vectors, wanted_size, *corners, scales)
    return np.array(resized.reshape(size, target).T.numpy())


def _pooled(op: Operators, call: TorchCall, data: relax.Expr, operator: str, **options: Any) -> relax.Expr:
    """Pool ``data``, with or without a batch axis, in the call's windows; the default stride is the kernel size."""
    axes = int(operator[-2])
    kernel, padding = each_axis(call["kernel_size"], axes), each_axis(call["padding"], axes)
    stride = each_axis(call["stride"], axes) if call["stride"] else kernel
    is_single = len(call.shape) == axes + 1
    data = op.expand_dims(data, 0) if is_single else data
    result = getattr(op.nn, operator)(data, kernel, stride, padding * 2, ceil_mode=call["ceil_mode"], **options)
    return op.squeeze(result, [0]) if is_single else result


def _average_pool(op: Operators, call: TorchCall, operator: str) -> relax.Expr:
    # TVM's importer ignores divisor_override.
    divisor = call.get("divisor_override")
    if divisor and call["ceil_mode"]:
        raise ModelImportError("divisor_override together with ceil_mode is not supported")
    data = op.cast(call["self"], wide(call.dtype))
    result = _pooled(op, call, data, operator, count_include_pad=call["count_include_pad"] or bool(divisor))
    if divisor:
        result = op.multiply(result, float(np.prod(each_axis(call["kernel_size"], int(operator[-2])))) / divisor)
    return op.cast(result, call.dtype)


def _max_pool(op: Operators, call: TorchCall, operator: str) -> relax.Expr | tuple[relax.Expr]:
    # TVM's importer refuses windows without a stride, and returns zeros for the positions of the maxima, which are
    # omitted here.
    result = _pooled(op, call, call["self"], operator, dilation=each_axis(call["dilation"], int(operator[-2])))
    return (result,) if call.operation.kind.endswith("_with_indices.default") else result


def _adaptive_pool(op: Operators, call: TorchCall) -> Any:
    """Pool one axis after the other: output element i of m reduces the rows ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉ of n (exclusive)."""
    # TVM has no adaptive maximum, and its mean requires all sizes.
    is_mean = "avg" in call.operation.kind
    data, reduce = call["self"], op.mean if is_mean else op.max
    rank, axes = len(call.shape), int(call.operation.kind.partition("pool")[2][0])
    if is_mean:
        data = op.cast(data, wide(call.dtype))
    whole = [axis for axis in range(rank - axes, rank) if call.shape[axis] == 1]
    if whole:
        data = reduce(data, whole, keepdims=True)
    for axis in range(rank - axes, rank):
        shape, count = shape_of(data), call.shape[axis]
        size = shape[axis]
        if count in (1, size):
            continue
        if size % count == 0:
            windows = op.reshape(data, [*shape[:axis], count, size // count, *shape[axis + 1 :]])
            data = reduce(windows, [axis + 1])
            continue
        parts = []
        for place in range(count):
            first, last = place * size // count, -(-(place + 1) * size // count)
            parts.append(reduce(op.strided_slice(data, [axis], [first], [last]), [axis], keepdims=True))
        data = op.concat(parts, axis)
    data = op.cast(data, call.dtype)
    return data if is_mean else (data,)


def _grid_sample(op: Operators, call: TorchCall) -> relax.Expr:
    # TVM's operator takes coordinates as axis 1 of the grid; its importer leaves them as the last axis.
    return op.image.grid_sample(
        call["input"],
        op.permute_dims(call["grid"], [0, 3, 1, 2]),
        method=("bilinear", "nearest", "bicubic")[call["interpolation_mode"]],
        layout="NCHW",
        padding_mode=("zeros", "border", "reflection")[call["padding_mode"]],
        align_corners=call["align_corners"],
    )


CONVERSIONS: dict[str, Conversion] = {
    **{f"{name}.default": _convolution for name in ("convolution", "conv1d", "conv2d", "conv3d")},
    **{f"{name}.default": _matmul for name in ("mm", "bmm", "matmul")},
    "linear.default": _linear,
    "scaled_dot_product_attention.default": _attention,
    "layer_norm.default": _layer_norm,
    "group_norm.default": _group_norm,
    "batch_norm.default": lambda op, call: _batch_norm(op, call)[0],
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    **{f"_{name}.default": also_of_scalars(partial(_softmax, operator=name)) for name in ("softmax", "log_softmax")},
    # TVM's importer ignores scale and input_scale.
    "elu.default": lambda op, call: compositions.elu(
        op, call["self"], call["alpha"], call["scale"], call["input_scale"]
    ),
    **{f"{name}.vec": _resampled for name in RESAMPLINGS},
    **{f"avg_pool{axes}d.default": partial(_average_pool, operator=f"avg_pool{axes}d") for axes in (1, 2, 3)},
    **{
        f"max_pool{axes}d{suffix}.default": partial(_max_pool, operator=f"max_pool{axes}d")
        for axes in (1, 2, 3)
        for suffix in ("", "_with_indices")
    },
    **{f"adaptive_max_pool{axes}d.default": _adaptive_pool for axes in (2, 3)},
    **{f"adaptive_avg_pool{axes}d.default": _adaptive_pool for axes in (1, 2, 3)},
    "grid_sampler_2d.default": _grid_sample,
}
"""Conversions by the name of the ATen overload."""
