"""Relax's operators as the repairs of TVM's importers write them: bound where called, numbers for constants."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relax

_ELEMENTWISE = (
    "add", "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power", "maximum", "minimum",
    "left_shift", "right_shift", "where", "full_like", "less", "less_equal", "greater", "greater_equal", "equal",
    "not_equal",
)  # fmt: skip
"""Operators whose numbers take the dtype of the last tensor beside them."""


class Operators:
    """``op.add(x, 1)`` is ``relax.op.add`` bound in ``builder``, the number as a constant of the tensor's dtype."""

    def __init__(self, builder: Any, room: Any = relax.op) -> None:
        """``room`` has the operators: ``relax.op``, or one of its modules (``op.nn``, ``op.image``)."""
        self.builder = builder
        self._room = room

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._room, name)
        if isinstance(operator, ModuleType):
            return Operators(self.builder, operator)

        def bound(*arguments: Any, **options: Any) -> relax.Var:
            given: Any = _with_constants(arguments) if name in _ELEMENTWISE else arguments
            return self.builder.emit(operator(*given, **options))

        return bound

    def cast(self, value: Any, dtype: str) -> relax.Expr:
        """``value``, an expression or a Python number, in ``dtype``."""
        if not isinstance(value, relax.Expr):
            return constant(value, dtype)
        return value if dtype_of(value) == dtype else self.astype(value, dtype)

    def shaped(self, value: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """``value`` reshaped, if it is of another shape."""
        return value if shape_of(value) == list(shape) else self.reshape(value, list(shape))

    def repeated(self, value: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """``value`` broadcast, if it is of another shape."""
        return value if shape_of(value) == list(shape) else self.broadcast_to(value, list(shape))

    def transposed(self, value: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """``value`` with its axes in this order, if they are in another."""
        return value if list(axes) == sorted(axes) else self.permute_dims(value, list(axes))

    def item(self, value: relax.Expr, place: int) -> relax.Var:
        """One field of a tuple."""
        return self.builder.emit(relax.TupleGetItem(value, place))


def _with_constants(arguments: tuple[Any, ...]) -> list[relax.Expr]:
    dtype = next(dtype_of(each) for each in reversed(arguments) if isinstance(each, relax.Expr))
    return [each if isinstance(each, relax.Expr) else constant(each, dtype) for each in arguments]


def shape_of(value: relax.Expr) -> list[int]:
    return [int(size) for size in value.ty.shape]


def dtype_of(value: relax.Expr) -> str:
    return str(value.ty.dtype)


def is_float(dtype: str) -> bool:
    return "float" in dtype


def wide(dtype: str) -> str:
    """What half precision is accumulated in."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def constant(value: Any, dtype: str) -> relax.Expr:
    """A scalar, or an array of numbers."""
    return relax.const(np.asarray(value).astype(np.dtype(dtype)), dtype)


def numbers_of(value: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of a constant, None for other expressions."""
    return value.value.numpy() if isinstance(value, tvm.ir.GenericConst) else None
