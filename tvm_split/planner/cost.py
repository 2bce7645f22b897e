"""An estimate of what layers cost, from the graph alone: good enough to balance, not to predict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from relay_passes.contract import bindings_of, main_function
from relay_passes.rewrite import is_tensor_constant, operator_name
from tvm_split.model import Model
from tvm_split.planner.tensor_types import shape_of, size_bytes, tensors_in

# A roofline of one present-day CPU core. Only the ratio of the two matters for balance: it says how many operations a
# byte is worth, and 5 lies between cores with and without wide vectors.
OPERATIONS_PER_SECOND = 50e9
BYTES_PER_SECOND = 10e9
# What one core serialises, sends or receives through gRPC in a second when it does little else.
WIRE_BYTES_PER_SECOND = 1.5e9


@dataclass(frozen=True)
class Roofline:
    """What a processor does in a second at most, and what each operation takes besides."""

    operations_per_second: float
    bytes_per_second: float
    call_seconds: float = 0.0


CORE = Roofline(OPERATIONS_PER_SECOND, BYTES_PER_SECOND)
GPU = Roofline(10e12, 500e9, 5e-6)
"""Some GPU of these years, in float32, and the launch of a kernel: so that plans without one at hand are of any use."""


def estimated_seconds(model: Model, processor: Roofline = CORE) -> dict[str, float]:
    """Seconds per layer, by default on one core: the longer of computing and of moving the operands once."""
    seconds = dict.fromkeys(model.layer_names, 0.0)
    for name, work, moved in calls(model.module):
        layer = model.layers.get(name)
        if layer is not None:
            roof = max(work / processor.operations_per_second, moved / processor.bytes_per_second)
            seconds[layer] += roof + processor.call_seconds
    return seconds


def weight_bytes(model: Model) -> dict[str, int]:
    """Bytes of the constants that each layer's operations take, as the source stores them."""
    found = dict.fromkeys(model.layer_names, 0)
    for binding in bindings_of(main_function(model.module)):
        layer = model.layers.get(binding.var.name)
        if layer is not None and isinstance(binding.value, relax.Call):
            constants = [each for each in binding.value.args if is_tensor_constant(each)]
            found[layer] += sum(size_bytes(each.ty) for each in constants)
    return found


def model_operations(model: Model) -> float:
    """Floating-point operations of one run, as the layers are defined."""
    return sum(work for _, work, _ in calls(model.module))


def calls(module: tvm.IRModule) -> Iterator[tuple[str, float, int]]:
    """Of every operation that makes a tensor: its variable, its operations, and the bytes of operands and results."""
    for binding in bindings_of(main_function(module)):
        call = binding.value
        result = tensors_in(call.ty) if isinstance(call, relax.Call) else []
        if result:
            operands = [tensor for argument in call.args for tensor in tensors_in(argument.ty)]
            work = operations(operator_name(call), [shape_of(each) for each in operands], shape_of(result[0]))
            yield binding.var.name, work, sum(size_bytes(tensor) for tensor in [*result, *operands])


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
