"""Replace the convolutions over blocked channels that Winograd's method makes faster by its kernels, written in TE.

The weights are transformed here. They become 4 times (tiles of 4 x 4) or 1.78 times (2 x 2) as large as the kernel, in
memory and in the bundle.

The blocks are ``pad -> input rows -> input -> product (the anchor) -> sums -> output rows -> output -> store``. A tile
is ``outputs`` x ``outputs`` results of one channel block. A group is ``rows`` x ``columns`` tiles of one image, and
holds all values between the pixels it reads and its results. A group's tiles are padded to whole register tiles.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import mutator

from schedules.blocks import ANCHOR
from schedules.cpu.register_tile import padded_extent
from schedules.cpu.winograd_cost import Winograd, Workload, choose_winograd
from schedules.cpu.winograd_matrices import TAPS, tile_size, transformed_input, transformed_kernel, transformed_output
from schedules.relax_tools import CONV2D, FUSABLE, TraitsMutator, array_of, constant, operator_of, static_shape
from schedules.traits import Traits

FAMILY = "winograd"
STAGED = "tvm_split.winograd_staged"
"""Annotation of the anchor: 1 if its three steps are separate loops, 0 if they are one loop over groups."""
COLUMNS = "tvm_split.winograd_columns"
"""Annotation of the anchor: the number of adjacent tiles in a row of a group."""


@mutator
class UseWinograd(TraitsMutator):
    """Replaces chosen convolutions in blocked layouts by Winograd kernels; the legalization lowers the others."""

    def __init__(self, module: tvm.IRModule, traits: Traits, threads: int) -> None:
        super().__init__(module, traits)
        self.threads = threads

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != CONV2D:
            return call
        workload, kernel = workload_of(call), array_of(call.args[1])
        if workload is None or kernel is None:
            return call
        choice = choose_winograd(workload, self.traits, self.threads)
        if choice is None:
            return call
        padding = [int(value) for value in call.attrs.padding]
        return self.builder_.call_te(
            partial(winograd_conv2d, padding=padding, choice=choice, traits=self.traits),
            call.args[0],
            constant(transformed_kernel(kernel, choice.outputs)),
            primfunc_name_hint="winograd_conv2d",
            primfunc_attrs=FUSABLE,
        )


def workload_of(call: relax.Call) -> Workload | None:
    """Return a blocked convolution's sizes; None unless it is float32, 3 x 3, with stride, dilation and groups 1."""
    attributes = call.attrs
    data, kernel, result = (static_shape(tensor) for tensor in (call.args[0], call.args[1], call))
    if data is None or kernel is None or result is None or 0 in (*data, *kernel, *result):
        return None
    if (len(data), len(kernel), len(result)) != (5, 6, 5) or kernel[2:4] != (TAPS, TAPS):
        return None
    if int(attributes.groups) != 1 or any(int(step) != 1 for step in (*attributes.strides, *attributes.dilation)):
        return None
    if {str(tensor.ty.dtype) for tensor in (*call.args, call)} != {"float32"}:
        return None
    (batch, input_blocks, _, _, input_lanes), (_, output_blocks, height, width, output_lanes) = data, result
    return Workload(batch, input_blocks, output_blocks, height, width, input_lanes, output_lanes)


def winograd_conv2d(
    data: te.Tensor, weight: te.Tensor, padding: list[int], choice: Winograd, traits: Traits
) -> te.Tensor:
    """Convolve data [N, I/i, H, W, i] with a 3 x 3 kernel, stride and dilation 1; the result is [N, O/o, H', W', o].

    ``weight`` is [tile, tile, O/o, I/i, i, o], made by `transformed_kernel`; ``padding`` is top, left, bottom, right.
    """
    _, _, height, width, _ = (int(extent) for extent in data.shape)
    out_height = height + padding[0] + padding[2] - TAPS + 1
    out_width = width + padding[1] + padding[3] - TAPS + 1
    across = -(-out_width // (choice.outputs * choice.columns))
    groups = -(-out_height // (choice.outputs * choice.rows)) * across
    padded_tiles = padded_extent(choice.rows * choice.columns, int(weight.shape[2]), traits)
    image = _groups_of_pixels(data, padding, choice, groups, across)
    sums = _products(_transformed_tiles(image, choice, padded_tiles), weight, choice)
    return _stored(_results_of_tiles(sums, choice), choice, (out_height, out_width), across)


def _groups_of_pixels(data: te.Tensor, padding: list[int], choice: Winograd, groups: int, across: int) -> te.Tensor:
    """Return the pixels that each group reads, with zeros around the image; ``across`` groups are side by side."""
    batch, channels, height, width, lanes = (int(extent) for extent in data.shape)
    group_height, group_width = choice.outputs * choice.rows, choice.outputs * choice.columns

    def pixel(n: Any, g: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        h = g // across * group_height + y - padding[0]
        w = g % across * group_width + x - padding[1]
        inside = tirx.all(h >= 0, h < height, w >= 0, w < width)
        return tirx.if_then_else(inside, data[n, c, h, w, lane], tirx.const(0, data.dtype))

    shape = (batch, groups, channels, group_height + TAPS - 1, group_width + TAPS - 1, lanes)
    return te.compute(shape, pixel, name="pad")


def _transformed_tiles(image: te.Tensor, choice: Winograd, padded_tiles: int) -> te.Tensor:
    """Return the transformed input of each tile: first along the tile's rows, then along its columns."""
    batch, groups, channels, _, _, lanes = (int(extent) for extent in image.shape)
    outputs, columns, size = choice.outputs, choice.columns, tile_size(choice.outputs)

    def along_rows(n: Any, g: Any, c: Any, t: Any, i: Any, x: Any, lane: Any) -> Any:
        # The tiles that pad a register tile repeat the last one; their products are never read.
        t = tirx.min(t, choice.rows * columns - 1)
        top, left = t // columns * outputs, t % columns * outputs
        values = [image[n, g, c, top + k, left + x, lane] for k in range(size)]
        return _one_of(i, size, lambda row: transformed_input(outputs, row, values))

    shape = (batch, groups, channels, padded_tiles, size, size, lanes)
    by_rows = te.compute(shape, along_rows, name="input_rows")

    def along_columns(n: Any, g: Any, i: Any, j: Any, c: Any, t: Any, lane: Any) -> Any:
        values = [by_rows[n, g, c, t, i, k, lane] for k in range(size)]
        return _one_of(j, size, lambda row: transformed_input(outputs, row, values))

    shape = (batch, groups, size, size, channels, padded_tiles, lanes)
    return te.compute(shape, along_columns, name="transformed_input")


def _products(factors: te.Tensor, weight: te.Tensor, choice: Winograd) -> te.Tensor:
    """Return the sums over input channels of one matrix product per value of a tile."""
    batch, groups, size, _, channels, tiles, input_lanes = (int(extent) for extent in factors.shape)
    blocks, lanes = int(weight.shape[2]), int(weight.shape[5])
    block = te.reduce_axis((0, channels), name="ic")
    channel = te.reduce_axis((0, input_lanes), name="il")
    product = te.compute(
        (batch, groups, size, size, blocks, tiles, lanes),
        lambda n, g, i, j, o, t, lane: te.sum(
            factors[n, g, i, j, block, t, channel] * weight[i, j, o, block, channel, lane], axis=[block, channel]
        ),
        name="winograd",
        attrs={ANCHOR: FAMILY, STAGED: int(choice.staged), COLUMNS: choice.columns},
    )
    return te.compute(product.shape, lambda *index: product[index], name="sums")


def _results_of_tiles(sums: te.Tensor, choice: Winograd) -> te.Tensor:
    """Return the results of each tile: the sums, transformed first along rows and then along columns."""
    batch, groups, size, _, blocks, _, lanes = (int(extent) for extent in sums.shape)
    outputs, tiles = choice.outputs, choice.rows * choice.columns

    def along_rows(n: Any, g: Any, o: Any, t: Any, a: Any, j: Any, lane: Any) -> Any:
        values = [sums[n, g, k, j, o, t, lane] for k in range(size)]
        return _one_of(a, outputs, lambda row: transformed_output(outputs, row, values))

    by_rows = te.compute((batch, groups, blocks, tiles, outputs, size, lanes), along_rows, name="output_rows")

    def along_columns(n: Any, g: Any, o: Any, t: Any, a: Any, b: Any, lane: Any) -> Any:
        values = [by_rows[n, g, o, t, a, k, lane] for k in range(size)]
        return _one_of(b, outputs, lambda row: transformed_output(outputs, row, values))

    shape = (batch, groups, blocks, tiles, outputs, outputs, lanes)
    return te.compute(shape, along_columns, name="transformed_output")


def _stored(results: te.Tensor, choice: Winograd, extents: tuple[int, int], across: int) -> te.Tensor:
    """Return the results in the layout of the convolution's output, of ``extents`` pixels."""
    batch, _, blocks, _, outputs, _, lanes = (int(extent) for extent in results.shape)
    group_height, group_width = outputs * choice.rows, outputs * choice.columns

    def pixel(n: Any, o: Any, h: Any, w: Any, lane: Any) -> Any:
        row, column = h % group_height, w % group_width
        g = h // group_height * across + w // group_width
        t = row // outputs * choice.columns + column // outputs
        return results[n, g, o, t, row % outputs, column % outputs, lane]

    return te.compute((batch, blocks, *extents, lanes), pixel, name="store")


def _one_of(index: Any, count: int, expression: Callable[[int], Any]) -> Any:
    """Return ``expression(index)`` as a selection of ``count`` cases; unrolling the loop over ``index`` leaves one."""
    chosen = expression(count - 1)
    for case in reversed(range(count - 1)):
        chosen = tirx.Select(index == case, expression(case), chosen)
    return chosen
