"""relax.matmul -> TE with the right operand in column blocks, rows padded to whole register tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from tvm_split.schedules.blocks import ANCHOR
from tvm_split.schedules.cpu.matmul import FAMILY as MATMUL
from tvm_split.schedules.cpu.register_tile import padded_extent
from tvm_split.schedules.legalize.common import (
    OUT_ELEMENTWISE_FUSABLE,
    accumulator_dtype,
    default_legalization,
)
from tvm_split.schedules.shapes import static_shape
from tvm_split.schedules.traits import Traits

PATTERN = {"op_pattern": OUT_ELEMENTWISE_FUSABLE}


def legalize_matmul(traits: Traits) -> Callable[[BlockBuilder, relax.Call], relax.Expr]:
    """Two activations: the right one is packed on the way. Vectors and symbolic shapes are left to TVM."""

    def legalize(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
        left, right = call.args
        shapes = [static_shape(argument) for argument in (left, right)]
        if any(shape is None or len(shape) < 2 or 0 in shape for shape in shapes):
            return default_legalization(builder, call)
        return builder.call_te(
            partial(matmul_with_packing, out_dtype=str(call.ty.dtype), traits=traits),
            left,
            right,
            primfunc_name_hint="matmul",
            primfunc_attrs=PATTERN,
        )

    return legalize


def matmul_with_packing(left: te.Tensor, right: te.Tensor, out_dtype: str, traits: Traits) -> te.Tensor:
    """Left [..., M, K], right [..., K, N], batch axes broadcast."""
    batch = [int(extent) for extent in right.shape[:-2]]
    depth, columns = int(right.shape[-2]), int(right.shape[-1])
    lanes = traits.lanes
    blocks = -(-columns // lanes)

    def element(*index: Any) -> Any:
        *at, block, k, lane = index
        column = block * lanes + lane
        if columns % lanes:
            column = tirx.min(column, columns - 1)
        return right[(*at, k, column)]

    packed = te.compute((*batch, blocks, depth, lanes), element, name="pack")
    return matmul_packed(left, packed, columns, out_dtype, traits)


def matmul_packed(left: te.Tensor, packed: te.Tensor, columns: int, out_dtype: str, traits: Traits) -> te.Tensor:
    """Left [..., M, K] times packed [..., N/lanes, K, lanes] -> [..., M, N]; batch axes broadcast."""
    left_batch = [int(extent) for extent in left.shape[:-2]]
    right_batch = [int(extent) for extent in packed.shape[:-3]]
    count = max(len(left_batch), len(right_batch))
    left_batch = [1] * (count - len(left_batch)) + left_batch
    right_batch = [1] * (count - len(right_batch)) + right_batch
    batch = [max(pair) for pair in zip(left_batch, right_batch, strict=True)]
    rows, depth = int(left.shape[-2]), int(left.shape[-1])
    blocks, _, lanes = (int(extent) for extent in packed.shape[-3:])
    tiled_rows = padded_extent(rows, blocks, traits)
    dtype = accumulator_dtype(out_dtype)
    k = te.reduce_axis((0, depth), name="k")

    def at(index: tuple[Any, ...], extents: list[int], tensor: te.Tensor, own: int) -> list[Any]:
        indices = [0 if extent == 1 else value for value, extent in zip(index, extents, strict=True)]
        return indices[count - (len(tensor.shape) - own) :]

    def element(*index: Any) -> Any:
        *outer, block, row, lane = index
        # Rows beyond the last repeat it: their results are never stored.
        row = row if tiled_rows == rows else tirx.min(row, rows - 1)
        value = left[(*at(tuple(outer), left_batch, left, 2), row, k)]
        factor = packed[(*at(tuple(outer), right_batch, packed, 3), block, k, lane)]
        return te.sum(value.astype(dtype) * factor.astype(dtype), axis=k)

    product = te.compute((*batch, blocks, tiled_rows, lanes), element, name="matmul", attrs={ANCHOR: MATMUL})

    def store(*index: Any) -> Any:
        *outer, row, column = index
        return product[(*outer, column // lanes, row, column % lanes)].astype(out_dtype)

    return te.compute((*batch, rows, columns), store, name="store")
