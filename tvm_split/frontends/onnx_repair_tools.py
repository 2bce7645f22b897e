"""What every repair of TVM's ONNX importer needs: shapes and dtypes, constants, casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_split.errors import ModelImportError

Builder = Any
Inputs = Sequence[relax.Expr | None]
Repair = Callable[[Builder, Any, dict[str, Any], int], relax.Expr]
"""Builder, inputs (None beyond the last), attributes, opset → the result."""


def shape_of(value: relax.Expr) -> list[int]:
    return [int(size) for size in value.ty.shape]


def dtype_of(value: relax.Expr) -> str:
    return str(value.ty.dtype)


def constant(value: Any, dtype: str) -> relax.Expr:
    """A scalar, or an array of numbers."""
    return relax.const(np.asarray(value).astype(np.dtype(dtype)), dtype)


def known(value: relax.Expr | None, what: str) -> Any:
    """The numbers of a constant input, or None if it is left out."""
    if value is None:
        return None
    if not isinstance(value, tvm.ir.GenericConst):
        raise ModelImportError(f"its {what} is computed while the network runs; it has to be a constant")
    return value.value.numpy()


def cast(builder: Builder, value: relax.Expr, dtype: str) -> relax.Expr:
    return value if dtype_of(value) == dtype else builder.emit(relax.op.astype(value, dtype))
