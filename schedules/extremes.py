"""Lower max, min, argmax, argmin, max-pooling and bounds (clip, relu, …) to TE, correctly for infinities and NaN.

TVM's reductions start from the largest finite number and return it for a row of -inf. TVM's bounds use maximum and
minimum, which return the bound for NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.relax import BlockBuilder

from schedules.relax_tools import (
    Legalization,
    accumulator_dtype,
    array_of,
    default_legalization,
    legalize_elements,
    pool_of,
    static_shape,
)

EXTREMES = ("relax.max", "relax.min")
FLOATS = ("float32", "float64", "float16", "bfloat16")


def legalize_extreme(builder: BlockBuilder, call: relax.Call, *, widened: bool = False) -> relax.Expr:
    """Lower ``relax.max`` or ``relax.min``; integers and symbolic shapes are left to TVM.

    ``widened`` compares half precision in float32, because GPU threads exchange float32 values.

    NaN may be lost. Keeping it would cost nothing for many short rows, but half of the speed for few long ones.
    """
    shape, dtype, name = static_shape(call.args[0]), str(call.ty.dtype), call.op.name.rsplit(".", 1)[-1]
    if shape is None or dtype not in FLOATS:
        return default_legalization(builder, call)
    call_axes = range(len(shape)) if call.attrs.axis is None else call.attrs.axis
    reduced = sorted(int(axis) % len(shape) for axis in call_axes)
    keeps = bool(call.attrs.keepdims)
    kind = accumulator_dtype(dtype) if widened else dtype
    reducer = _reducer(name, kind)

    def compute(x: te.Tensor) -> te.Tensor:
        axes = {axis: te.reduce_axis((0, shape[axis]), name=f"k{axis}") for axis in reduced}
        kept = [axis for axis in range(len(shape)) if keeps or axis not in axes]
        result = [1 if axis in axes else shape[axis] for axis in kept]

        def extreme(*index: Any) -> Any:
            places = {**dict(zip(kept, index, strict=True)), **axes}
            return reducer(x[tuple(places[axis] for axis in range(len(shape)))].astype(kind), axis=list(axes.values()))

        extremes = te.compute(result, extreme, name=name)
        return (
            extremes
            if kind == dtype
            else te.compute(result, lambda *index: extremes[index].astype(dtype), name="narrow")
        )

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def _reducer(name: str, dtype: str) -> Callable[..., Any]:
    combine, nothing, word = (tirx.max, "-inf", "largest") if name == "max" else (tirx.min, "inf", "smallest")
    reducer: Callable[..., Any] = te.comm_reducer(
        lambda x, y: combine(x, y), lambda _: tirx.const(float(nothing), dtype), name=word
    )
    return reducer


def legalize_pool(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower max-pooling of floats whose channels are before the window's axes; other forms are left to TVM."""
    shape, dtype, window = static_shape(call), str(call.ty.dtype), pool_of(call)
    layouts = {str(call.attrs.layout), str(call.attrs.out_layout) or str(call.attrs.layout)}
    if shape is None or dtype not in FLOATS or len(layouts) > 1 or not layouts.pop().startswith("NC"):
        return default_legalization(builder, call)
    sizes, strides, dilation = window["pool_size"], window["strides"], window["dilation"]
    axes = len(sizes)

    def compute(x: te.Tensor) -> te.Tensor:
        before = [0, 0, *window["padding"][:axes], *[0] * (len(shape) - 2 - axes)]
        after = [0] * len(shape)
        for axis in range(axes):
            reach = (shape[axis + 2] - 1) * strides[axis] + (sizes[axis] - 1) * dilation[axis] + 1
            after[axis + 2] = max(0, reach - int(x.shape[axis + 2]) - before[axis + 2])
        padded = topi.nn.pad(x, before, after, tirx.const(float("-inf"), dtype)) if any((*before, *after)) else x
        places = [te.reduce_axis((0, size), name=f"k{axis}") for axis, size in enumerate(sizes)]

        def largest(*index: Any) -> Any:
            moved = [index[axis + 2] * strides[axis] + places[axis] * dilation[axis] for axis in range(axes)]
            return _reducer("max", dtype)(padded[(*index[:2], *moved, *index[axes + 2 :])], axis=places)

        return te.compute(shape, largest, name="max_pool")

    return builder.call_te(compute, call.args[0], primfunc_name_hint="max_pool")


def _share_among_threads(word: str, combine: Callable[[Any, Any], Any], nothing: str) -> None:
    """Register a reduction with TVM, which shares only registered ones among threads; it starts from ``nothing``."""

    def combined(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        return [combine(first[0], second[0])]

    def start(values: Sequence[Any]) -> list[Any]:
        dtype = str(values[0].ty.dtype)
        # For other dtypes keep the given start value: combining parts that start from it gives the same extreme.
        return [tirx.const(float(nothing), dtype) if dtype in FLOATS else values[0]]

    # Register by name, because TVM never drops these. Its list of reductions drops entries after Python has ended.
    functions = {f"tvm_split.{word}": combined, f"tvm_split.{word}.start": start}
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)
    tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")(1, *map(tvm_ffi.get_global_func, functions))


_share_among_threads("largest", tirx.max, "-inf")
_share_among_threads("smallest", tirx.min, "inf")


def legalize_place(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower ``relax.argmax`` or ``relax.argmin``.

    TVM starts at index -1 with the lowest (or largest) finite number. It returns -1 for rows in which nothing is
    better, which hold only infinities and this number. This lowering returns index 0 for them.
    """
    name = call.op.name.rsplit(".", 1)[-1]
    axis = None if call.attrs.axis is None else int(call.attrs.axis)

    def compute(x: te.Tensor) -> te.Tensor:
        indices = getattr(topi, name)(x, axis, bool(call.attrs.keepdims))
        none = tirx.const(0, str(indices.dtype))
        return te.compute(indices.shape, lambda *index: tirx.max(indices[index], none), name=name)

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def legalize_bounds(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower ``relax.clip``, ``nn.relu``, ``nn.relu6``, ``maximum`` or ``minimum`` of floats; NaN stays NaN, at no cost.

    A comparison with NaN is false. x86's maximum returns its second operand if either is NaN, and LLVM uses it here.
    """
    dtype, name = str(call.ty.dtype), call.op.name.rsplit(".", 1)[-1]
    if dtype not in FLOATS:
        return default_legalization(builder, call)
    bounded = _bounded(call, name)
    if bounded is None:
        return _legalize_pairs(builder, call, name)
    tensor, limits = bounded
    low, high = (None if limit is None else tirx.const(float(limit), dtype) for limit in limits)

    def element(value: Any) -> Any:
        value = value if low is None else tirx.Select(value < low, low, value)
        return value if high is None else tirx.Select(value > high, high, value)

    return legalize_elements(builder, name, [tensor], element)


def _legalize_pairs(builder: BlockBuilder, call: relax.Call, name: str) -> relax.Expr:
    """Lower ``maximum`` or ``minimum`` of two tensors that are broadcast against each other."""
    if static_shape(call) is None:
        return default_legalization(builder, call)
    infinity = tirx.const(float("inf"), str(call.ty.dtype))

    def element(left: Any, right: Any) -> Any:
        wins = left > right if name == "maximum" else left < right
        # Only NaN fails ``left <= infinity``. The comparison is false if ``right`` is NaN, so ``right`` (the NaN) is
        # taken. TVM's own test for NaN is not vectorized.
        return tirx.Select(left <= infinity, tirx.Select(wins, left, right), left)

    return legalize_elements(builder, name, call.args, element)


def _bounded(call: relax.Call, name: str) -> tuple[relax.Expr, Sequence[Any]] | None:
    """Return a tensor and its (lower, upper) bounds, None for no bound; None if no operand is a constant number."""
    if name == "clip":
        return call.args[0], [limit.value for limit in call.args[1:]]
    if name in ("relu", "relu6"):
        return call.args[0], [0.0, 6.0 if name == "relu6" else None]
    shape = static_shape(call)
    for tensor, bound in (call.args, list(call.args)[::-1]):
        array = array_of(bound)
        if array is not None and array.size == 1 and not np.isnan(array).any() and static_shape(tensor) == shape:
            return tensor, [array.item(), None] if name == "maximum" else [None, array.item()]
    return None


LOWERINGS: dict[str, Legalization] = {
    **dict.fromkeys(EXTREMES, legalize_extreme),
    **dict.fromkeys(("relax.argmax", "relax.argmin"), legalize_place),
    **{f"relax.nn.max_pool{axes}d": legalize_pool for axes in (1, 2, 3)},
    **{f"relax.{name}": legalize_bounds for name in ("clip", "nn.relu", "nn.relu6", "maximum", "minimum")},
}
"""The lowerings of this module by operator name."""
