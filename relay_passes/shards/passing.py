"""Rules for propagating a sharded axis through operators, one rule per operator.

A rule takes a call and, for each operand, the axis along which it is sharded, or None. The fields of a tuple count as
operands. The rule returns a `Passage`, or None if the sharded operands must be gathered first. An operator without a
rule is always computed on whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import relax

from relay_passes.ir import convolution_like, leaves_of, operator_name, shape_of
from relay_passes.shards.dealt_axes import Adapt, Axis, Emit, Operands, Passage, Scaled

Axes = Sequence[Axis | None]
Rule = Callable[[relax.Call, Axes], Passage | None]


def _convolution(call: relax.Call, axes: Axes) -> Passage | None:
    """Shard the weight's output channels, the input channels of both operands (partial sums), or whole groups."""
    data, weight = (shape_of(each) for each in leaves_of(call))
    groups = int(call.attrs.groups)
    layout = str(call.attrs.data_layout)
    if layout[:2] != "NC" or str(call.attrs.kernel_layout)[:2] != "OI" or call.attrs.out_layout not in ("", layout):
        return None
    of_data, of_weight = axes
    if of_data is not None and of_weight is not None:
        return None
    if groups == 1:
        if of_weight is not None:
            return Passage((None, of_weight), (of_weight.at(1),)) if of_weight.index == 0 else None
        if of_data is None or of_data.index != 1:
            return None
        return Passage((of_data, of_data), (None,), sums=True)
    dealt = of_data or of_weight
    if dealt is None or dealt.index != (1 if of_data else 0) or groups % dealt.repeats:
        return None
    repeats = dealt.repeats
    inputs, outputs = Axis(1, repeats, data[1] // repeats), Axis(0, repeats, weight[0] // repeats)
    return Passage((inputs, outputs), (outputs.at(1),), blocks=groups // repeats, adapt=_with_groups)


def _with_groups(value: relax.Expr, operands: Operands, scaled: Scaled, _: object) -> relax.Expr:
    """Return the same convolution with one machine's share of the groups."""
    return convolution_like(value, operands, groups=scaled(int(value.attrs.groups)))


def _matmul(call: relax.Call, axes: Axes) -> Passage | None:
    """Shard the right operand's columns, the left one's rows, the contracted axis (partial sums), or batches, heads."""
    shapes = [shape_of(each) for each in leaves_of(call)]
    if min(map(len, shapes)) < 2:
        return None
    left, right = axes
    ranks = [len(shape) for shape in shapes]
    rank = max(ranks)
    dealt, side = (left, 0) if left is not None else (right, 1)
    if dealt is None:
        return None
    from_end = ranks[side] - dealt.index
    contracted = (1, 2)[side]
    if from_end == contracted:
        operands = (dealt.at(ranks[0] - 1), dealt.at(ranks[1] - 2))
        return Passage(operands, (None,), sums=True)
    result = dealt.at(rank - from_end)
    if from_end <= 2:
        return Passage((dealt, None) if side == 0 else (None, dealt), (result,))
    return Passage(tuple(_aligned(dealt, from_end, shape) for shape in shapes), (result,))


def _aligned(axis: Axis, from_end: int, shape: tuple[int, ...]) -> Axis | None:
    """Return the axis ``from_end`` places from the end of a shape; None if it is missing or broadcast (length 1)."""
    index = len(shape) - from_end
    return None if index < 0 or shape[index] == 1 else axis.at(index)


def _elementwise(call: relax.Call, axes: Axes) -> Passage | None:
    shapes = [shape_of(each) for each in leaves_of(call)]
    dealt, place = next((axis, place) for place, axis in enumerate(axes) if axis is not None)
    from_end = len(shapes[place]) - dealt.index
    rank = max(map(len, shapes))
    return Passage(tuple(_aligned(dealt, from_end, shape) for shape in shapes), (dealt.at(rank - from_end),))


def _only_first(axes: Axes) -> Axis | None:
    """Return the sharded axis of the first operand, or None if another operand is sharded too."""
    return axes[0] if not any(axes[1:]) else None


def _pooling(call: relax.Call, axes: Axes) -> Passage | None:
    axis = _only_first(axes)
    spatial = axis is None or axis.index > 1 or str(call.attrs.layout)[:2] != "NC"
    return None if axis is None or spatial else Passage((axis,), (axis,))


def _normalisation(call: relax.Call, axes: Axes) -> Passage | None:
    """Keep the sharded axis of a softmax or norm that computes over other axes."""
    axis = _only_first(axes)
    over = getattr(call.attrs, "axes", None) or [call.attrs.axis]
    rank = len(shape_of(call))
    if axis is None or axis.index in {int(each) % rank for each in over}:
        return None
    return Passage((axis, *[None] * (len(axes) - 1)), (axis,))


def _batch_norm(call: relax.Call, axes: Axes) -> Passage | None:
    axis = _only_first(axes)
    if axis is None or axis.index != int(call.attrs.axis) or call.attrs.training:
        return None
    return Passage((axis, *[axis.at(0)] * 4), (axis, axis.at(0), axis.at(0)))


def _reduction(call: relax.Call, axes: Axes) -> Passage | None:
    axis = _only_first(axes)
    if axis is None:
        return None
    rank = len(shape_of(leaves_of(call)[0]))
    over = range(rank) if call.attrs.axis is None else sorted(int(each) % rank for each in call.attrs.axis)
    if axis.index in over:
        adapt = {"relax.sum": None, "relax.mean": _mean_as_sum}
        name = operator_name(call)
        return Passage((axis,), (None,), sums=True, adapt=adapt[name]) if name in adapt else None
    gone = 0 if call.attrs.keepdims else sum(each < axis.index for each in over)
    return Passage((axis,), (axis.at(axis.index - gone),))


def _mean_as_sum(value: relax.Expr, operands: Operands, _: Scaled, emit: Emit) -> relax.Expr:
    """Return a machine's partial sum of a mean: the sum of its part, divided by the number of all values."""
    total = emit(relax.op.sum(operands[0], value.attrs.axis, value.attrs.keepdims), "total")
    (data,) = leaves_of(value)
    return relax.op.multiply(total, relax.const(prod(shape_of(value)) / prod(shape_of(data)), str(data.ty.dtype)))


def _permute(call: relax.Call, axes: Axes) -> Passage | None:
    (axis,) = axes
    rank = len(shape_of(call))
    order = list(range(rank))[::-1] if call.attrs.axes is None else [int(each) % rank for each in call.attrs.axes]
    return None if axis is None else Passage((axis,), (axis.at(order.index(axis.index)),))


def _reshape(call: relax.Call, axes: Axes) -> Passage | None:
    """Shard a reshape whose stretches begin at an axis of the result, or divide one into equal pieces."""
    (axis,) = axes
    before, after = shape_of(leaves_of(call)[0]), shape_of(call)
    if axis is None:
        return None
    repeats = prod(before[: axis.index]) * axis.repeats
    for index, length in enumerate(after):
        outer = prod(after[:index])
        if outer <= repeats < outer * length:
            inside = repeats // outer
            if repeats % outer or length % inside:
                return None
            period = length // inside
            return Passage(
                (axis,),
                (Axis(index, inside, period),),
                blocks=period,
                cuts=length < before[axis.index],
                adapt=_to_shape(relax.op.reshape, index),
            )
    return None


def _to_shape(operator: Callable[..., relax.Expr], index: int) -> Adapt:
    """Return an `Adapt` for an operator that takes its result's shape, whose axis ``index`` is sharded."""

    def adapt(value: relax.Expr, operands: Operands, scaled: Scaled, _: object) -> relax.Expr:
        shape = shape_of(value)
        return operator(*operands, [*shape[:index], scaled(shape[index]), *shape[index + 1 :]])

    return adapt


def _broadcast_to(call: relax.Call, axes: Axes) -> Passage | None:
    (axis,) = axes
    if axis is None:
        return None
    index = len(shape_of(call)) - len(shape_of(leaves_of(call)[0])) + axis.index
    return Passage((axis,), (axis.at(index),), adapt=_to_shape(relax.op.broadcast_to, index))


def _expand_dims(call: relax.Call, axes: Axes) -> Passage | None:
    (axis,) = axes
    rank = len(shape_of(call))
    new = {int(each) % rank for each in call.attrs.axis}
    kept = [index for index in range(rank) if index not in new]
    return None if axis is None else Passage((axis,), (axis.at(kept[axis.index]),))


def _squeeze(call: relax.Call, axes: Axes) -> Passage | None:
    (axis,) = axes
    shape = shape_of(leaves_of(call)[0])
    over = [index for index, length in enumerate(shape) if length == 1]
    gone = over if call.attrs.axis is None else [int(each) % len(shape) for each in call.attrs.axis]
    return None if axis is None else Passage((axis,), (axis.at(axis.index - sum(each < axis.index for each in gone)),))


def _strided_slice(call: relax.Call, axes: Axes) -> Passage | None:
    """Shard a slice along axes other than the sharded one, or a slice that keeps whole stretches of it."""
    (axis,) = axes
    ranges = slice_ranges(call)
    if axis is None or ranges is None:
        return None
    if axis.index not in ranges:
        return Passage((axis,), (axis,))
    begin, end, stride = ranges[axis.index]
    if stride != 1 or begin % axis.period or end % axis.period or begin >= end:
        return None

    def adapt(value: relax.Expr, operands: Operands, scaled: Scaled, _: object) -> relax.Expr:
        ends = {**ranges, axis.index: (scaled(begin), scaled(end), 1)}
        first, last, steps = zip(*ends.values(), strict=True)
        return relax.op.strided_slice(operands[0], list(ends), first, last, steps)

    return Passage((axis,), (Axis(axis.index, (end - begin) // axis.period, axis.period),), adapt=adapt)


def slice_ranges(call: relax.Call) -> dict[int, tuple[int, int, int]] | None:
    """Return (begin, end, stride) by axis of a slice, clipped to the axis.

    None if one of them is no number, or a stride is below 1.
    """
    data, *rest = call.args
    if not all(isinstance(part, relax.Tuple) for part in rest):
        return None
    numbers = [[each.value for each in part.fields if hasattr(each, "value")] for part in rest]
    axes, begins, ends = numbers[:3]
    strides = numbers[3] if len(numbers) > 3 else [1] * len(axes)
    if len({len(axes), len(begins), len(ends), len(strides)}) > 1 or any(stride < 1 for stride in strides):
        return None
    shape = shape_of(data)
    return {
        axis % len(shape): (*slice(begin, end).indices(shape[axis])[:2], stride)
        for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True)
    }


def section_ends(call: relax.Call) -> list[int] | None:
    """Return the ends of the sections of ``relax.split`` without the last; None if they cannot have equal lengths."""
    length = shape_of(leaves_of(call)[0])[int(call.attrs.axis)]
    sections = call.attrs.indices_or_sections
    if isinstance(sections, int) or hasattr(sections, "value"):
        count = int(sections)
        return None if length % count else [length // count * place for place in range(1, count)]
    return [int(each) for each in sections]


def _split(call: relax.Call, axes: Axes) -> Passage | None:
    """Shard a split along an axis other than the sharded one, or at boundaries between stretches."""
    (axis,) = axes
    ends = section_ends(call)
    if axis is None or ends is None:
        return None
    shape = shape_of(leaves_of(call)[0])
    along = int(call.attrs.axis) % len(shape)
    if axis.index != along:
        return Passage((axis,), (axis,) * (len(ends) + 1))
    if any(end % axis.period for end in ends):
        return None

    def adapt(value: relax.Expr, operands: Operands, scaled: Scaled, _: object) -> relax.Expr:
        return relax.op.split(operands[0], [scaled(end) for end in ends], along)

    lengths = [end - begin for begin, end in zip([0, *ends], [*ends, shape[along]], strict=True)]
    return Passage((axis,), tuple(Axis(along, length // axis.period, axis.period) for length in lengths), adapt=adapt)


def _concat(call: relax.Call, axes: Axes) -> Passage | None:
    """Shard a concatenation along an axis other than the sharded one, or one of operands whose periods are equal."""
    rank = len(shape_of(call))
    along = (int(call.attrs.axis) if call.attrs.axis is not None else 0) % rank
    axis = next(each for each in axes if each is not None)
    if axis.index != along:
        return Passage((axis,) * len(axes), (axis,))
    if not all(each is not None and each.index == along and each.period == axis.period for each in axes):
        return None
    return Passage(tuple(axes), (Axis(along, sum(each.repeats for each in axes if each), axis.period),))


def _take(call: relax.Call, axes: Axes) -> Passage | None:
    axis = _only_first(axes)
    if axis is None or call.attrs.axis is None:
        return None
    data, indices = (len(shape_of(each)) for each in leaves_of(call))
    along = int(call.attrs.axis) % data
    if axis.index == along:
        return None
    return Passage((axis, None), (axis.at(axis.index + (indices - 1 if axis.index > along else 0)),))


_ELEMENTWISE = """
    add subtract multiply divide floor_divide power maximum minimum where equal not_equal less less_equal greater
    greater_equal logical_and logical_or logical_not negative abs exp log sqrt rsqrt square sin cos tanh sigmoid erf
    floor ceil round sign clip astype nn.relu nn.leakyrelu nn.gelu nn.gelu_tanh nn.silu nn.softplus
"""
_POOLING = """
    nn.max_pool1d nn.max_pool2d nn.max_pool3d nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d
    nn.adaptive_avg_pool1d nn.adaptive_avg_pool2d nn.adaptive_avg_pool3d image.resize2d
"""
RULES: dict[str, Rule] = {
    f"relax.{name}": rule
    for rule, names in (
        (_convolution, "nn.conv1d nn.conv2d nn.conv3d"),
        (_matmul, "matmul"),
        (_elementwise, _ELEMENTWISE),
        (_pooling, _POOLING),
        (_normalisation, "nn.softmax nn.log_softmax nn.layer_norm nn.rms_norm"),
        (_batch_norm, "nn.batch_norm"),
        (_reduction, "sum mean max min prod"),
        (_permute, "permute_dims"),
        (_reshape, "reshape flatten"),
        (_broadcast_to, "broadcast_to"),
        (_expand_dims, "expand_dims"),
        (_squeeze, "squeeze"),
        (_strided_slice, "strided_slice"),
        (_split, "split"),
        (_concat, "concat"),
        (_take, "take"),
    )
    for name in names.split()
}
