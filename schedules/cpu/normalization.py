"""Lower layer, RMS, group and instance norm to TE whose sums are vectorized.

All are one computation on a tensor of rows, [..., L], where L covers everything that is normalised together. A reshape,
which costs nothing, brings tensors into that shape.

A float sum has an order, so LLVM does not vectorise it. Here each vector lane has an explicit partial sum:
``partial[row, lane]`` over the whole vectors of a row. Then the lanes and the row's remainder are summed.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from tvm import relax, te, tirx, topi
from tvm.relax import BlockBuilder

from schedules.relax_tools import accumulator_dtype, default_legalization, static_shape
from schedules.traits import Traits

Reducer = Callable[..., Any]
Element = Callable[[tuple[Any, ...], Any], Any]


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


def row_norm(x: te.Tensor, *weights: te.Tensor, name: str, epsilon: float, traits: Traits) -> te.Tensor:
    """Return the layer norm of x [..., L] with ``weights`` gamma and beta, [L]; the RMS norm if there is no beta."""
    normal, dtype = _standardised(x, epsilon, traits, centre=len(weights) > 1)

    def element(*i: Any) -> Any:
        value = normal(i[:-1], i[-1]) * weights[0][i[-1]].astype(dtype)
        for shift in weights[1:]:
            value = value + shift[i[-1]].astype(dtype)
        return value.astype(x.dtype)

    return te.compute(x.shape, element, name=name)


def group_norm(
    x: te.Tensor, gamma: te.Tensor, beta: te.Tensor, channels: int, epsilon: float, traits: Traits
) -> te.Tensor:
    """Return the group norm of x [N, G, L]: each group has ``channels`` channels of L / channels elements.

    gamma and beta are [G * channels]; the result is [N, G, channels, L / channels].
    """
    batch, groups, extent = (int(value) for value in x.shape)
    inner = extent // channels
    normal, dtype = _standardised(x, epsilon, traits, centre=True)

    def element(n: Any, g: Any, c: Any, i: Any) -> Any:
        channel = g * channels + c
        return (normal((n, g), c * inner + i) * gamma[channel].astype(dtype) + beta[channel].astype(dtype)).astype(
            x.dtype
        )

    return te.compute((batch, groups, channels, inner), element, name="group_norm")


def legalize_rows(builder: BlockBuilder, call: relax.Call, traits: Traits) -> relax.Expr:
    """Lower layer or RMS norm over any number of trailing axes; other forms are left to TVM."""
    shape, name = static_shape(call.args[0]), call.op.name.rsplit(".", 1)[-1]
    if shape is None or not fits(shape, call):
        return default_legalization(builder, call)
    axes = sorted(int(axis) % len(shape) for axis in call.attrs.axes)
    first = len(shape) - len(axes)
    if not axes or axes != list(range(first, len(shape))):
        return default_legalization(builder, call)
    extent = prod(shape[first:])
    rows = reshaped(builder, call.args[0], (*(shape[:first] or (1,)), extent))
    weights = [reshaped(builder, weight, (extent,)) for weight in call.args[1:]]
    compute = partial(row_norm, name=name, epsilon=float(call.attrs.epsilon), traits=traits)
    return reshaped(builder, builder.call_te(compute, rows, *weights, primfunc_name_hint=name), shape)


def legalize_groups(builder: BlockBuilder, call: relax.Call, traits: Traits) -> relax.Expr:
    """Lower group norm of [N, C, ...], or instance norm (each channel is a group); other forms are left to TVM."""
    shape, attributes = static_shape(call.args[0]), call.attrs
    if shape is None or not fits(shape, call) or not (attributes.center and attributes.scale):
        return default_legalization(builder, call)
    axes = sorted(int(axis) % len(shape) for axis in attributes.axes)
    if int(attributes.channel_axis) % len(shape) != 1 or not axes or axes != list(range(2, len(shape))):
        return default_legalization(builder, call)
    name = call.op.name.rsplit(".", 1)[-1]
    groups = int(attributes.num_groups) if name == "group_norm" else shape[1]
    channels = shape[1] // groups
    rows = reshaped(builder, call.args[0], (shape[0], groups, channels * prod(shape[2:])))
    compute = partial(group_norm, channels=channels, epsilon=float(attributes.epsilon), traits=traits)
    return reshaped(builder, builder.call_te(compute, rows, *call.args[1:], primfunc_name_hint=name), shape)


def reshaped(builder: BlockBuilder, expression: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    """Emit a reshape to ``shape``; return the tensor itself if it has that shape."""
    variable = builder.emit(builder.normalize(expression)) if isinstance(expression, relax.Call) else expression
    if static_shape(variable) == shape:
        return variable
    return builder.emit(builder.call_te(topi.reshape, variable, shape, primfunc_name_hint="reshape"))


def fits(shape: tuple[int, ...], call: relax.Call) -> bool:
    """Return whether this package can lower a call: float32 or float16, at least two axes, and not empty."""
    return len(shape) >= 2 and 0 not in shape and str(call.ty.dtype) in ("float32", "float16")
