"""relax.nn.conv2d over blocked channels -> TE, with edges padded to whole register tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from tvm_split.schedules.blocks import ANCHOR
from tvm_split.schedules.cpu.conv2d import FAMILY as CONV2D
from tvm_split.schedules.cpu.depthwise_conv2d import FAMILY as DEPTHWISE
from tvm_split.schedules.cpu.register_tile import padded_extent
from tvm_split.schedules.legalize.common import (
    OUT_ELEMENTWISE_FUSABLE,
    accumulator_dtype,
    default_legalization,
)
from tvm_split.schedules.traits import Traits


def legalize_conv2d(traits: Traits) -> Callable[[BlockBuilder, relax.Call], relax.Expr]:
    """Layouts as `schedules.layouts` chooses them; others are left to TVM's own legalization."""

    def legalize(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
        attributes = call.attrs
        data, weight = call.args
        if not str(attributes.out_layout).endswith("c"):
            return default_legalization(builder, call)
        # Depthwise weights hold one input channel a group and no block of them: OIHW16o.
        depthwise = int(attributes.groups) > 1 and len(weight.ty.shape) == 5
        compute = _depthwise if depthwise else partial(_dense, groups=int(attributes.groups))
        return builder.call_te(
            partial(
                compute,
                strides=[int(value) for value in attributes.strides],
                padding=[int(value) for value in attributes.padding],
                dilation=[int(value) for value in attributes.dilation],
                out_dtype=str(call.ty.dtype),
                traits=traits,
            ),
            data,
            weight,
            primfunc_name_hint="depthwise_conv2d" if depthwise else "conv2d",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    return legalize


def _extent(size: int, kernel: int, stride: int, dilation: int, padding: int) -> int:
    return (size + padding - dilation * (kernel - 1) - 1) // stride + 1


def _padded(data: te.Tensor, padding: list[int], height: int, width: int) -> te.Tensor:
    """Data [N, C, H, W(, c)] with zeros around it, [N, C, height, width(, c)]; itself where nothing is added."""
    shape = [int(extent) for extent in data.shape]
    top, left = padding[0], padding[1]
    if (top, left, height, width) == (0, 0, shape[2], shape[3]):
        return data

    def element(n: Any, c: Any, h: Any, w: Any, *lane: Any) -> Any:
        inside = tirx.all(h >= top, h < top + shape[2], w >= left, w < left + shape[3])
        return tirx.if_then_else(inside, data[(n, c, h - top, w - left, *lane)], tirx.const(0, data.dtype))

    return te.compute([*shape[:2], height, width, *shape[4:]], element, name="pad")


def _dense(
    data: te.Tensor,
    weight: te.Tensor,
    strides: list[int],
    padding: list[int],
    dilation: list[int],
    out_dtype: str,
    traits: Traits,
    groups: int,
) -> te.Tensor:
    """Data [N, I/i, H, W, i] or [N, I, H, W]; weight [O/o, I/i, kh, kw, i, o] or [O/o, I, kh, kw, o].

    With groups, the weight's I is that of one group, and blocks do not cross groups.
    """
    batch, _, height, width = (int(extent) for extent in data.shape[:4])
    blocks, channels, kernel_h, kernel_w = (int(extent) for extent in weight.shape[:4])
    lanes = int(weight.shape[-1])
    out_h = _extent(height, kernel_h, strides[0], dilation[0], padding[0] + padding[2])
    out_w = _extent(width, kernel_w, strides[1], dilation[1], padding[1] + padding[3])
    tiled_w = padded_extent(out_w, blocks, traits)
    needed_h = (out_h - 1) * strides[0] + dilation[0] * (kernel_h - 1) + 1
    needed_w = (tiled_w - 1) * strides[1] + dilation[1] * (kernel_w - 1) + 1
    source = _padded(
        data, padding, max(needed_h, height if not any(padding) else 0), max(needed_w, width if not any(padding) else 0)
    )
    dtype = accumulator_dtype(out_dtype)
    reduce_block = te.reduce_axis((0, channels), name="ic")
    reduce_h = te.reduce_axis((0, kernel_h), name="kh")
    reduce_w = te.reduce_axis((0, kernel_w), name="kw")
    axes = [reduce_block, reduce_h, reduce_w]
    lane_axes = [te.reduce_axis((0, int(data.shape[4])), name="il")] if len(data.shape) == 5 else []

    def element(n: Any, o: Any, h: Any, w: Any, lane: Any) -> Any:
        row = h * strides[0] + reduce_h * dilation[0]
        column = w * strides[1] + reduce_w * dilation[1]
        block = reduce_block if groups == 1 else o // (blocks // groups) * channels + reduce_block
        value = source[(n, block, row, column, *lane_axes)].astype(dtype)
        factor = weight[(o, reduce_block, reduce_h, reduce_w, *lane_axes, lane)].astype(dtype)
        return te.sum(value * factor, axis=[*axes, *lane_axes])

    product = te.compute((batch, blocks, out_h, tiled_w, lanes), element, name="conv2d", attrs={ANCHOR: CONV2D})
    return te.compute(
        (batch, blocks, out_h, out_w, lanes), lambda *index: product[index].astype(out_dtype), name="store"
    )


def _depthwise(
    data: te.Tensor,
    weight: te.Tensor,
    strides: list[int],
    padding: list[int],
    dilation: list[int],
    out_dtype: str,
    traits: Traits,
) -> te.Tensor:
    """Data [N, C/c, H, W, c], weight [C/c, 1, kh, kw, c]."""
    batch, blocks, height, width, lanes = (int(extent) for extent in data.shape)
    kernel_h, kernel_w = (int(extent) for extent in weight.shape[2:4])
    out_h = _extent(height, kernel_h, strides[0], dilation[0], padding[0] + padding[2])
    out_w = _extent(width, kernel_w, strides[1], dilation[1], padding[1] + padding[3])
    tiled_w = padded_extent(out_w, 1, traits)
    needed_h = (out_h - 1) * strides[0] + dilation[0] * (kernel_h - 1) + 1
    needed_w = (tiled_w - 1) * strides[1] + dilation[1] * (kernel_w - 1) + 1
    source = _padded(
        data, padding, max(needed_h, height if not any(padding) else 0), max(needed_w, width if not any(padding) else 0)
    )
    dtype = accumulator_dtype(out_dtype)
    reduce_h = te.reduce_axis((0, kernel_h), name="kh")
    reduce_w = te.reduce_axis((0, kernel_w), name="kw")

    def element(n: Any, c: Any, h: Any, w: Any, lane: Any) -> Any:
        value = source[n, c, h * strides[0] + reduce_h * dilation[0], w * strides[1] + reduce_w * dilation[1], lane]
        factor = weight[c, 0, reduce_h, reduce_w, lane]
        return te.sum(value.astype(dtype) * factor.astype(dtype), axis=[reduce_h, reduce_w])

    product = te.compute(
        (batch, blocks, out_h, tiled_w, lanes), element, name="depthwise_conv2d", attrs={ANCHOR: DEPTHWISE}
    )
    return te.compute(
        (batch, blocks, out_h, out_w, lanes), lambda *index: product[index].astype(out_dtype), name="store"
    )
