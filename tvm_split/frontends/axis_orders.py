"""Tensors whose axes lie in whatever order they were computed in, and repeat themselves only where that is asked for.

JAX, TensorFlow and TFLite have channels last, kernels are fastest with channels first: a convolution gives its
result as it was computed, elementwise operations keep that order, and nothing is transposed until an operation needs
another one. In the same way a broadcast is a size of 1, as the elementwise operations of Relax take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tvm_split.frontends.operators import Operators, dtype_of, numbers_of, shape_of


@dataclass(frozen=True)
class Arrangement:
    """How a variable of the Relax function holds a tensor of the source: its axes' order, and its own sizes."""

    order: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The source's tensor as the variable holds it."""
        once = tuple(slice(None) if size != 1 else slice(0, 1) for size in self.sizes)
        return np.asarray(array.transpose(self.order)[once], order="C")


@dataclass(frozen=True)
class Value:
    """A tensor of ``shape``: axis i of ``expr`` is axis ``order[i]`` of it, in full, or 1 where it repeats itself."""

    expr: relax.Expr
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return dtype_of(self.expr)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_constant(self) -> bool:
        return numbers_of(self.expr) is not None

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(self.order, tuple(shape_of(self.expr)))

    def repeats(self, axis: int) -> bool:
        """Whether the tensor is the same all along an axis, and ``expr`` has it once."""
        return self.shape[axis] != 1 and shape_of(self.expr)[self.order.index(axis)] == 1


def in_place(expr: relax.Expr, shape: Sequence[int] | None = None) -> Value:
    """A value whose axes lie as they are numbered."""
    shape = tuple(shape_of(expr) if shape is None else shape)
    return Value(expr, tuple(range(len(shape))), shape)


class Arranger(Operators):
    """Relax's operators, and values brought into the order in which an operator takes them, each once."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._arranged: dict[tuple[str, tuple[int, ...], tuple[int, ...]], relax.Expr] = {}

    def in_order(self, value: Value, order: Sequence[int]) -> relax.Expr:
        """``value`` with its axes in ``order``; what repeats itself stays of size 1."""
        order = tuple(order)
        if order == value.order:
            return value.expr
        places = [value.order.index(axis) for axis in order]
        numbers = numbers_of(value.expr)
        if numbers is not None:
            return relax.const(np.ascontiguousarray(numbers.transpose(places)), value.dtype)
        key = (value.expr.name, value.order, order)
        if key not in self._arranged:
            sizes = shape_of(value.expr)
            moved = [place for place in places if sizes[place] != 1]
            if moved == sorted(moved):  # only axes of size 1 change places
                self._arranged[key] = self.reshape(value.expr, [sizes[place] for place in places])
            else:
                self._arranged[key] = self.permute_dims(value.expr, places)
        return self._arranged[key]

    def full(self, value: Value, order: Sequence[int] | None = None) -> relax.Expr:
        """``value`` with its axes in ``order``, or as they are numbered, and all of its elements."""
        order = range(value.rank) if order is None else order
        return self.repeated(self.in_order(value, order), [value.shape[axis] for axis in order])

    def repeated(self, expr: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """``expr`` in this shape, repeated where it has a size of 1."""
        if shape_of(expr) == list(shape):
            return expr
        numbers = numbers_of(expr)
        if numbers is not None:
            return relax.const(np.ascontiguousarray(np.broadcast_to(numbers, shape)), dtype_of(expr))
        return self.broadcast_to(expr, list(shape))

    def shaped(self, expr: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """``expr`` reshaped, if it is of another shape."""
        if shape_of(expr) == list(shape):
            return expr
        numbers = numbers_of(expr)
        if numbers is not None:
            return relax.const(numbers.reshape(shape), dtype_of(expr))
        return self.reshape(expr, list(shape))

    def filled(self, expr: relax.Expr, widths: Sequence[int], filling: float) -> relax.Expr:
        """``expr`` with ``widths`` of ``filling`` before and after each of its axes."""
        dtype = dtype_of(expr)
        padded = self.nn.pad(self.cast(expr, "int8") if dtype == "bool" else expr, list(widths), "constant", filling)
        return self.cast(padded, dtype)

    def as_dtype(self, value: Value, dtype: str) -> Value:
        """``value`` in another dtype."""
        return Value(self.cast(value.expr, dtype), value.order, value.shape)


def leading_order(values: Sequence[Value]) -> tuple[int, ...]:
    """The order of the largest value that is no constant, which is the one not to transpose."""

    def weight(value: Value) -> tuple[int, bool]:
        return int(np.prod(shape_of(value.expr))) if value.rank else 0, not value.is_constant

    candidates = [value for value in values if not value.is_constant] or list(values)
    return max(candidates, key=weight).order
