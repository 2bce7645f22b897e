"""The argument of StableHLO's conversions, and readers of an operation's attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from tvm import relax

from tvm_split.frontends.convert import Call
from tvm_split.frontends.operators import numbers_of
from tvm_split.frontends.stablehlo.modules import Array, array_of, shape_and_dtype


class HloCall(Call):
    """An operation and its operands.

    ``operands`` have the same rank, but size 1 along axes on which they only repeat; elementwise operators broadcast
    them.
    """

    def whole(self, place: int) -> relax.Expr:
        """An operand in its whole shape."""
        return self.importer.whole(self.source.operands[place])

    def known(self, place: int) -> Array | None:
        """The values of an operand that depends on no input of the model, with size 1 where they only repeat."""
        return numbers_of(self.operands[place])

    def shape_of(self, place: int) -> list[int]:
        """The shape of an operand."""
        return list(ir.RankedTensorType(self.source.operands[place].type).shape)


def result_kind(operation: ir.Operation, place: int = 0) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of one result of static shape."""
    shape, dtype = shape_and_dtype(operation.results[place].type)
    return tuple(size for size in shape if size is not None), np.dtype(dtype)


def integers(operation: ir.Operation, name: str, otherwise: Any = None) -> list[int]:
    """The integers of an array attribute; ``otherwise`` if it is absent."""
    if name not in operation.attributes:
        return list(otherwise or ())
    attribute = operation.attributes[name]
    if isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseBoolArrayAttr):
        return [int(number) for number in attribute]
    return [int(number) for number in array_of(attribute).ravel()]


def integer(operation: ir.Operation, name: str, otherwise: int = 0) -> int:
    return ir.IntegerAttr(operation.attributes[name]).value if name in operation.attributes else otherwise


def pairs(operation: ir.Operation, name: str, count: int) -> list[tuple[int, int]]:
    """Two numbers for each of ``count`` axes, such as paddings; zeros if the attribute is absent."""
    if name not in operation.attributes:
        return [(0, 0)] * count
    return [(int(low), int(high)) for low, high in array_of(operation.attributes[name]).reshape(-1, 2)]


def word(operation: ir.Operation, name: str) -> str:
    """An enumeration's value (``LT`` of ``#stablehlo<comparison_direction LT>``) or a string; "" if it is absent."""
    if name not in operation.attributes:
        return ""
    attribute = operation.attributes[name]
    if isinstance(attribute, ir.StringAttr):
        return str(attribute.value)
    return str(attribute).rstrip(">").rpartition(" ")[2]


def comparison(operation: ir.Operation) -> str:
    """The direction of a comparison: ``LT``, ``EQ`` and so on."""
    return word(operation, "comparison_direction")
