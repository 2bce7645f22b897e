"""What an operation of StableHLO is given: values, and what is known of them before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxlib.mlir import ir
from tvm import relax

from tvm_split.frontends.axis_orders import Value, in_place
from tvm_split.frontends.stablehlo.attributes import result_kind
from tvm_split.frontends.stablehlo.folding import without_repeats
from tvm_split.frontends.stablehlo.modules import Array


def of_array(array: Array) -> Value:
    """A constant."""
    compact = np.ascontiguousarray(without_repeats(array)).reshape(
        [min(size, 1) if step == 0 else size for size, step in zip(array.shape, array.strides, strict=True)]
    )
    return in_place(relax.const(compact, str(array.dtype)), array.shape)


@dataclass(frozen=True)
class Call:
    """An operation, its operands, and what is known of them before anything runs."""

    operation: ir.Operation
    operands: tuple[Value, ...]
    known: tuple[Array | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return result_kind(self.operation)[0]

    @property
    def dtype(self) -> str:
        """The dtype of the first result."""
        return str(result_kind(self.operation)[1])
