"""softmax and layer_norm over the last axis -> TE whose sums run in vectors.

A float sum has an order, so LLVM does not vectorise it. Here one partial sum per vector lane is explicit:
``partial[row, lane]`` over the whole vectors of a row, then the lanes and the row's remainder together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from schedules.legalize.common import accumulator_dtype, default_legalization
from schedules.legalize.elementary import exp
from schedules.shapes import static_shape
from schedules.traits import Traits

Reducer = Callable[..., Any]
Element = Callable[[tuple[Any, ...], Any], Any]


def reduce_rows(
    rows: tuple[int, ...], extent: int, element: Element, reducer: Reducer, lanes: int, name: str
) -> te.Tensor:
    """``reducer`` over ``element(row, 0 <= k < extent)``: a tensor of shape ``rows``."""
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


def softmax(x: te.Tensor, traits: Traits) -> te.Tensor:
    """Softmax over the last axis, in float32: exponentials are computed once and divided by their sum."""
    *rows, extent = (int(value) for value in x.shape)
    lanes, shape = traits.lanes, tuple(rows)

    def read(row: tuple[Any, ...], k: Any) -> Any:
        return x[(*row, k)].astype("float32")

    largest = reduce_rows(shape, extent, read, te.max, lanes, "row_maximum")
    powers = te.compute(x.shape, lambda *i: exp(read(i[:-1], i[-1]) - largest[i[:-1]]), name="row_exp")
    total = reduce_rows(shape, extent, lambda row, k: powers[(*row, k)], te.sum, lanes, "row_sum")
    return te.compute(x.shape, lambda *i: (powers[i] / total[i[:-1]]).astype(x.dtype), name="softmax")


def layer_norm(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor, epsilon: float, traits: Traits) -> te.Tensor:
    """Layer norm over the last axis: the variance from centred values, since E[x^2] - E[x]^2 cancels."""
    *rows, extent = (int(value) for value in x.shape)
    dtype = accumulator_dtype(str(x.dtype))
    lanes, shape = traits.lanes, tuple(rows)
    share = tirx.const(1.0 / extent, dtype)

    def read(row: tuple[Any, ...], k: Any) -> Any:
        return x[(*row, k)].astype(dtype)

    total = reduce_rows(shape, extent, read, te.sum, lanes, "row_sum")

    def square(row: tuple[Any, ...], k: Any) -> Any:
        centred = read(row, k) - total[row] * share
        return centred * centred

    squares = reduce_rows(shape, extent, square, te.sum, lanes, "row_squares")
    scale = te.compute(
        shape,
        lambda *row: tirx.const(1.0, dtype) / tirx.sqrt(squares[row] * share + tirx.const(epsilon, dtype)),
        name="row_scale",
    )

    def element(*i: Any) -> Any:
        normal = (read(i[:-1], i[-1]) - total[i[:-1]] * share) * scale[i[:-1]]
        return (normal * gamma[i[-1]].astype(dtype) + beta[i[-1]].astype(dtype)).astype(x.dtype)

    return te.compute(x.shape, element, name="layer_norm")


def legalize_softmax(traits: Traits) -> Callable[[BlockBuilder, relax.Call], relax.Expr]:
    def legalize(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
        shape = static_shape(call.args[0])
        axis = int(call.attrs.axis)
        if not _fits(shape, call) or shape is None or axis not in (-1, len(shape) - 1):
            return default_legalization(builder, call)
        return builder.call_te(partial(softmax, traits=traits), call.args[0], primfunc_name_hint="softmax")

    return legalize


def legalize_layer_norm(traits: Traits) -> Callable[[BlockBuilder, relax.Call], relax.Expr]:
    def legalize(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
        shape = static_shape(call.args[0])
        axes = [int(axis) for axis in call.attrs.axes]
        if not _fits(shape, call) or shape is None or axes not in ([-1], [len(shape) - 1]):
            return default_legalization(builder, call)
        compute = partial(layer_norm, epsilon=float(call.attrs.epsilon), traits=traits)
        return builder.call_te(compute, *call.args, primfunc_name_hint="layer_norm")

    return legalize


def _fits(shape: tuple[int, ...] | None, call: relax.Call) -> bool:
    return shape is not None and len(shape) >= 2 and 0 not in shape and str(call.ty.dtype) in ("float32", "float16")
