"""Lookup table from operator to its rule for splitting along an axis."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from relay_passes.shards.along import elementwise, resampling, shapes, windows
from relay_passes.shards.along.rule import Along, Operation, Total, same_range

Rule = Callable[[Operation], Along | Total]


def rule_of(operation: Operation) -> Along | Total:
    """Return the rule of an operation that has a split operand.

    Raises:
        ShardError: no rule is known for the operator, or the operation cannot be split along this axis.
    """
    if isinstance(operation.expression, relax.TupleGetItem):
        return elementwise.tuple_field(operation)
    rule = _RULES.get(operation.operator)
    if rule is None:
        raise operation.refused("no rule is known for this operator")
    return rule(operation)


def _product(operation: Operation) -> Along:
    left, right = operation.operands
    contracts = left.axis == len(left.shape) - 1 or right.axis == len(right.shape) - 2
    return resampling.interpolation(operation) if contracts else shapes.matmul(operation)


def _first_operand(operation: Operation) -> Along:
    axis = operation.only_first()
    return same_range(operation, axis, (axis,))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(elementwise.ELEMENTWISE, elementwise.elementwise),
    **dict.fromkeys(elementwise.NORMALISED_AXES, elementwise.normalised),
    **dict.fromkeys(elementwise.REDUCTIONS, elementwise.reduced),
    **{f"relax.nn.adaptive_avg_pool{rank}d": elementwise.adaptive_pool for rank in (1, 2, 3)},
    **{f"relax.nn.{kind}_pool{rank}d": windows.pool for kind in ("avg", "max") for rank in (1, 2, 3)},
    **{f"relax.nn.conv{rank}d": windows.convolution for rank in (1, 2, 3)},
    **{f"relax.nn.conv{rank}d_transpose": windows.transposed_convolution for rank in (1, 2, 3)},
    "relax.nn.pad": windows.pad,
    "relax.nn.dropout": _first_operand,
    "relax.nn.attention": elementwise.attention,
    "relax.nn.attention_bias": elementwise.attention,
    "relax.nn.batch_flatten": shapes.reshape,
    "relax.flatten": shapes.reshape,
    "relax.reshape": shapes.reshape,
    "relax.expand_dims": shapes.reshape,
    "relax.squeeze": shapes.reshape,
    "relax.permute_dims": shapes.permute,
    "relax.broadcast_to": shapes.broadcast,
    "relax.concat": shapes.concat,
    "relax.stack": shapes.stack,
    "relax.split": shapes.split,
    "relax.strided_slice": shapes.strided_slice,
    "relax.matmul": _product,
    "relax.take": resampling.take,
    "relax.image.resize2d": resampling.resize,
}
