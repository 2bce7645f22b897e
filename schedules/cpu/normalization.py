"""Lower layer, RMS, group and instance norm to TE whose sums are vectorized.

All are one computation on a tensor of rows, [..., L], where L covers everything that is normalised together. A reshape,
which costs nothing, brings tensors into that shape.

A float sum has an order, so LLVM does not vectorise it. Here each vector lane has an explicit partial sum:
``partial[row, lane]`` over the whole vectors of a row. Then the lanes and the row's remainder are summed.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tvm import relax, te, tirx, topi
from tvm.relax import BlockBuilder

from schedules.relax_tools import accumulator_dtype, default_legalization, operator_of, static_shape
from schedules.traits import Traits

Reducer = Callable[..., Any]
Element = Callable[[tuple[Any, ...], Any], Any]
Place = Callable[..., tuple[tuple[Any, ...], Any, Any]]
"""Maps the indices of a result to its row, its position in the row, and the index of its weights."""


def reduce_rows(
    rows: tuple[int, ...], extent: int, element: Element, reducer: Reducer, lanes: int, name: str
) -> te.Tensor:
    """Return the tensor of shape ``rows`` with ``element(row, k)`` reduced by ``reducer`` over 0 <= k < extent.

    Each of ``lanes`` vector lanes has a partial result.
    """
    whole = extent // lanes
    if whole < 2:
        k = te.reduce_axis((0, extent), name="k")
        return te.compute(rows, lambda *row: reducer(element(row, k), axis=k), name=name)
    step = te.reduce_axis((0, whole), name="step")
    partial_result = te.compute(
        (*rows, lanes),
        lambda *index: reducer(element(index[:-1], step * lanes + index[-1]), axis=step),
        name=f"{name}_lanes",
    )
    rest = te.reduce_axis((0, lanes + extent % lanes), name="lane")

    def joined(*row: Any) -> Any:
        value = partial_result[(*row, tirx.min(rest, lanes - 1))]
        if extent % lanes:
            beyond = element(row, tirx.max(whole * lanes + rest - lanes, whole * lanes))
            value = tirx.if_then_else(rest < lanes, value, beyond)
        return reducer(value, axis=rest)

    return te.compute(rows, joined, name=name)


def _standardised(x: te.Tensor, epsilon: float, traits: Traits, *, centre: bool) -> tuple[Element, str]:
    """Return a function that reads standardised elements of the rows of x, [..., L], and the dtype it computes in.

    Elements are centred (if ``centre``) and divided by their row's deviation. The mean is computed from differences to
    the row's first element, the variance from centred values.

    E[x^2] - E[x]^2 cancels, and even a sum of 3000 values around 1000 loses three digits of their mean. Differences to
    one of the values do not, and cost one subtraction.
    """
    *rows, extent = (int(value) for value in x.shape)
    dtype = accumulator_dtype(str(x.dtype))
    lanes, shape = traits.lanes, tuple(rows)
    share = tirx.const(1.0 / extent, dtype)

    def read(row: tuple[Any, ...], k: Any) -> Any:
        return x[(*row, k)].astype(dtype)

    def difference(row: tuple[Any, ...], k: Any) -> Any:
        return read(row, k) - read(row, 0)

    centred: Element = read
    if centre:
        total = reduce_rows(shape, extent, difference, te.sum, lanes, "row_sum")

        def centred(row: tuple[Any, ...], k: Any) -> Any:
            return difference(row, k) - total[row] * share

    def square(row: tuple[Any, ...], k: Any) -> Any:
        return centred(row, k) * centred(row, k)

    squares = reduce_rows(shape, extent, square, te.sum, lanes, "row_squares")
    scale = te.compute(
        shape,
        lambda *row: tirx.const(1.0, dtype) / tirx.sqrt(squares[row] * share + tirx.const(epsilon, dtype)),
        name="row_scale",
    )
    return (lambda row, k: centred(row, k) * scale[row]), dtype


def _legalize(
    builder: BlockBuilder,
    call: relax.Call,
    rows: tuple[int, ...],
    weights: Sequence[relax.Expr],
    result: tuple[int, ...],
    place: Place,
    traits: Traits,
) -> relax.Expr:
    """Lower a norm of the data in the shape ``rows`` to one in the shape ``result``; without beta it is an RMS norm."""
    name, shape, epsilon = operator_of(call).rsplit(".", 1)[-1], static_shape(call), float(call.attrs.epsilon)

    def compute(x: te.Tensor, gamma: te.Tensor, *shifts: te.Tensor) -> te.Tensor:
        normal, dtype = _standardised(x, epsilon, traits, centre=bool(shifts))

        def element(*index: Any) -> Any:
            row, k, channel = place(*index)
            value = normal(row, k) * gamma[channel].astype(dtype)
            for shift in shifts:
                value = value + shift[channel].astype(dtype)
            return value.astype(x.dtype)

        return te.compute(result, element, name=name)

    data = reshaped(builder, call.args[0], rows)
    return reshaped(builder, builder.call_te(compute, data, *weights, primfunc_name_hint=name), shape or ())


def legalize_rows(builder: BlockBuilder, call: relax.Call, traits: Traits) -> relax.Expr:
    """Lower layer or RMS norm over any number of trailing axes; other forms are left to TVM."""
    shape = static_shape(call.args[0])
    if shape is None or not fits(shape, call):
        return default_legalization(builder, call)
    axes = sorted(int(axis) % len(shape) for axis in call.attrs.axes)
    first = len(shape) - len(axes)
    if not axes or axes != list(range(first, len(shape))):
        return default_legalization(builder, call)
    extent = prod(shape[first:])
    rows = (*(shape[:first] or (1,)), extent)
    weights = [reshaped(builder, weight, (extent,)) for weight in call.args[1:]]
    return _legalize(builder, call, rows, weights, rows, lambda *index: (index[:-1], index[-1], index[-1]), traits)


def legalize_groups(builder: BlockBuilder, call: relax.Call, traits: Traits) -> relax.Expr:
    """Lower group norm of [N, C, ...], or instance norm (each channel is a group); other forms are left to TVM."""
    shape, attributes = static_shape(call.args[0]), call.attrs
    if shape is None or not fits(shape, call) or not (attributes.center and attributes.scale):
        return default_legalization(builder, call)
    axes = sorted(int(axis) % len(shape) for axis in attributes.axes)
    if int(attributes.channel_axis) % len(shape) != 1 or not axes or axes != list(range(2, len(shape))):
        return default_legalization(builder, call)
    groups = int(attributes.num_groups) if operator_of(call) == "relax.nn.group_norm" else shape[1]
    channels, inner = shape[1] // groups, prod(shape[2:])

    def place(n: Any, g: Any, c: Any, i: Any) -> tuple[tuple[Any, ...], Any, Any]:
        return (n, g), c * inner + i, g * channels + c

    rows, result = (shape[0], groups, channels * inner), (shape[0], groups, channels, inner)
    return _legalize(builder, call, rows, call.args[1:], result, place, traits)


def reshaped(builder: BlockBuilder, expression: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    """Emit a reshape to ``shape``; return the tensor itself if it has that shape."""
    variable = builder.emit(builder.normalize(expression)) if isinstance(expression, relax.Call) else expression
    if static_shape(variable) == shape:
        return variable
    return builder.emit(builder.call_te(topi.reshape, variable, shape, primfunc_name_hint="reshape"))


def fits(shape: tuple[int, ...], call: relax.Call) -> bool:
    """Return whether this package can lower a call: float32 or float16, at least two axes, and not empty."""
    return len(shape) >= 2 and 0 not in shape and str(call.ty.dtype) in ("float32", "float16")
