"""Shapes and sizes of Relax types with static shapes."""

from __future__ import annotations

import math

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from tvm import relax


def tensors_in(value_type: relax.Type) -> list[relax.TensorType]:
    """The tensor types in a type, those in tuples too."""
    if isinstance(value_type, relax.TensorType):
        return [value_type]
    if isinstance(value_type, relax.TupleType):
        return [tensor for field in value_type.fields for tensor in tensors_in(field)]
    return []


def shape_of(tensor: relax.TensorType) -> tuple[int, ...]:
    return tuple(int(length) for length in tensor.shape.values)


def size_bytes(value_type: relax.Type) -> int:
    """Bytes of all tensors in a type."""
    return sum(math.prod(shape_of(tensor)) * np.dtype(str(tensor.dtype)).itemsize for tensor in tensors_in(value_type))
