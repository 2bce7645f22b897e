"""Constants of a Relax function as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

NUMPY_TYPES = frozenset(["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64"])


def array_of(expression: relax.Expr) -> Any:
    """A constant's numpy array, not copied; None for other expressions, and for types numpy does not have."""
    if not isinstance(expression, tvm.ir.GenericConst) or not isinstance(expression.value, tvm.runtime.Tensor):
        return None
    if str(expression.value.dtype) not in NUMPY_TYPES:
        return None
    return np.from_dlpack(expression.value)
