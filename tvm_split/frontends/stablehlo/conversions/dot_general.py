"""Products of matrices and of everything that can be laid out as matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxlib.mlir.dialects import stablehlo

from tvm_split.frontends.axis_orders import Arranger, Value
from tvm_split.frontends.stablehlo.values import Call


def _dot_general(op: Arranger, call: Call) -> Value:
    numbers = stablehlo.DotDimensionNumbers(call.operation.attributes["dot_dimension_numbers"])
    left_batch, right_batch = list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)
    left_summed, right_summed = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    return _product(op, call, (left_batch, right_batch), (left_summed, right_summed))


def _dot(op: Arranger, call: Call) -> Value:
    left = call.operands[0]
    return _product(op, call, ([], []), ([left.rank - 1], [0]))


def _product(
    op: Arranger, call: Call, batch: tuple[Sequence[int], Sequence[int]], summed: tuple[Sequence[int], Sequence[int]]
) -> Value:
    # Integers are multiplied in the dtype of the result, and half precision that is asked for in float32 as well.
    left, right = (op.as_dtype(value, call.dtype) for value in call.operands)
    places = list(range(len(call.shape)))
    left_free, right_free = (
        _free(value, *axes) for value, axes in zip((left, right), zip(batch, summed, strict=True), strict=True)
    )
    # The axes of the result: the batch's, then what is left of each operand, each in the operand's own order of axes.
    first = len(batch[0])
    of_left = dict(zip(sorted(left_free), places[first:], strict=False))
    of_right = dict(zip(sorted(right_free), places[first + len(left_free) :], strict=False))
    if left.is_constant and not right.is_constant and not batch[0]:
        left, right, left_free, right_free, of_left, of_right = right, left, right_free, left_free, of_right, of_left
        summed = summed[1], summed[0]
    sums = math.prod(left.shape[axis] for axis in summed[0])
    batches = [left.shape[axis] for axis in batch[0]]
    columns = math.prod(right.shape[axis] for axis in right_free)
    rows = [left.shape[axis] for axis in left_free]
    if batch[0] or len(rows) == 0:
        rows = [math.prod(rows)]
    one = op.shaped(op.full(left, [*batch[0], *left_free, *summed[0]]), [*batches, *rows, sums])
    other = op.shaped(op.full(right, [*batch[1], *summed[1], *right_free]), [*batches, sums, columns])
    result = op.matmul(one, other)
    order = [*places[:first], *(of_left[axis] for axis in left_free), *(of_right[axis] for axis in right_free)]
    return Value(op.shaped(result, [call.shape[axis] for axis in order]), tuple(order), call.shape)


def _free(value: Value, batch: Sequence[int], summed: Sequence[int]) -> list[int]:
    """The axes that are neither the batch's nor summed over, in the order in which they lie."""
    return [axis for axis in value.order if axis not in batch and axis not in summed]


CONVERTERS: dict[str, Callable[[Arranger, Call], Value]] = {
    "stablehlo.dot_general": _dot_general,
    "stablehlo.dot": _dot,
}
"""By the operation's name."""
