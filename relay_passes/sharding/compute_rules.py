"""Rules of operators that compute each index of the sharded axis independently, of products, and of reductions.

Elementwise operators broadcast: each machine needs the whole of an operand that lacks the axis or has length 1 there.
Softmax, norms and cumulative sums must compute over other axes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relay_passes.ir import call_like, constant
from relay_passes.sharding.region import Range
from relay_passes.sharding.resampling_rules import interpolation
from relay_passes.sharding.rule import Axis, Emit, Operation, Rule, Write, same_range

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

NORMALISED_AXES = {
    "relax.nn.softmax": ("axis",),
    "relax.nn.log_softmax": ("axis",),
    "relax.nn.layer_norm": ("axes",),
    "relax.nn.rms_norm": ("axes",),
    "relax.nn.group_norm": ("axes", "channel_axis"),
    "relax.nn.instance_norm": ("axes", "channel_axis"),
    "relax.nn.prelu": ("axis",),
    "relax.quantize": ("axis",),
    "relax.dequantize": ("axis",),
    "relax.cumsum": ("axis",),
    "relax.cumprod": ("axis",),
}
"""Operator → the attributes with the axes it computes over. The result has the operand's shape."""

REDUCTIONS = frozenset(
    f"relax.{name}" for name in ("argmax", "argmin", "max", "mean", "min", "prod", "std", "sum", "variance")
)


def elementwise(operation: Operation) -> Rule:
    rank, operands = len(operation.shape), operation.operands
    indices = {rank - len(operand.shape) + operand.axis.index for operand in operands if operand.axis is not None}
    if len(indices) > 1:
        raise operation.refused(f"its operands have the axis in places {sorted(indices)} of the result")
    (index,) = indices
    length = operation.shape[index]
    places = [index - rank + len(operand.shape) for operand in operands]
    # If a sharded operand has one index, all machines need that index.
    is_single = [place >= 0 and operand.shape[place] < length for operand, place in zip(operands, places, strict=True)]
    sharded = (operand.axis for operand, single in zip(operands, is_single, strict=True) if not single)
    axis = next(
        (operand_axis.at(index) for operand_axis in sharded if operand_axis is not None), Axis(index, 1, length)
    )
    axes = tuple(
        operand.axis if single or place < 0 else axis.at(place)
        for operand, place, single in zip(operands, places, is_single, strict=True)
    )
    if not any(single and operand_axis is not None for operand_axis, single in zip(axes, is_single, strict=True)):
        return Rule(axes, (axis,))

    def needs(result_range: Range) -> tuple[Range | None, ...]:
        ranges = ((0, 1) if single else result_range for single in is_single)
        return tuple(
            None if operand_axis is None else operand_range
            for operand_axis, operand_range in zip(axes, ranges, strict=True)
        )

    return Rule(axes, (axis,), needs=needs)


def normalised(operation: Operation) -> Rule:
    axis, attributes = operation.only_first(), operation.expression.attrs
    for name in NORMALISED_AXES[operation.operator]:
        if axis.index in _axes(getattr(attributes, name), len(operation.operands[0].shape)):
            raise operation.refused("it computes over that axis")
    return same_range(operation, axis)


def batch_norm(operation: Operation) -> Rule:
    axis, attributes = operation.only_first(), operation.expression.attrs
    if attributes.training:
        raise operation.refused("it takes statistics of the batch")
    of_vectors = axis.at(0) if axis.index == int(attributes.axis) else None
    return Rule((axis, *[of_vectors] * 4), (axis, of_vectors, of_vectors))


def tuple_field(operation: Operation) -> Rule:
    """Return the rule of reading one element of a tuple; a batch norm's statistics are refused."""
    (operand,) = operation.operands
    result = operand.axes[operation.expression.index]
    if result is None:
        raise operation.refused("it takes the statistics of a batch norm, not its image")
    return Rule((operand.axis,), (result,))


def _axes(value: Any, rank: int) -> list[int]:
    """Return the sorted axes, 0 to ``rank`` - 1, of an attribute that is None (all axes), one axis or several."""
    axes = range(rank) if value is None else [value] if isinstance(value, int) else value
    return sorted(int(axis) % rank for axis in axes)


def reduction(operation: Operation) -> Rule:
    axis, attributes = operation.only_first(), operation.expression.attrs
    shape = operation.operands[0].shape
    reduced_axes = _axes(attributes.axis, len(shape))
    if axis.index not in reduced_axes:
        removed = 0 if attributes.keepdims else sum(reduced_axis < axis.index for reduced_axis in reduced_axes)
        return same_range(operation, axis, axis.at(axis.index - removed))
    match operation.operator:
        case "relax.sum":
            return Rule((axis,), (None,), "sum")
        case "relax.mean":
            return Rule(
                (axis,), (None,), "sum", write=_part_of_mean(operation, reduced_axes, bool(attributes.keepdims))
            )
        case "relax.max":
            return Rule((axis,), (None,), "max")
        case "relax.min":
            return Rule((axis,), (None,), "min")
    raise operation.refused("it computes over that axis")


def _part_of_mean(operation: Operation, reduced_axes: Sequence[int], keepdims: bool) -> Write:
    """Return the function that builds a partial sum of a mean: a part's sum, divided by the count of all elements."""
    share = 1 / np.prod([operation.operands[0].shape[axis] for axis in reduced_axes])

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        total = emit(relax.op.sum(parts[0], list(reduced_axes), keepdims=keepdims))
        return relax.op.multiply(total, constant(np.array(share, str(parts[0].ty.dtype.dtype))))

    return write


def adaptive_pool(operation: Operation) -> Rule:
    """Return the rule of an adaptive average pool.

    A mean of all pixels is a sum of parts. Other sizes have windows of several lengths, and raise a `ShardError`.
    """
    axis, layout = operation.only_first(), str(operation.expression.attrs.layout)
    if layout[axis.index] in "NC":
        return same_range(operation, axis)
    spatial = [place for place, letter in enumerate(layout) if letter in "DHW"]
    if any(operation.shape[place] > 1 for place in spatial):
        raise operation.refused(f"its result is {operation.shape}, and only a mean of all pixels is a sum in parts")
    return Rule((axis,), (None,), "sum", write=_part_of_mean(operation, spatial, keepdims=True))


def attention(operation: Operation) -> Rule:
    """Return the rule of ``relax.nn.attention`` on [batch, tokens, heads, width] operands; only a batch is sharded."""
    axis = next((operand.axis for operand in operation.operands[:3] if operand.axis is not None), None)
    if axis is None or axis.index:
        raise operation.refused("only a batch is split")
    batch = operation.shape[0]
    return Rule(tuple(axis if operand.shape[0] == batch else None for operand in operation.operands), (axis,))


def matmul(operation: Operation) -> Rule:
    """Return the rule of a product along the left operand's rows, the right one's columns, a batch or head axis.

    Along the contracted axis, a shard by channels or heads gives partial sums. A shard by rows, columns or batch is
    possible only for a constant matrix: see `interpolation`.
    """
    left, right = operation.operands
    rank = len(operation.shape)
    if min(len(left.shape), len(right.shape)) < 2:
        raise operation.refused("one of its operands is a vector")
    last, second = len(left.shape) - 1, len(right.shape) - 2
    axis = left.axis or right.axis
    if axis is None or (left.axis and left.axis.index == last) or (right.axis and right.axis.index == second):
        if axis is None or not operation.by_blocks:
            return interpolation(operation)
        return Rule((axis.at(last), axis.at(second)), (None,), "sum")
    indices = {operand.axis.index + rank - len(operand.shape) for operand in operation.operands if operand.axis}
    if len(indices) > 1:
        raise operation.refused("it sums over that axis")
    (index,) = indices
    axes: list[Axis | None] = []
    for operand, whole in zip(operation.operands, (rank - 1, rank - 2), strict=True):
        place = index - rank + len(operand.shape)
        has_axis = place >= 0 and index != whole and operand.shape[place] == operation.shape[index]
        axes.append(axis.at(place) if has_axis else None)
    if any(
        operand.axis is not None and operand_axis is None
        for operand, operand_axis in zip(operation.operands, axes, strict=True)
    ):
        raise operation.refused("it repeats the one index of that axis")
    return Rule(tuple(axes), (axis.at(index),))


def channel_convolution(operation: Operation) -> Rule:
    """Return the rule of a convolution along output channels, along input channels (partial sums), or along groups."""
    data, weight = operation.operands
    attributes = operation.expression.attrs
    groups, layout = int(attributes.groups), str(attributes.data_layout)
    axis = data.axis or weight.axis
    is_known = (
        layout[:2] == "NC" and str(attributes.kernel_layout)[:2] == "OI" and attributes.out_layout in ("", layout)
    )
    if axis is None or not is_known or not operation.by_blocks or (data.axis and weight.axis):
        raise operation.refused(
            f"{layout[axis.index if axis else 0]!r} of its layout {layout} is not an axis of its windows"
        )
    if axis.index != (1 if data.axis else 0):
        raise operation.refused("its weights are not sharded by output channels")
    if groups == 1:
        return Rule((axis, axis), (None,), "sum") if data.axis else Rule((None, axis), (axis.at(1),))
    if groups % axis.outer:
        raise operation.refused(f"its {groups} groups cannot be divided into {axis.outer} blocks")
    inputs = Axis(1, axis.outer, data.shape[1] // axis.outer)
    outputs = Axis(0, axis.outer, weight.shape[0] // axis.outer)

    def write(result_range: Range, parts: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        part_groups = groups * (result_range[1] - result_range[0]) // outputs.length
        return call_like(operation.expression, parts, groups=part_groups)

    return Rule((inputs, outputs), (outputs.at(1),), write=write, blocks=groups // axis.outer)
