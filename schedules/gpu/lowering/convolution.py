"""relax.nn.conv2d for a GPU: as a product of weights and patches, or window by window where channels stay apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from tvm_split.schedules.blocks import ANCHOR
from tvm_split.schedules.expressions import (
    FUSABLE,
    accumulator_dtype,
    default_legalization,
    is_plain,
    static_shape,
    window_of,
)
from tvm_split.schedules.gpu.lowering.contraction import Contraction, Operand, contract, uses_tensor_cores
from tvm_split.schedules.gpu.tile import DEPTHWISE, Extents, Gpu


def legalize_conv2d(builder: BlockBuilder, call: relax.Call, gpu: Gpu) -> relax.Expr:
    """Static shapes in NCHW, any groups; other layouts and symbolic shapes are left to TVM."""
    data, weight = call.args
    window = _window(call)
    if window is None:
        return default_legalization(builder, call)
    out_dtype = str(call.ty.dtype)
    if window.group_inputs == 1:
        compute = partial(_depthwise, window=window, out_dtype=out_dtype)
        return builder.call_te(compute, data, weight, primfunc_name_hint="depthwise_conv2d", primfunc_attrs=FUSABLE)
    # A kernel of its own, which FoldConstant computes where the weight is a constant.
    by_outputs = uses_tensor_cores(gpu, window.extents, str(data.ty.dtype), str(weight.ty.dtype))
    pack = partial(_pack, groups=window.groups, by_outputs=by_outputs)
    packed = builder.emit(builder.call_te(pack, weight, primfunc_name_hint="pack_weight"))
    compute = partial(_dense, window=window, out_dtype=out_dtype, gpu=gpu, by_outputs=by_outputs)
    return builder.call_te(compute, data, packed, primfunc_name_hint="conv2d", primfunc_attrs=FUSABLE)


@dataclass(frozen=True)
class _Window:
    """A convolution's sizes: heights before widths."""

    image: tuple[int, ...]
    outputs: int
    group_inputs: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def result(self) -> tuple[int, int]:
        def extent(axis: int) -> int:
            padded = self.image[2 + axis] + self.before[axis] + self.after[axis]
            return (padded - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // self.strides[axis] + 1

        return extent(0), extent(1)

    @property
    def extents(self) -> Extents:
        """Outputs x pixels of all images, for each group."""
        return Extents(
            batch=self.groups,
            rows=self.outputs // self.groups,
            columns=self.image[0] * self.result[0] * self.result[1],
            depth=self.group_inputs * self.kernel[0] * self.kernel[1],
        )

    @property
    def is_pointwise(self) -> bool:
        """Each output is one pixel's channels, pixel by pixel: the matrix of patches is the image."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.before + self.after)

    def read(self, data: te.Tensor, image: Any, channel: Any, at: tuple[Any, Any], inside: tuple[Any, Any]) -> Any:
        """The input that output pixel ``at`` multiplies with the kernel's element ``inside``; zero in the padding."""
        y, x = (
            at[axis] * self.strides[axis] + inside[axis] * self.dilation[axis] - self.before[axis] for axis in (0, 1)
        )
        value = data[image, channel, y, x]
        if not any(self.before + self.after):
            return value
        conditions = tirx.all(y >= 0, y < self.image[2], x >= 0, x < self.image[3])
        return tirx.if_then_else(conditions, value, tirx.const(0, data.dtype))


def _window(call: relax.Call) -> _Window | None:
    data, weight = (static_shape(argument) for argument in call.args)
    if not is_plain(call) or data is None or weight is None or 0 in (*data, *weight):
        return None
    sizes = window_of(call)
    window = _Window(
        image=data,
        outputs=weight[0],
        group_inputs=weight[1],
        kernel=weight[2:],
        strides=tuple(sizes["strides"]),
        before=tuple(sizes["padding"][:2]),
        after=tuple(sizes["padding"][2:]),
        dilation=tuple(sizes["dilation"]),
        groups=int(call.attrs.groups),
    )
    return window if min(window.result) > 0 else None


def _pack(weight: te.Tensor, groups: int, by_outputs: bool) -> te.Tensor:
    """Weight [O, I, h, w] as [group, h * w * I, O / groups], or with the last two exchanged where ``by_outputs``.

    What threads load together lies side by side then; and with the channels innermost, a tile of the sum lies within
    one position of the kernel, so that the kernel's row and column are no arithmetic of the threads.
    """
    outputs, inputs, height, width = (int(extent) for extent in weight.shape)
    share = outputs // groups

    def element(group: Any, k: Any, output: Any) -> Any:
        position = k // inputs
        return weight[group * share + output, k % inputs, position // width, position % width]

    depth = inputs * height * width
    if by_outputs:
        return te.compute((groups, share, depth), lambda group, at, k: element(group, k, at), name="pack_weight")
    return te.compute((groups, depth, share), element, name="pack_weight")


def _dense(
    data: te.Tensor, packed: te.Tensor, window: _Window, out_dtype: str, gpu: Gpu, by_outputs: bool
) -> te.Tensor:
    """Weights, as `_pack` gives them, times patches."""
    extents, batch, (height, width) = window.extents, window.image[0], window.result
    pixels, inputs, share = height * width, window.group_inputs, extents.rows

    def weights(group: Any, position: Any, channel: Any, output: Any) -> Any:
        k = position * inputs + channel
        return packed[group, output, k] if by_outputs else packed[group, k, output]

    def patch(group: Any, position: Any, channel: Any, at: Any) -> Any:
        pixel = at % pixels
        return window.read(
            data,
            at // pixels,
            group * inputs + channel,
            (pixel // width, pixel % width),
            (position // window.kernel[1], position % window.kernel[1]),
        )

    run = {"contiguous_depth": extents.depth} if by_outputs else {"contiguous": share}
    product = contract(
        Contraction(
            left=Operand(weights, str(packed.dtype), **run),
            right=Operand(patch, str(data.dtype), pixels if window.is_pointwise else 1),
            batch=extents.batch,
            rows=extents.rows,
            columns=extents.columns,
            depth=extents.depth,
            out_dtype=out_dtype,
            contiguous=pixels,
            positions=window.kernel[0] * window.kernel[1],
        ),
        "conv2d",
        gpu,
    )

    def store(image: Any, output: Any, y: Any, x: Any) -> Any:
        group, row = (0, output) if window.groups == 1 else (output // share, output % share)
        return product(group, row, image * pixels + y * width + x).astype(out_dtype)

    return te.compute((batch, window.outputs, height, width), store, name="store")


def _depthwise(data: te.Tensor, weight: te.Tensor, window: _Window, out_dtype: str) -> te.Tensor:
    """One input channel an output; several outputs may share it."""
    share = window.outputs // window.groups
    dtype = accumulator_dtype(out_dtype)
    y = te.reduce_axis((0, window.kernel[0]), name="kh")
    x = te.reduce_axis((0, window.kernel[1]), name="kw")

    def element(image: Any, output: Any, row: Any, column: Any) -> Any:
        value = window.read(data, image, output // share, (row, column), (y, x))
        return te.sum(value.astype(dtype) * weight[output, 0, y, x].astype(dtype), axis=[y, x])

    shape = (window.image[0], window.outputs, *window.result)
    product = te.compute(shape, element, name="depthwise_conv2d", attrs={ANCHOR: DEPTHWISE})
    return te.compute(shape, lambda *index: product[index].astype(out_dtype), name="store")
