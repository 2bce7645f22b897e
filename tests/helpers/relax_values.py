"""A reference for rewrites of Relax: it computes a module operation by operation, with torch in float64.

It supports only the operators of the tests' graphs. Nothing is compiled, so that a property test can try hundreds of
graphs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tvm
from torch.nn import functional
from tvm import relax

from relay_passes.ir import bindings_of, is_tensor_constant, main_function, operator_name, returned_fields


def values_of(module: tvm.IRModule, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the outputs of ``main``; floats are float64."""
    function = main_function(module)
    values: dict[str, Any] = {
        parameter.name: _tensor(array) for parameter, array in zip(function.params, inputs, strict=True)
    }
    for binding in bindings_of(function):
        values[binding.var.name] = _value(binding.value, values)
    return [values[field.name].numpy() for field in returned_fields(function)]


def _tensor(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor.double() if tensor.is_floating_point() else tensor


def _value(expression: relax.Expr, values: dict[str, Any]) -> Any:
    if isinstance(expression, relax.Var):
        return values[expression.name]
    if is_tensor_constant(expression):
        return _tensor(expression.value.numpy())
    if isinstance(expression, relax.Tuple):
        return tuple(_value(field, values) for field in expression.fields)
    if isinstance(expression, relax.TupleGetItem):
        return _value(expression.tuple_value, values)[expression.index]
    if isinstance(expression, relax.ShapeExpr):
        return [int(length) for length in expression.values]
    if not isinstance(expression, relax.Call):
        return expression.value
    operands = [_value(argument, values) for argument in expression.args]
    return _OPERATORS[operator_name(expression).removeprefix("relax.")](*operands, attributes=expression.attrs)


def _plain(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands, attributes: operator(*operands)


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


def _convolution(data: Any, weight: Any, attributes: Any) -> Any:
    rank = data.dim() - 2
    padding = _numbers(attributes.padding)
    if padding[:rank] != padding[rank:]:  # parts of images have no padding where they meet
        sides = zip(padding[:rank], padding[rank:], strict=True)
        data, padding = (
            functional.pad(data, [pad for pair in reversed(list(sides)) for pad in pair]),
            [0] * 2 * rank,
        )
    strides, dilation = _numbers(attributes.strides), _numbers(attributes.dilation)
    operator = functional.conv1d if rank == 1 else functional.conv2d
    return operator(data, weight, None, strides, padding[:rank], dilation, int(attributes.groups))


def _max_pool(data: Any, attributes: Any) -> Any:
    padded = functional.pad(data, _sides(attributes.padding), value=-torch.inf)
    return functional.max_pool2d(padded, _numbers(attributes.pool_size), _numbers(attributes.strides))


def _average_pool(data: Any, attributes: Any) -> Any:
    sums, counted = (
        functional.avg_pool2d(
            functional.pad(image, _sides(attributes.padding)),
            _numbers(attributes.pool_size),
            _numbers(attributes.strides),
        )
        for image in (data, torch.ones_like(data))
    )
    return sums if attributes.count_include_pad else sums / counted


def _sides(padding: Any) -> list[int]:
    """The padding of rows and columns, of which parts of images have one side only, in torch's order."""
    top, left, bottom, right = _numbers(padding)
    return [left, right, top, bottom]


def _batch_norm(data: Any, gamma: Any, beta: Any, mean: Any, variance: Any, attributes: Any) -> Any:
    assert int(attributes.axis) == 1
    normed = functional.batch_norm(data, mean, variance, gamma, beta, False, 0.0, float(attributes.epsilon))
    return normed, mean, variance


def _layer_norm(data: Any, gamma: Any, beta: Any, attributes: Any) -> Any:
    assert _numbers(attributes.axes) == [-1]
    return functional.layer_norm(data, data.shape[-1:], gamma, beta, float(attributes.epsilon))


def _group_norm(data: Any, gamma: Any, beta: Any, attributes: Any) -> Any:
    axes = _numbers(attributes.axes)
    assert int(attributes.channel_axis) == 1
    assert axes == list(range(2, data.dim()))
    return functional.group_norm(data, int(attributes.num_groups), gamma, beta, float(attributes.epsilon))


def _pad(data: Any, value: Any = 0, attributes: Any = None) -> Any:
    assert attributes.pad_mode == "constant"
    widths = _numbers(attributes.pad_width)
    sides = [widths[2 * axis + side] for axis in reversed(range(data.dim())) for side in (0, 1)]
    return functional.pad(data, sides, value=float(attributes.pad_value))


def _reduction(operator: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(data: Any, attributes: Any) -> Any:
        axes = range(data.dim()) if attributes.axis is None else _numbers(attributes.axis)
        return operator(data, dim=tuple(axes), keepdim=bool(attributes.keepdims))

    return reduce


def _permute(data: Any, attributes: Any) -> Any:
    axes = range(data.dim())[::-1] if attributes.axes is None else _numbers(attributes.axes)
    return data.permute(*axes)


def _expand_dims(data: Any, attributes: Any) -> Any:
    rank = data.dim() + len(attributes.axis)
    for axis in sorted(axis % rank for axis in _numbers(attributes.axis)):
        data = data.unsqueeze(axis)
    return data


def _squeeze(data: Any, attributes: Any) -> Any:
    return data.squeeze() if attributes.axis is None else data.squeeze(tuple(_numbers(attributes.axis)))


def _slice(data: Any, axes: Any, begins: Any, ends: Any, strides: Any = None, attributes: Any = None) -> Any:
    ranges = [slice(None)] * data.dim()
    for axis, begin, end, stride in zip(axes, begins, ends, strides or [1] * len(axes), strict=True):
        ranges[axis] = slice(begin, end, stride)
    return data[tuple(ranges)]


def _split(data: Any, attributes: Any) -> Any:
    sections = attributes.indices_or_sections
    sections = int(sections) if hasattr(sections, "value") else _numbers(sections)
    return torch.tensor_split(data, sections, dim=int(attributes.axis))


def _take(data: Any, indices: Any, attributes: Any) -> Any:
    axis = int(attributes.axis) % data.dim()
    selected = data.index_select(axis, indices.reshape(-1))
    return selected.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


_OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(torch, name)) for name in ("add", "subtract", "multiply", "divide", "negative")},
    **{name: _plain(getattr(torch, name)) for name in ("maximum", "minimum", "where", "tanh", "sigmoid")},
    "equal": _plain(torch.eq),
    "matmul": _plain(torch.matmul),
    "astype": lambda data, attributes: data.double(),
    "clip": lambda data, low, high, attributes: data.clamp(low, high),
    "nn.relu": _plain(functional.relu),
    "nn.silu": _plain(functional.silu),
    "nn.gelu": _plain(functional.gelu),
    "nn.gelu_tanh": lambda data, attributes: functional.gelu(data, approximate="tanh"),
    "nn.softmax": lambda data, attributes: torch.softmax(data, int(attributes.axis)),
    "nn.conv1d": _convolution,
    "nn.conv2d": _convolution,
    "nn.max_pool2d": _max_pool,
    "nn.avg_pool2d": _average_pool,
    "nn.batch_norm": _batch_norm,
    "nn.layer_norm": _layer_norm,
    "nn.group_norm": _group_norm,
    "nn.pad": _pad,
    "mean": _reduction(torch.mean),
    "sum": _reduction(torch.sum),
    "max": _reduction(torch.amax),
    "permute_dims": _permute,
    "reshape": lambda data, shape, attributes: data.reshape(shape),
    "broadcast_to": lambda data, shape, attributes: data.broadcast_to(shape),
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "concat": lambda fields, attributes: torch.cat(fields, int(attributes.axis)),
    "split": _split,
    "strided_slice": _slice,
    "take": _take,
}
