"""Relax's operators in short notation for the importers: each call is emitted, and numbers become constants."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relay_passes import ir

_ELEMENTWISE = (
    "add", "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power", "maximum", "minimum",
    "left_shift", "right_shift", "where", "full_like", "less", "less_equal", "greater", "greater_equal", "equal",
    "not_equal",
)  # fmt: skip
"""Operators in which Python numbers get the dtype of the last tensor argument."""
COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip
"""Relax's operators of comparison by their short names in other sources."""


class Operators:
    """Relax's operators, emitted when called: ``op.add(x, 1)`` emits ``relax.op.add`` with 1 in the dtype of x."""

    def __init__(self, builder: Any, module: Any = relax.op) -> None:
        """``module`` has the operators: ``relax.op``, or one inside it (``op.nn``, ``op.image``)."""
        self.builder = builder
        self._module = module

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._module, name)
        if isinstance(operator, ModuleType):
            return Operators(self.builder, operator)

        def emit(*arguments: Any, **options: Any) -> relax.Var:
            operands: Any = _with_constants(arguments) if name in _ELEMENTWISE else arguments
            return self.builder.emit(operator(*operands, **options))

        return emit

    def cast(self, value: Any, dtype: str) -> relax.Expr:
        """Convert ``value``, an expression or a Python number, to ``dtype``."""
        if not isinstance(value, relax.Expr):
            return constant(value, dtype)
        return value if dtype_of(value) == dtype else self.astype(value, dtype)

    def shaped(self, value: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """Reshape ``value`` if it has another shape."""
        return value if shape_of(value) == list(shape) else self.reshape(value, list(shape))

    def repeated(self, value: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """Broadcast ``value`` if it has another shape."""
        return value if shape_of(value) == list(shape) else self.broadcast_to(value, list(shape))

    def transposed(self, value: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """Permute the axes of ``value`` into this order; no operator is emitted for the identity."""
        return value if list(axes) == sorted(axes) else self.permute_dims(value, list(axes))

    def item(self, value: relax.Expr, place: int) -> relax.Var:
        """Return the field at position ``place`` of a tuple."""
        return self.builder.emit(relax.TupleGetItem(value, place))


def _with_constants(arguments: tuple[Any, ...]) -> list[relax.Expr]:
    dtype = next(dtype_of(argument) for argument in reversed(arguments) if isinstance(argument, relax.Expr))
    return [argument if isinstance(argument, relax.Expr) else constant(argument, dtype) for argument in arguments]


def shape_of(value: relax.Expr) -> list[int]:
    return [int(size) for size in value.ty.shape]


def dtype_of(value: relax.Expr) -> str:
    return str(value.ty.dtype)


def is_float(dtype: str) -> bool:
    return "float" in dtype


def wide(dtype: str) -> str:
    """The dtype for accumulating ``dtype``: float32 for half precision, else ``dtype`` itself."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def constant(value: Any, dtype: str) -> relax.Expr:
    """A constant of a scalar or an array."""
    return ir.constant(np.asarray(value).astype(np.dtype(dtype), copy=False))


def numbers_of(value: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of a constant, None for other expressions."""
    return value.value.numpy() if isinstance(value, tvm.ir.GenericConst) else None
