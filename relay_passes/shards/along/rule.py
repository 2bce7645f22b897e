"""Results of the rules for an operator whose operands are split along an axis.

*Along*: each range of the result's indices is computed from a range of each operand's indices. *Total*: the operator
reduces the axis. Each part of the operand gives a partial result (sum or maximum); all of them give the whole result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax

from relay_passes.ir import operator_name, with_leaves
from relay_passes.shards.region import ShardError

Range = tuple[int, int]
"""A half-open range of an axis's indices: (first, end)."""

Emit = Callable[[relax.Expr], relax.Var]
"""Binds an intermediate expression of a rule to a variable and returns the variable."""


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation reads; ``axis`` is the axis it is split along, None if every machine has it whole."""

    expression: relax.Expr
    shape: tuple[int, ...]
    axis: int | None


@dataclass(frozen=True)
class Operation:
    """The operation that a variable is bound to, with its tensor operands; ``shape`` is that of its first result."""

    name: str
    expression: relax.Expr
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    axis_name: str

    @property
    def operator(self) -> str:
        return operator_name(self.expression) or type(self.expression).__name__

    def refused(self, reason: str) -> ShardError:
        hint = "end the shard before it, or begin it behind it"
        return ShardError(f"{self.name!r} ({self.operator}) cannot be split along {self.axis_name}: {reason}; {hint}")

    def only_first(self) -> int:
        """Return the axis of the first operand; raise `ShardError` unless it alone is split."""
        first, *others = self.operands
        if first.axis is None or any(each.axis is not None for each in others):
            raise self.refused("it reads a split tensor in another place than the first")
        return first.axis


@dataclass(frozen=True)
class Along:
    """The rule of a result that is split along ``axis``.

    ``operand_axes`` has each operand's axis, None for an operand that is read whole. ``needs`` maps a range of the
    result to the range of each operand, None if nothing is read. ``write`` computes a range of the result from exactly
    these. A result is ``local`` if each of its ranges needs the same range of its operands.
    """

    axis: int
    operand_axes: tuple[int | None, ...]
    needs: Callable[[Range], tuple[Range | None, ...]]
    write: Callable[[Range, Sequence[relax.Expr | None], Emit], relax.Expr]
    local: bool = False


@dataclass(frozen=True)
class Total:
    """The rule of a result that is reduced over the split axis of its only operand.

    ``write`` computes the partial result of a range of the operand, and ``combine`` combines two partial results.
    ``finish`` computes the result from the combination of all; None if that is the result.
    """

    write: Callable[[relax.Expr, Emit], relax.Expr]
    combine: Callable[[relax.Expr, relax.Expr], relax.Expr]
    finish: Callable[[relax.Expr], relax.Expr] | None = None


def same_range(operation: Operation, axis: int, operand_axes: tuple[int | None, ...]) -> Along:
    """Return the rule of an operation that is written for parts as for whole values."""
    expression = operation.expression

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        return tuple(None if each is None else wanted for each in operand_axes)

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        return with_leaves(expression, parts)

    return Along(axis, operand_axes, needs, write, local=True)


def sliced(tensor: relax.Expr, axis: int, taken: Range) -> relax.Expr:
    """Return a slice of a tensor along an axis."""
    return relax.op.strided_slice(tensor, [axis], [taken[0]], [taken[1]], assume_inbound=True)


def replaced_at(values: Sequence[int], place: int, value: int) -> list[int]:
    return [value if index == place else each for index, each in enumerate(values)]
