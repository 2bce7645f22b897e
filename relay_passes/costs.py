"""Operations and bytes of calls, from shapes and types alone."""

import math
from collections.abc import Iterator, Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import bindings_of, main_function, operator_name, shape_of


def calls(module: tvm.IRModule) -> Iterator[tuple[str, float, int]]:
    """Yield (variable name, floating-point operations, bytes of operands and results) of every call in ``main``."""
    for binding in bindings_of(main_function(module)):
        call = binding.value
        result = tensors_in(call.ty) if isinstance(call, relax.Call) else []
        if result:
            operands = [tensor for argument in call.args for tensor in tensors_in(argument.ty)]
            work = operations(operator_name(call), [shape_of(operand) for operand in operands], shape_of(result[0]))
            yield binding.var.name, work, sum(size_bytes(tensor) for tensor in [*result, *operands])


def operations(operator: str, operands: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> float:
    """Return the floating-point operations of one call, from its operands' and its result's shape.

    A multiply-add counts as two.
    """
    size = math.prod(result)
    if operator.startswith("relax.nn.conv"):
        return 2.0 * (math.prod(operands[0]) if "transpose" in operator else size) * math.prod(operands[1][1:])
    if operator == "relax.matmul":
        return 2.0 * size * operands[0][-1]
    if operator.startswith("relax.nn.attention"):
        batch, queries, heads, width = operands[0]
        return 4.0 * batch * heads * queries * operands[1][1] * width
    return float(size)


def tensors_in(value_type: relax.Type) -> list[relax.TensorType]:
    """Return the tensor types in a type, including those in tuples."""
    if isinstance(value_type, relax.TensorType):
        return [value_type]
    if isinstance(value_type, relax.TupleType):
        return [tensor for field in value_type.fields for tensor in tensors_in(field)]
    return []


def size_bytes(value_type: relax.Type) -> int:
    """Return the total bytes of the tensors in a type."""
    return sum(math.prod(shape_of(tensor)) * np.dtype(str(tensor.dtype)).itemsize for tensor in tensors_in(value_type))
