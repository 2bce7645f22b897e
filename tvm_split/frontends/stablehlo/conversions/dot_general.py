"""Convert products of matrices, and general contractions that reshape to them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir.dialects import stablehlo
from tvm import relax

from tvm_split.frontends.operators import Operators, numbers_of, shape_of
from tvm_split.frontends.stablehlo.conversions.call import Call, Conversions


def _dot_general(op: Operators, call: Call) -> relax.Expr:
    numbers = stablehlo.DotDimensionNumbers(call.operation.attributes["dot_dimension_numbers"])
    batch = list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)
    summed = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    return _product(op, call, batch, summed)


def _dot(op: Operators, call: Call) -> relax.Expr:
    return _product(op, call, ([], []), ([len(call.shape_of(0)) - 1], [0]))


def _product(
    op: Operators, call: Call, batch: tuple[Sequence[int], Sequence[int]], summed: tuple[Sequence[int], Sequence[int]]
) -> relax.Expr:
    # Operands are cast to the result's dtype: integers need it, and half precision with a float32 result.
    left, right = (op.cast(call[place], call.dtype) for place in (0, 1))
    free = [
        [axis for axis in range(len(shape_of(value))) if axis not in around and axis not in within]
        for value, around, within in zip((left, right), batch, summed, strict=True)
    ]
    # The axes of the result: those of the batch, then the free axes of each operand.
    places = list(range(len(call.shape)))
    first, second = len(batch[0]), len(batch[0]) + len(free[0])
    order = places
    if numbers_of(left) is not None and numbers_of(right) is None and not batch[0]:  # weights come second
        left, right, summed, free = right, left, summed[::-1], free[::-1]
        order = [*places[:first], *places[second:], *places[first:second]]
    batches = [shape_of(left)[axis] for axis in batch[0]]
    rows = [shape_of(left)[axis] for axis in free[0]]
    if batch[0] or not rows:
        rows = [math.prod(rows)]
    sums = math.prod(shape_of(left)[axis] for axis in summed[0])
    columns = math.prod(shape_of(right)[axis] for axis in free[1])
    one = op.shaped(op.transposed(left, [*batch[0], *free[0], *summed[0]]), [*batches, *rows, sums])
    other = op.shaped(op.transposed(right, [*batch[1], *summed[1], *free[1]]), [*batches, sums, columns])
    result = op.shaped(op.matmul(one, other), [call.shape[axis] for axis in order])
    return op.transposed(result, np.argsort(order).tolist())


CONVERSIONS: Conversions = {"stablehlo.dot_general": _dot_general, "stablehlo.dot": _dot}
