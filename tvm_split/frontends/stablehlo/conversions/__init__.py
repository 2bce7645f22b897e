"""Conversions of StableHLO's operations to Relax, and their argument."""

from jaxlib.mlir import ir
from tvm import relax

from rpc_runtime.program.specs import Array
from tvm_split.frontends.convert import Call
from tvm_split.frontends.operators import numbers_of


class HloCall(Call):
    """An operation and its operands.

    ``operands`` have the rank of the source's, but size 1 along axes on which their elements only repeat. Elementwise
    operators broadcast them.
    """

    def whole(self, place: int) -> relax.Expr:
        """An operand, broadcast to its full shape."""
        return self.importer.whole(self.source.operands[place])

    def known(self, place: int) -> Array | None:
        """The values of an operand that depends on no model input, else None; axes of repeated values have size 1."""
        return numbers_of(self.operands[place])

    def shape_of(self, place: int) -> list[int]:
        return list(ir.RankedTensorType(self.source.operands[place].type).shape)
