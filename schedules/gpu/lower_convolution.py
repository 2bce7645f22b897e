"""Lower convolutions for a GPU: as a product of weights and patches, or window by window if channels stay separate.

They have one to three axes. Transposed convolutions are convolutions, with flipped weights, of images with zeros
between their pixels (Dumoulin, Visin: A guide to convolution arithmetic for deep learning, 2016). These images are
never in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from schedules.blocks import ANCHOR
from schedules.gpu.lower_contraction import Contraction, Operand, contract, uses_tensor_cores
from schedules.gpu.tile import DEPTHWISE, Extents, Gpu
from schedules.relax_tools import (
    FUSABLE,
    PLAIN_LAYOUTS,
    accumulator_dtype,
    default_convolution,
    is_plain,
    operator_of,
    ravel,
    static_shape,
    unravel,
    window_of,
)

CONVOLUTIONS = tuple(PLAIN_LAYOUTS)


def legalize_convolution(builder: BlockBuilder, call: relax.Call, gpu: Gpu) -> relax.Expr:
    """Lower a convolution with static shapes in plain layout and any groups; all others are left to TVM."""
    data, weight = call.args
    window = _window(call)
    if window is None:
        return default_convolution(builder, call)
    out_dtype, name = str(call.ty.dtype), operator_of(call).rsplit(".", 1)[-1]
    # These are separate kernels, so that FoldConstant computes them for constant weights.
    if _is_transposed(call):
        turn = partial(_turn, groups=window.groups)
        weight = builder.emit(builder.call_te(turn, weight, primfunc_name_hint="turn_weight"))
    if window.group_inputs == 1:
        compute = partial(_depthwise, window=window, out_dtype=out_dtype)
        return builder.call_te(compute, data, weight, primfunc_name_hint=f"depthwise_{name}", primfunc_attrs=FUSABLE)
    by_outputs = uses_tensor_cores(gpu, window.extents, str(data.ty.dtype), str(weight.ty.dtype))
    pack = partial(_pack, groups=window.groups, by_outputs=by_outputs)
    packed = builder.emit(builder.call_te(pack, weight, primfunc_name_hint="pack_weight"))
    compute = partial(_dense, window=window, out_dtype=out_dtype, gpu=gpu, by_outputs=by_outputs)
    return builder.call_te(compute, data, packed, primfunc_name_hint=name, primfunc_attrs=FUSABLE)


@dataclass(frozen=True)
class _Window:
    """A convolution's sizes, heights before widths; an image has ``between - 1`` zeros between its pixels."""

    image: tuple[int, ...]
    outputs: int
    group_inputs: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    between: tuple[int, ...]
    groups: int

    @property
    def axes(self) -> range:
        return range(len(self.kernel))

    @property
    def result(self) -> tuple[int, ...]:
        def extent(axis: int) -> int:
            image = (self.image[2 + axis] - 1) * self.between[axis] + 1
            padded = image + self.before[axis] + self.after[axis]
            return (padded - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // self.strides[axis] + 1

        return tuple(map(extent, self.axes))

    @property
    def extents(self) -> Extents:
        """The extents of the product, for each group: outputs x pixels of all images."""
        return Extents(
            batch=self.groups,
            rows=self.outputs // self.groups,
            columns=self.image[0] * prod(self.result),
            depth=self.group_inputs * prod(self.kernel),
        )

    @property
    def is_pointwise(self) -> bool:
        """Whether each output needs one pixel's channels, pixel by pixel; then the matrix of patches is the image."""
        return {*self.kernel, *self.strides, *self.between} == {1} and not any(self.before + self.after)

    def read(self, data: te.Tensor, image: Any, channel: Any, at: Sequence[Any], inside: Sequence[Any]) -> Any:
        """Return the input pixel that the kernel's element ``inside`` multiplies for output pixel ``at``, or zero.

        It is zero in the padding, and between the pixels of a transposed convolution's image.
        """
        places = [
            at[axis] * self.strides[axis] + inside[axis] * self.dilation[axis] - self.before[axis] for axis in self.axes
        ]
        value = data[(image, channel, *(place // step for place, step in zip(places, self.between, strict=True)))]
        conditions = [place % step == 0 for place, step in zip(places, self.between, strict=True) if step > 1]
        if any(self.before + self.after):
            for axis, place in enumerate(places):
                end = (self.image[2 + axis] - 1) * self.between[axis] + 1
                conditions += [place >= 0, place < end]
        return tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, data.dtype)) if conditions else value


def _is_transposed(call: relax.Call) -> bool:
    return operator_of(call).endswith("_transpose")


def _window(call: relax.Call) -> _Window | None:
    data, weight = (static_shape(argument) for argument in call.args)
    if not is_plain(call) or data is None or weight is None or 0 in (*data, *weight):
        return None
    sizes, groups, kernel = window_of(call), int(call.attrs.groups), weight[2:]
    padding, dilation, strides = (tuple(sizes[name]) for name in ("padding", "dilation", "strides"))
    before, after, ones = padding[: len(kernel)], padding[len(kernel) :], (1,) * len(kernel)
    if _is_transposed(call):
        reach = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        more = [int(extent) for extent in call.attrs.output_padding]
        window = _Window(
            image=data,
            outputs=weight[1] * groups,
            group_inputs=weight[0] // groups,
            kernel=kernel,
            strides=ones,
            before=tuple(end - cut for end, cut in zip(reach, before, strict=True)),
            after=tuple(end - cut + extra for end, cut, extra in zip(reach, after, more, strict=True)),
            dilation=dilation,
            between=strides,
            groups=groups,
        )
    else:
        window = _Window(data, weight[0], weight[1], kernel, strides, before, after, dilation, ones, groups)
    return window if min(window.result) > 0 else None


def _turn(weight: te.Tensor, groups: int) -> te.Tensor:
    """Convert a transposed convolution's weight [I, O / groups, ...] to [O, I / groups, ...] and reverse its window."""
    inputs, share, *kernel = (int(extent) for extent in weight.shape)

    def element(output: Any, channel: Any, *inside: Any) -> Any:
        turned = (size - 1 - place for size, place in zip(kernel, inside, strict=True))
        return weight[(output // share * (inputs // groups) + channel, output % share, *turned)]

    return te.compute((share * groups, inputs // groups, *kernel), element, name="turn_weight")


def _pack(weight: te.Tensor, groups: int, by_outputs: bool) -> te.Tensor:
    """Convert weight [O, I, ...] to [group, positions * I, O / groups]; ``by_outputs`` exchanges the last two axes.

    Elements that threads load together are then contiguous. With the channels innermost, a tile of the sum lies within
    one position of the kernel. So threads need no arithmetic for the kernel's row and column.
    """
    outputs, inputs, *kernel = (int(extent) for extent in weight.shape)
    share = outputs // groups

    def element(group: Any, k: Any, output: Any) -> Any:
        return weight[(group * share + output, k % inputs, *unravel(k // inputs, kernel))]

    depth = inputs * prod(kernel)
    if by_outputs:
        return te.compute((groups, share, depth), lambda group, at, k: element(group, k, at), name="pack_weight")
    return te.compute((groups, depth, share), element, name="pack_weight")


def _dense(
    data: te.Tensor, packed: te.Tensor, window: _Window, out_dtype: str, gpu: Gpu, by_outputs: bool
) -> te.Tensor:
    """Return the product of patches and weights from `_pack`."""
    extents, batch = window.extents, window.image[0]
    pixels, inputs, share = prod(window.result), window.group_inputs, extents.rows

    def weights(group: Any, position: Any, channel: Any, output: Any) -> Any:
        k = position * inputs + channel
        return packed[group, output, k] if by_outputs else packed[group, k, output]

    def patch(group: Any, position: Any, channel: Any, at: Any) -> Any:
        pixel = at % pixels
        return window.read(
            data,
            at // pixels,
            group * inputs + channel,
            unravel(pixel, window.result),
            unravel(position, window.kernel),
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
            positions=prod(window.kernel),
        ),
        "conv2d",
        gpu,
    )

    def store(image: Any, output: Any, *at: Any) -> Any:
        group, row = (0, output) if window.groups == 1 else (output // share, output % share)
        return product(group, row, image * pixels + ravel(at, window.result)).astype(out_dtype)

    return te.compute((batch, window.outputs, *window.result), store, name="store")


def _depthwise(data: te.Tensor, weight: te.Tensor, window: _Window, out_dtype: str) -> te.Tensor:
    """Return a convolution with one input channel per output; several outputs may share a channel."""
    share = window.outputs // window.groups
    dtype = accumulator_dtype(out_dtype)
    inside = [te.reduce_axis((0, extent), name=f"k{axis}") for axis, extent in enumerate(window.kernel)]

    def element(image: Any, output: Any, *at: Any) -> Any:
        value = window.read(data, image, output // share, at, inside)
        return te.sum(value.astype(dtype) * weight[(output, 0, *inside)].astype(dtype), axis=inside)

    shape = (window.image[0], window.outputs, *window.result)
    product = te.compute(shape, element, name="depthwise_conv2d", attrs={ANCHOR: DEPTHWISE})
    return te.compute(shape, lambda *index: product[index].astype(out_dtype), name="store")
