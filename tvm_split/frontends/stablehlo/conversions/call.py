"""The arguments of a conversion: an operation of StableHLO and its operands in Relax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxlib.mlir import ir
from tvm import relax

from tvm_split.frontends.operators import Operators
from tvm_split.frontends.stablehlo.attributes import result_kind
from tvm_split.frontends.stablehlo.modules import Array


@dataclass(frozen=True)
class Call:
    """An operation and its operands; ``call[0]`` is the first operand in its whole shape.

    ``operands`` have the same rank, but size 1 along axes on which they only repeat; elementwise operators broadcast
    them. ``known`` has the values of operands that depend on no input of the model, and None for others.
    """

    operation: ir.Operation
    operands: tuple[relax.Expr, ...]
    known: tuple[Array | None, ...]
    whole: Callable[[ir.Value], relax.Expr]

    def __getitem__(self, place: int) -> relax.Expr:
        return self.whole(self.operation.operands[place])

    def shape_of(self, place: int) -> list[int]:
        """The shape of an operand."""
        return list(ir.RankedTensorType(self.operation.operands[place].type).shape)

    @property
    def shape(self) -> list[int]:
        """The shape of the first result."""
        return list(result_kind(self.operation)[0])

    @property
    def dtype(self) -> str:
        """The dtype of the first result."""
        return str(result_kind(self.operation)[1])


Conversion = Callable[[Operators, Call], relax.Expr | list[relax.Expr]]
Conversions = Mapping[str, Conversion]
"""Conversions by the operation's name."""
