"""Operators that compute each index of the split axis independently, and operators that reduce it.

Elementwise operators broadcast: each machine needs the whole of an operand that lacks the axis or has length 1 there.
Softmax, norms and cumulative sums must compute over other axes. A reduction over the split axis is a `Total`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax

from relay_passes.ir import constant, with_leaves
from relay_passes.shards.along.rule import Along, Emit, Operation, Range, Total, same_range

_UNARY = (
    "abs acos acosh asin asinh astype atan atanh bitwise_not ceil clip cos cosh erf exp floor full_like isfinite isinf "
    "isnan log logical_not negative nn.gelu nn.gelu_tanh nn.leakyrelu nn.relu nn.selu nn.silu nn.softplus ones_like "
    "round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc zeros_like"
)
_SEVERAL = (
    "add atan2 bitwise_and bitwise_or bitwise_xor divide equal ewise_fma floor_divide floor_mod greater greater_equal "
    "left_shift less less_equal log_add_exp logical_and logical_or logical_xor maximum minimum mod multiply not_equal "
    "power right_shift subtract where"
)
ELEMENTWISE = frozenset(f"relax.{name}" for names in (_UNARY, _SEVERAL) for name in names.split())

# Operator → the attributes with the axes it computes over. The result has the operand's shape.
NORMALISED_AXES = {
    "relax.nn.softmax": ("axis",),
    "relax.nn.log_softmax": ("axis",),
    "relax.nn.layer_norm": ("axes",),
    "relax.nn.rms_norm": ("axes",),
    "relax.nn.group_norm": ("axes", "channel_axis"),
    "relax.nn.instance_norm": ("axes", "channel_axis"),
    "relax.nn.batch_norm": ("axis",),
    "relax.nn.prelu": ("axis",),
    "relax.cumsum": ("axis",),
    "relax.cumprod": ("axis",),
}
REDUCTIONS = frozenset(
    f"relax.{name}" for name in ("argmax", "argmin", "max", "mean", "min", "prod", "std", "sum", "variance")
)


def elementwise(operation: Operation) -> Along:
    rank = len(operation.shape)
    axes = {rank - len(each.shape) + each.axis for each in operation.operands if each.axis is not None}
    if len(axes) > 1:
        raise operation.refused(f"its operands have the axis in places {sorted(axes)} of the result")
    (axis,) = axes
    length = operation.shape[axis]
    places = [axis - rank + len(each.shape) for each in operation.operands]
    # If a split operand has one index, all machines need that index.
    single = [place >= 0 and each.shape[place] < length for place, each in zip(places, operation.operands, strict=True)]
    operand_axes = tuple(
        None if place < 0 or (one and each.axis is None) else place
        for place, one, each in zip(places, single, operation.operands, strict=True)
    )

    def needs(wanted: Range) -> tuple[Range | None, ...]:
        return tuple(
            None if place is None else (0, 1) if one else wanted
            for place, one in zip(operand_axes, single, strict=True)
        )

    def write(wanted: Range, parts: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        return with_leaves(operation.expression, parts)

    is_local = not any(one and place is not None for one, place in zip(single, operand_axes, strict=True))
    return Along(axis, operand_axes, needs, write, local=is_local)


def normalised(operation: Operation) -> Along:
    axis, attributes = operation.only_first(), operation.expression.attrs
    rank = len(operation.operands[0].shape)
    for name in NORMALISED_AXES[operation.operator]:
        value = getattr(attributes, name)
        over = range(rank) if value is None else [value] if isinstance(value, int) else value
        if axis in {int(each) % rank for each in over}:
            raise operation.refused("it computes over that axis")
    if operation.operator == "relax.nn.batch_norm" and (attributes.training or axis == int(attributes.axis)):
        raise operation.refused("it takes statistics of the batch")
    return same_range(operation, axis, (axis, *[None] * (len(operation.operands) - 1)))


def tuple_field(operation: Operation) -> Along:
    """Return the rule of a tuple's field; a batch norm's statistics are refused."""
    axis = operation.only_first()
    if len(operation.shape) != len(operation.operands[0].shape):
        raise operation.refused("it is no image of the tuple but statistics")
    return same_range(operation, axis, (axis,))


def reduced(operation: Operation) -> Along | Total:
    axis, attributes = operation.only_first(), operation.expression.attrs
    shape = operation.operands[0].shape
    given = attributes.axis
    over = (
        set(range(len(shape)))
        if given is None
        else {int(each) % len(shape) for each in ([given] if isinstance(given, int) else given)}
    )
    if axis not in over:
        kept = axis if attributes.keepdims else axis - sum(each < axis for each in over)
        return same_range(operation, kept, (axis,))
    axes, keeps = sorted(over), bool(attributes.keepdims)
    kind = operation.operator.removeprefix("relax.")
    if kind in ("sum", "mean"):
        count = np.array(np.prod([shape[each] for each in axes]), str(operation.expression.ty.dtype.dtype))
        return Total(
            lambda part, _: relax.op.sum(part, axes, keepdims=keeps),
            relax.op.add,
            (lambda total: relax.op.divide(total, constant(count))) if kind == "mean" else None,
        )
    if kind in ("max", "min"):
        reduce, combine = (relax.op.max, relax.op.maximum) if kind == "max" else (relax.op.min, relax.op.minimum)
        return Total(lambda part, _: reduce(part, axes, keepdims=keeps), combine)
    raise operation.refused("it computes over that axis")


def adaptive_pool(operation: Operation) -> Along | Total:
    """Return the rule of an adaptive average pool.

    A mean of all pixels is a sum of parts. Other sizes have windows of several lengths, and are refused.
    """
    axis, layout = operation.only_first(), str(operation.expression.attrs.layout)
    if layout[axis] in "NC":
        return same_range(operation, axis, (axis,))
    spatial = [place for place, letter in enumerate(layout) if letter in "DHW"]
    if any(operation.shape[place] > 1 for place in spatial):
        raise operation.refused(f"its result is {operation.shape}, and only a mean of all pixels is a sum in parts")
    count = np.array(
        np.prod([operation.operands[0].shape[place] for place in spatial]), str(operation.expression.ty.dtype.dtype)
    )
    return Total(
        lambda part, _: relax.op.sum(part, spatial, keepdims=True),
        relax.op.add,
        lambda total: relax.op.divide(total, constant(count)),
    )


def attention(operation: Operation) -> Along:
    """Return the rule of ``relax.nn.attention`` on [batch, tokens, heads, width] operands; only a batch is split."""
    axes = tuple(each.axis for each in operation.operands)
    if any(each not in (0, None) for each in axes[:3]) or 0 not in axes[:3]:
        raise operation.refused("only a batch is split")
    batch = operation.shape[0]
    return same_range(operation, 0, tuple(0 if each.shape[0] == batch else None for each in operation.operands))
