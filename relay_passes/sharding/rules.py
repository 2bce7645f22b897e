"""The table of the sharding rules, by operator name."""

from collections.abc import Callable, Mapping

from relay_passes.sharding import compute_rules, resampling_rules, shape_rules, window_rules
from relay_passes.sharding.rule import Operation, Rule

RULES: Mapping[str, Callable[[Operation], Rule]] = {
    **dict.fromkeys(compute_rules.ELEMENTWISE, compute_rules.elementwise),
    **dict.fromkeys(compute_rules.NORMALISED_AXES, compute_rules.normalised),
    **dict.fromkeys(compute_rules.REDUCTIONS, compute_rules.reduction),
    **{f"relax.nn.adaptive_avg_pool{rank}d": compute_rules.adaptive_pool for rank in (1, 2, 3)},
    **{f"relax.nn.{kind}_pool{rank}d": window_rules.pool for kind in ("avg", "max") for rank in (1, 2, 3)},
    **{f"relax.nn.conv{rank}d": window_rules.convolution for rank in (1, 2, 3)},
    **{f"relax.nn.conv{rank}d_transpose": window_rules.transposed_convolution for rank in (1, 2, 3)},
    **{f"relax.{name}": shape_rules.reshape for name in ("reshape", "flatten", "squeeze")},
    "relax.expand_dims": shape_rules.expand_dims,
    "TupleGetItem": compute_rules.tuple_field,
    "relax.nn.batch_norm": compute_rules.batch_norm,
    "relax.nn.pad": window_rules.pad,
    "relax.nn.attention": compute_rules.attention,
    "relax.nn.attention_bias": compute_rules.attention,
    "relax.nn.batch_flatten": shape_rules.reshape,
    "relax.permute_dims": shape_rules.permute,
    "relax.broadcast_to": shape_rules.broadcast,
    "relax.concat": shape_rules.concat,
    "relax.stack": shape_rules.stack,
    "relax.split": shape_rules.split,
    "relax.strided_slice": shape_rules.strided_slice,
    "relax.matmul": compute_rules.matmul,
    "relax.take": resampling_rules.take,
    "relax.image.resize2d": resampling_rules.resize,
}


def rule_of(operation: Operation) -> Rule:
    """Return the rule of an operation that has a sharded operand.

    Raises:
        ShardError: no rule is known for the operator, or the operation cannot be sharded along this axis.
    """
    rule = RULES.get(operation.operator)
    if rule is None:
        raise operation.refused("no rule is known for this operator")
    passed = rule(operation)
    for operand, axis in zip(operation.operands, passed.operands, strict=True):
        if operand.axis is not None and operand.axis != axis:
            raise operation.refused("its operands are not sharded in the same way")
    return passed
