"""Convert operations that only move elements."""

from collections.abc import Sequence

from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, shape_of
from tvm_split.frontends.stablehlo.conversions import HloCall
from tvm_split.frontends.stablehlo.modules import integer, integers


def _broadcast(op: Operators, call: HloCall) -> relax.Expr:
    """Convert a broadcast: axis i of the operand becomes axis ``broadcast_dimensions[i]``, all others have size 1."""
    dimensions = integers(call.source, "broadcast_dimensions")
    value = op.transposed(call.operands[0], sorted(range(len(dimensions)), key=dimensions.__getitem__))
    sizes = dict(zip(sorted(dimensions), shape_of(value), strict=True))
    return op.shaped(value, [sizes.get(axis, 1) for axis in range(len(call.shape))])


def _reshape(op: Operators, call: HloCall) -> relax.Expr:
    """Convert a reshape. If it only adds or removes axes of size 1, repeated axes keep size 1."""
    before, after = call.shape_of(0), call.shape
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return op.shaped(call.whole(0), after)
    value = call.operands[0]
    sizes = (actual_size for actual_size, size in zip(shape_of(value), before, strict=True) if size != 1)
    return op.shaped(value, [1 if size == 1 else next(sizes) for size in after])


def _concatenate(op: Operators, call: HloCall) -> relax.Expr:
    axis = integer(call.source, "dimension")
    parts = [call.whole(place) for place in range(len(call.operands)) if call.shape_of(place)[axis]]
    return parts[0] if len(parts) == 1 else op.concat(parts, axis)


def _slice(op: Operators, call: HloCall) -> relax.Expr:
    bounds = (integers(call.source, name) for name in ("start_indices", "limit_indices", "strides"))
    return sliced(op, call.operands[0], call.shape_of(0), *bounds)


def sliced(
    op: Operators,
    value: relax.Expr,
    shape: Sequence[int],
    firsts: Sequence[int],
    lasts: Sequence[int],
    steps: Sequence[int] | None = None,
) -> relax.Expr:
    """Slice from ``firsts`` to ``lasts`` (exclusive) by ``steps`` along each axis of ``shape``."""
    steps = [1] * len(shape) if steps is None else steps
    lengths = [len(range(*bounds)) for bounds in zip(firsts, lasts, steps, strict=True)]
    axes = [axis for axis, size in enumerate(shape_of(value)) if lengths[axis] != shape[axis] == size]
    bounds = [[numbers[axis] for axis in axes] for numbers in (firsts, lasts, steps)]
    return op.strided_slice(value, axes, *bounds) if axes else value


def reversed_along(op: Operators, value: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """Reverse ``value`` along ``axes``."""
    for axis in axes:
        value = op.flip(value, axis) if shape_of(value)[axis] > 1 else value
    return value


def _pad(op: Operators, call: HloCall) -> relax.Expr:
    filling = call.known(1)
    if filling is None:
        raise ModelImportError("it pads with a number that is computed; pad with a number that is known")
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, inner = (integers(call.source, name) for name in names)
    if not any(map(any, (low, high, inner))):
        return call.operands[0]
    return padded(op, call.whole(0), low, high, inner, float(filling))


def padded(
    op: Operators, value: relax.Expr, low: Sequence[int], high: Sequence[int], inner: Sequence[int], filling: float
) -> relax.Expr:
    """Pad ``value`` before, after and between its elements along each axis; negative widths slice elements off."""
    for axis, between in enumerate(inner):
        value = _spread_apart(op, value, axis, between, filling)
    shape = shape_of(value)
    lasts = [size + min(pad, 0) for size, pad in zip(shape, high, strict=True)]
    value = sliced(op, value, shape, [max(-pad, 0) for pad in low], lasts)
    widths = [max(width, 0) for pair in zip(low, high, strict=True) for width in pair]
    return op.nn.pad(value, widths, "constant", filling) if any(widths) else value


def _spread_apart(op: Operators, value: relax.Expr, axis: int, between: int, filling: float) -> relax.Expr:
    """Insert ``between`` fillings between neighbouring elements along an axis."""
    shape = shape_of(value)
    if not between or shape[axis] < 2:
        return value
    alone = op.reshape(value, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
    widths = [0, 0] * (axis + 1) + [0, between] + [0, 0] * (len(shape) - axis - 1)
    length = shape[axis] * (between + 1)
    spread = op.reshape(op.nn.pad(alone, widths, "constant", filling), [*shape[:axis], length, *shape[axis + 1 :]])
    return op.strided_slice(spread, [axis], [0], [length - between])


CONVERSIONS: dict[str, Conversion] = {
    "transpose": lambda op, call: op.transposed(call.operands[0], integers(call.source, "permutation")),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "slice": _slice,
    "reverse": lambda op, call: reversed_along(op, call.operands[0], integers(call.source, "dimensions")),
    "pad": _pad,
}
