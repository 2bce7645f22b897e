"""softmax and log_softmax over any axis -> TE; over the last one in rows, over others in columns of vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from tvm_split.schedules.blocks import ANCHOR
from tvm_split.schedules.cpu.columns import FAMILY as COLUMNS
from tvm_split.schedules.legalize.common import default_legalization
from tvm_split.schedules.legalize.elementary import exp
from tvm_split.schedules.legalize.normalization import fits, reduce_rows, reshaped
from tvm_split.schedules.shapes import static_shape
from tvm_split.schedules.traits import Traits


def softmax(x: te.Tensor, logarithm: bool, traits: Traits) -> te.Tensor:
    """Over the last axis, in float32: exponentials are computed once and divided by their sum."""
    *rows, extent = (int(value) for value in x.shape)
    lanes, shape = traits.lanes, tuple(rows)

    def read(row: tuple[Any, ...], k: Any) -> Any:
        return x[(*row, k)].astype("float32")

    largest = reduce_rows(shape, extent, read, te.max, lanes, "row_maximum")
    powers = te.compute(x.shape, lambda *i: exp(read(i[:-1], i[-1]) - largest[i[:-1]]), name="row_exp")
    total = reduce_rows(shape, extent, lambda row, k: powers[(*row, k)], te.sum, lanes, "row_sum")
    if logarithm:
        logarithms = te.compute(shape, lambda *row: tirx.log(total[row]), name="row_logarithm")
        return te.compute(
            x.shape,
            lambda *i: (read(i[:-1], i[-1]) - largest[i[:-1]] - logarithms[i[:-1]]).astype(x.dtype),
            name="log_softmax",
        )
    return te.compute(x.shape, lambda *i: (powers[i] / total[i[:-1]]).astype(x.dtype), name="softmax")


def softmax_of_columns(x: te.Tensor, logarithm: bool) -> te.Tensor:
    """Over the middle axis of x [O, K, I], in float32; `schedules.cpu.columns` schedules it."""
    outer, extent, inner = (int(value) for value in x.shape)
    axes = [te.reduce_axis((0, extent), name="k") for _ in range(2)]

    def read(o: Any, k: Any, i: Any) -> Any:
        return x[o, k, i].astype("float32")

    largest = te.compute((outer, inner), lambda o, i: te.max(read(o, axes[0], i), axis=axes[0]), name="column_maximum")
    powers = te.compute(x.shape, lambda o, k, i: exp(read(o, k, i) - largest[o, i]), name="column_exp")
    total = te.compute((outer, inner), lambda o, i: te.sum(powers[o, axes[1], i], axis=axes[1]), name="column_sum")
    attributes = {ANCHOR: COLUMNS}
    if logarithm:
        logarithms = te.compute((outer, inner), lambda o, i: tirx.log(total[o, i]), name="column_logarithm")
        return te.compute(
            x.shape,
            lambda o, k, i: (read(o, k, i) - largest[o, i] - logarithms[o, i]).astype(x.dtype),
            name="log_softmax",
            attrs=attributes,
        )
    inverse = te.compute((outer, inner), lambda o, i: tirx.const(1.0, "float32") / total[o, i], name="column_inverse")
    return te.compute(
        x.shape, lambda o, k, i: (powers[o, k, i] * inverse[o, i]).astype(x.dtype), name="softmax", attrs=attributes
    )


def legalize_softmax(traits: Traits, *, logarithm: bool) -> Callable[[BlockBuilder, relax.Call], relax.Expr]:
    """Symbolic shapes and other dtypes than float32 and float16 are left to TVM."""
    name = "log_softmax" if logarithm else "softmax"

    def legalize(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
        shape = static_shape(call.args[0])
        if shape is None or not fits(shape, call):
            return default_legalization(builder, call)
        axis = int(call.attrs.axis) % len(shape)
        inner = prod(shape[axis + 1 :])
        if inner == 1:
            leading = shape[:axis] if axis == len(shape) - 1 else (prod(shape[:axis]),)
            rows = reshaped(builder, call.args[0], (*leading, shape[axis]))
            compute = partial(softmax, logarithm=logarithm, traits=traits)
        else:
            rows = reshaped(builder, call.args[0], (prod(shape[:axis]), shape[axis], inner))
            compute = partial(softmax_of_columns, logarithm=logarithm)
        return reshaped(builder, builder.call_te(compute, rows, primfunc_name_hint=name), shape)

    return legalize
