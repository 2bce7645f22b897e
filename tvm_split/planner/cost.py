"""An estimate of what layers cost, from the graph alone: good enough to balance, not to predict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax

from relay_passes.contract import bindings_of, main_function
from tvm_split.model import Model

# A roofline of one present-day CPU core. Only the ratio of the two matters for balance: it says how many operations a
# byte is worth, and 5 lies between cores with and without wide vectors.
OPERATIONS_PER_SECOND = 50e9
BYTES_PER_SECOND = 10e9


def estimated_seconds(model: Model) -> dict[str, float]:
    """Seconds per layer on one core by a roofline: the longer of computing and of moving the operands once."""
    seconds = dict.fromkeys(model.layer_names, 0.0)
    for binding in bindings_of(main_function(model.module)):
        layer = model.layers.get(binding.var.name)
        if layer is None or not isinstance(binding.value, relax.Call):
            continue
        call = binding.value
        result = _tensors(call.ty)
        operands = [tensor for argument in call.args for tensor in _tensors(argument.ty)]
        moved = sum(_bytes(tensor) for tensor in [*result, *operands])
        work = operations(str(getattr(call.op, "name", "")), [_shape(each) for each in operands], _shape(result[0]))
        seconds[layer] += max(work / OPERATIONS_PER_SECOND, moved / BYTES_PER_SECOND)
    return seconds


def operations(operator: str, operands: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> float:
    """Floating-point operations of one call; a multiplication and an addition count as two."""
    size = math.prod(result)
    if operator.startswith("relax.nn.conv") and "transpose" not in operator:
        return 2.0 * size * math.prod(operands[1][1:])
    if operator.startswith("relax.nn.conv"):
        return 2.0 * math.prod(operands[0]) * math.prod(operands[1][1:])
    if operator == "relax.matmul":
        return 2.0 * size * operands[0][-1]
    if operator.startswith("relax.nn.attention"):
        batch, queries, heads, width = operands[0]
        return 4.0 * batch * heads * queries * operands[1][1] * width
    return float(size)


def _tensors(value_type: relax.Type) -> list[relax.TensorType]:
    if isinstance(value_type, relax.TensorType):
        return [value_type]
    if isinstance(value_type, relax.TupleType):
        return [tensor for field in value_type.fields for tensor in _tensors(field)]
    return []


def _shape(tensor: relax.TensorType) -> tuple[int, ...]:
    return tuple(int(length) for length in tensor.shape.values)


def _bytes(tensor: relax.TensorType) -> int:
    return math.prod(_shape(tensor)) * np.dtype(str(tensor.dtype)).itemsize
