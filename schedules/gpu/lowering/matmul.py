"""Lower relax.matmul for a GPU to a batch of contractions."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np
from tvm import relax, te
from tvm.relax import BlockBuilder

from schedules.gpu.lowering.contraction import Contraction, Operand, contract
from schedules.gpu.tile import Gpu
from schedules.relax_tools import FUSABLE, broadcast_index, default_legalization, ravel, static_shape, unravel


def legalize_matmul(builder: BlockBuilder, call: relax.Call, gpu: Gpu) -> relax.Expr:
    """Lower products of static matrices and batches of them; vectors and symbolic shapes are left to TVM."""
    shapes = [static_shape(argument) for argument in call.args]
    if any(shape is None or len(shape) < 2 or 0 in shape for shape in shapes):
        return default_legalization(builder, call)
    compute = partial(_matmul, out_dtype=str(call.ty.dtype), gpu=gpu)
    return builder.call_te(compute, *call.args, primfunc_name_hint="matmul", primfunc_attrs=FUSABLE)


def _matmul(left: te.Tensor, right: te.Tensor, out_dtype: str, gpu: Gpu) -> te.Tensor:
    """The product of left [..., M, K] and right [..., K, N]: [..., M, N]; batch axes are broadcast."""
    left_shape, right_shape = ([int(extent) for extent in tensor.shape] for tensor in (left, right))
    (rows, depth), columns = left_shape[-2:], right_shape[-1]
    left_batch, right_batch = left_shape[:-2], right_shape[:-2]
    outer = np.broadcast_shapes(tuple(left_batch), tuple(right_batch))
    # If the whole batch shares one matrix, the batch becomes more rows.
    shared, batch_extent = prod(right_batch) == 1, prod(outer)
    batch, all_rows = (1, batch_extent * rows) if shared else (batch_extent, rows)

    def read_left(at: Any, _: Any, k: Any, row: Any) -> Any:
        if shared and batch_extent > 1:
            at, row = row // rows, row % rows
        return left[(*broadcast_index(unravel(at, outer), left_batch), row, k)]

    def read_right(at: Any, _: Any, k: Any, column: Any) -> Any:
        return right[(*broadcast_index(unravel(at, outer), right_batch), k, column)]

    product = contract(
        Contraction(
            left=Operand(read_left, str(left.dtype), contiguous_depth=depth),
            right=Operand(read_right, str(right.dtype), contiguous=columns),
            batch=batch,
            rows=all_rows,
            columns=columns,
            depth=depth,
            out_dtype=out_dtype,
            contiguous=columns,
        ),
        "matmul",
        gpu,
    )

    def store(*index: Any) -> Any:
        *at, row, column = index
        flat = ravel(at, outer)
        value = product(0, flat * rows + row, column) if shared else product(flat, row, column)
        return value.astype(out_dtype)

    return te.compute((*outer, rows, columns), store, name="store")
