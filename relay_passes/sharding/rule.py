"""Sharding rules: along which axes the operands and results of one operation are sharded together.

A machine has a range of a sharded axis. The axis may consist of several equal blocks, each divided at the same bounds.
For example, the columns of a fused query-key-value projection are three blocks of heads.

    query            key              value
    0  1 │ 2  3      0  1 │ 2  3      0  1 │ 2  3       Axis(index, outer=3, length=4), ranges (0, 2) and (2, 4)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from tvm import relax

from relay_passes.ir import leaves_of, operator_name, shape_of, with_leaves
from relay_passes.sharding.region import INDICES, Range, ShardError

Array = np.ndarray[Any, Any]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Axis:
    """The sharded axis ``index`` of a value: ``outer`` blocks of ``length`` indices with the same bounds."""

    index: int
    outer: int
    length: int

    def at(self, index: int) -> Axis:
        return Axis(index, self.outer, self.length)

    def part_of(self, array: Array, begin: int, end: int) -> Array:
        """Return an array with the indices from ``begin`` to before ``end`` of each block."""
        before, behind = array.shape[: self.index], array.shape[self.index + 1 :]
        blocks = array.reshape((*before, self.outer, self.length, *behind))
        part = blocks[(slice(None),) * (self.index + 1) + (slice(begin, end),)]
        return part.reshape((*before, self.outer * (end - begin), *behind))


@dataclass(frozen=True)
class Operand:
    """A tensor or tuple that an operation reads, with the sharded axis of each field; None for a whole field."""

    expression: relax.Expr
    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...] = (None,)

    @property
    def axis(self) -> Axis | None:
        return self.axes[0]


@dataclass(frozen=True)
class Operation:
    """The operation that a variable is bound to, with its operands; ``shape`` is that of its first result.

    With ``by_blocks`` (channels, heads), the ranges of all values have the same proportions, and partial sums are
    possible. Otherwise (rows, columns, batch), a machine may read any range, and an axis is one block. ``hint`` says
    what to do if it is refused.
    """

    name: str
    expression: relax.Expr
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    axis_name: str
    hint: str = "; end the sharded layers before it, or begin them behind it"

    @property
    def by_blocks(self) -> bool:
        return self.axis_name not in INDICES

    @property
    def is_tuple(self) -> bool:
        return isinstance(self.expression.ty, relax.TupleType)

    @cached_property
    def names(self) -> list[str]:
        """The names of the operands, an empty string for a constant."""
        return [getattr(operand.expression, "name", "") for operand in self.operands]

    def with_axes(self, axes: Sequence[tuple[Axis | None, ...] | None]) -> Operation:
        """Return the operation with operands that are sharded along these axes; None for a whole one."""
        pairs = zip(self.operands, axes, strict=True)
        return replace(
            self,
            operands=tuple(Operand(old.expression, old.shape, operand_axes or (None,)) for old, operand_axes in pairs),
        )

    @cached_property
    def operator(self) -> str:
        return operator_name(self.expression) or type(self.expression).__name__

    def refused(self, reason: str) -> ShardError:
        what = f"{self.name!r} ({self.operator}) cannot be split along {self.axis_name}"
        return ShardError(f"{what}: {reason}{self.hint}")

    def only_first(self) -> Axis:
        """Return the sharded axis of the first operand; raise `ShardError` unless only this operand is sharded."""
        first, *more = self.operands
        if first.axis is None or any(operand.axis is not None for operand in more):
            raise self.refused("it reads a split tensor in another place than the first")
        return first.axis


def operation_of(binding: relax.VarBinding, axis_name: str) -> Operation:
    """Return the operation of a binding, with no operand sharded."""
    operands = tuple(Operand(leaf, shape_of(leaf)) for leaf in leaves_of(binding.value))
    return Operation(binding.var.name, binding.value, operands, shape_of(binding.var), axis_name)


Emit = Callable[[relax.Expr], relax.Var]
"""Binds an intermediate expression of a part to a variable and returns the variable."""

Needs = Callable[[Range], tuple[Range | None, ...]]
"""Maps a range of the result to the range of each operand; None for one that is read whole or not at all."""

Write = Callable[[Range, Sequence[relax.Expr], Emit], relax.Expr]
"""Builds a machine's operation from its range of the result and its operands.

An operand that only the first machine reads is None on the others.
"""


@dataclass(frozen=True)
class Rule:
    """How an operation computes on sharded operands, and how its results are then sharded.

    ``operands`` has the sharded axis of each operand, None for one that is read whole. ``results`` has the axis of the
    result, or of each field of a tuple. With ``reduced``, each machine instead has a partial result: the sum, maximum
    or minimum over its range of the operands. Without ``needs``, a range of the result needs the same range of the
    operands, or one in proportion to their lengths. Without ``write``, a machine's operation differs from the whole one
    in its operands only. If ``blocks`` is set, bounds may lie only between that many equal blocks. With ``divides``,
    the operation divides the axis into several, of which the outermost is sharded (heads).

    ``is_partial`` marks the operands of which each machine reads its own partial sum. ``is_on_first`` marks those that
    only the first machine reads; the other machines call ``write``, with None for these operands.
    """

    operands: tuple[Axis | None, ...]
    results: tuple[Axis | None, ...]
    reduced: Literal["sum", "max", "min"] | None = None
    needs: Needs | None = None
    write: Write | None = None
    blocks: int | None = None
    divides: bool = False
    is_partial: tuple[bool, ...] = ()
    is_on_first: tuple[bool, ...] = ()

    @property
    def read_axis(self) -> Axis:
        """The axis of the first operand that is read in parts."""
        return next(axis for axis in self.operands if axis is not None)

    @property
    def axis(self) -> Axis:
        """The axis whose ranges machines compute: that of the results, or the reduced one of the operands."""
        return self.read_axis if self.reduced else next(axis for axis in self.results if axis is not None)

    @property
    def is_local(self) -> bool:
        """Whether each range of the result needs the same range of its operands."""
        return self.needs is None and all(axis is None or axis.length == self.axis.length for axis in self.operands)

    def ranges(self, result_range: Range) -> tuple[Range | None, ...]:
        """Return the range of each operand that ``result_range`` needs; None for one read whole or not at all."""
        if self.needs is not None:
            return self.needs(result_range)
        length = self.axis.length
        return tuple(
            None if axis is None else proportional(result_range, length, axis.length) for axis in self.operands
        )

    def written(
        self, operation: Operation, result_range: Range, operands: Sequence[relax.Expr], emit: Emit
    ) -> relax.Expr:
        """Return a machine's operation for ``result_range``; ``operands`` are already the ranges that it needs."""
        is_first = bool(self.is_partial) and all(operand is not None for operand in operands)
        if self.write is not None and not is_first:
            return self.write(result_range, operands, emit)
        return with_leaves(operation.expression, operands)


def proportional(part: Range, length: int, other_length: int) -> Range:
    """Return the smallest range of ``other_length`` indices that covers the same share as ``part`` of ``length``."""
    return part[0] * other_length // length, -(-part[1] * other_length // length)


def same_range(operation: Operation, axis: Axis, result: Axis | None = None) -> Rule:
    """Return the rule of an operation that needs the same range of its first operand, and its other operands whole.

    ``result`` is the axis of the result, by default the operand's.
    """
    return Rule((axis, *[None] * (len(operation.operands) - 1)), (result or axis,))


def reading(operation: Operation, axis: Axis, read: Callable[[Range], Range], write: Write) -> Rule:
    """Return the rule of an operation that reads the range ``read(result_range)`` of its first operand, clipped.

    It reads its other operands whole.
    """
    rest = (None,) * (len(operation.operands) - 1)

    def needs(result_range: Range) -> tuple[Range | None, ...]:
        return inside(operation, read(result_range), axis.length), *rest

    return Rule((axis, *rest), (Axis(axis.index, 1, operation.shape[axis.index]),), needs=needs, write=write)


def inside(operation: Operation, needed: Range, length: int) -> Range:
    first, end = max(0, needed[0]), min(length, needed[1])
    if first >= end:
        raise operation.refused("a part of its result would be made of padding alone")
    return first, end


def sliced(tensor: relax.Expr, axis: int, part: Range) -> relax.Expr:
    return relax.op.strided_slice(tensor, [axis], [part[0]], [part[1]], assume_inbound=True)


def replaced_at(values: Sequence[Value], place: int, value: Value) -> list[Value]:
    return [value if index == place else old for index, old in enumerate(values)]
