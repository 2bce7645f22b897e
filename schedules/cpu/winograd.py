"""Choose the convolutions over blocked channels that Winograd's method makes faster, their tiles and loop nesting.

The weights are transformed here. They become 4 times (tiles of 4 x 4) or 1.78 times (2 x 2) as large as the kernel, in
memory and in the bundle. The choice is a cost rule: the seconds of one core for products, for transforms, and for bytes
from beyond the second-level cache. The rates were measured on one core of an x86-64 server with AVX-512 at about 220
GFLOP/s and 15 GB/s. Only their ratios affect the choice, and those are similar on related processors.

Schedule Winograd convolution over blocked channels: transform tiles, multiply 16 or 36 matrices, transform back.

*Grouped*: one parallel loop over groups of rows of tiles; all values between image and result stay in the second-level
cache. *Staged*: three parallel loops, the middle one over products and channel blocks; every weight is read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax, s_tir, tirx
from tvm.relax.expr_functor import mutator
from tvm.s_tir.schedule import LoopRV

from schedules.blocks import Block, Parts, find_parts, inline_tail, new_schedule
from schedules.cpu.contraction import unroll_and_vectorize
from schedules.cpu.elementwise import schedule_spatial_block
from schedules.cpu.register_tile import RegisterTile, dividing_tile, divisors, padded_extent, slowdown
from schedules.cpu.winograd_lowering import (
    COLUMNS,
    FAMILY,
    POINT_PAIRS,
    STAGED,
    TAPS,
    Winograd,
    tile_size,
    transformed_kernel,
    winograd_conv2d,
)
from schedules.prefetch import Region, mark_for_prefetch, prefetch_weights
from schedules.relax_tools import CONV2D, FUSABLE, TraitsMutator, array_of, constant, operator_of, static_shape
from schedules.traits import Traits

# Nanoseconds of one vector multiply-add: direct convolution reaches 170 GFLOP/s, and so do the products while their
# weights are in a near cache.
MULTIPLY_ADD_NS = 32 / 170
# Nanoseconds per byte from beyond the second-level cache, for weights and for values that do not stay in a group.
BYTE_NS = 1 / 15
# Loading a weight vector from the second-level cache takes as long as this many multiply-adds. Register tiles with
# fewer rows wait for it.
ROWS_FOR_A_WEIGHT = 5
# The products of a group with more tiles than one register tile take longer by this factor. Measured at 64 channels of
# 224 x 224 (10.8 to 8.9 ms for groups of 28 and 14) and 128 of 112 x 112 (9.0 to 7.8).
SEVERAL_TILES = 1.2
# Nanoseconds to transform one tile of one channel block, by outputs (2: 16 values, 4: 36 values); and to copy one pixel
# of it.
INPUT_TRANSFORM_NS = {2: 28.0, 4: 85.0}
OUTPUT_TRANSFORM_NS = {2: 18.0, 4: 75.0}
COPY_NS = 1.5
# Size of a second-level cache. What a group needs beyond it, weights included, is read again for every group ...
CACHE_BYTES = 2 * 1024 * 1024
# ... and so are all values between the steps of a group, if they take more than half of the cache.
LARGEST_GROUP_BYTES = CACHE_BYTES // 2
# Nanoseconds to wake the threads and to wait for the last one, per parallel loop.
PARALLEL_LOOP_NS = 4000.0
# Direct convolution is more exact and has smaller weights, so it is kept where Winograd saves less than a tenth.
LEAST_GAIN = 0.9


@dataclass(frozen=True)
class Workload:
    """A 3 x 3 convolution with stride and dilation 1; blocks have ``input_lanes`` and ``output_lanes`` channels."""

    batch: int
    input_blocks: int
    output_blocks: int
    out_height: int
    out_width: int
    input_lanes: int
    output_lanes: int

    @property
    def input_channels(self) -> int:
        return self.input_blocks * self.input_lanes


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
    """The convolution's sizes, or None unless it is float32, 3 x 3, with stride, dilation and groups 1."""
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


def choose_winograd(workload: Workload, traits: Traits, threads: int) -> Winograd | None:
    """The cheapest choice for ``threads`` threads, or None if direct convolution is about as fast."""
    choices = list(_candidates(workload))
    best = min(choices, key=lambda choice: winograd_nanoseconds(workload, choice, traits, threads))
    limit = LEAST_GAIN * direct_nanoseconds(workload, threads)
    return best if winograd_nanoseconds(workload, best, traits, threads) < limit else None


def direct_nanoseconds(workload: Workload, threads: int) -> float:
    """The estimated nanoseconds of direct convolution.

    Its weights come from memory once. Its image is small relative to them, or is computed on for long.
    """
    pixels = workload.batch * workload.out_height * workload.out_width
    steps = pixels * workload.input_channels * TAPS * TAPS * workload.output_blocks
    weights = 4 * TAPS * TAPS * workload.input_channels * workload.output_blocks * workload.output_lanes
    return (steps * MULTIPLY_ADD_NS + weights * BYTE_NS) / threads + PARALLEL_LOOP_NS


def winograd_nanoseconds(workload: Workload, choice: Winograd, traits: Traits, threads: int) -> float:
    """The estimated nanoseconds of a choice, by the rates above."""
    across = -(-workload.out_width // (choice.outputs * choice.columns))
    groups = workload.batch * across * -(-workload.out_height // (choice.outputs * choice.rows))
    tiles = padded_extent(choice.rows * choice.columns, workload.output_blocks, traits)
    points = tile_size(choice.outputs) ** 2
    weights = 4 * points * workload.input_channels * workload.output_blocks * workload.output_lanes
    tile = dividing_tile(tiles, workload.output_blocks, traits)
    slower = max(slowdown(tile), ROWS_FOR_A_WEIGHT / tile.rows)
    products = points * tiles * workload.input_channels * workload.output_blocks * MULTIPLY_ADD_NS * slower
    pixels = (choice.outputs * choice.rows + TAPS - 1) * (choice.outputs * choice.columns + TAPS - 1)
    transforms = (
        workload.input_blocks * (tiles * INPUT_TRANSFORM_NS[choice.outputs] + pixels * COPY_NS)
        + workload.output_blocks * tiles * OUTPUT_TRANSFORM_NS[choice.outputs]
    )
    between = group_bytes(workload, choice, tiles)
    if choice.staged:
        # The values are written and read again if a core's part does not stay in its cache, or another core wrote them.
        stays_in_cache = groups * between <= CACHE_BYTES * threads
        beyond = 2 * between * ((threads - 1) / threads if stays_in_cache else 1.0)
        work = groups * (products + transforms + beyond * BYTE_NS) + weights * BYTE_NS
        return work / threads + 3 * PARALLEL_LOOP_NS
    rounds = -(-groups // threads)
    products *= SEVERAL_TILES if tiles > tile.rows else 1.0
    beyond = 2 * between if between > LARGEST_GROUP_BYTES else 0
    again = max(0, min(weights, weights + between - CACHE_BYTES))
    work = rounds * (products + transforms + (beyond + again) * BYTE_NS) + (weights - again) * BYTE_NS
    return work + PARALLEL_LOOP_NS


def group_bytes(workload: Workload, choice: Winograd, tiles: int) -> int:
    """The bytes of the transformed input and the sums of a group of ``tiles`` tiles."""
    values = workload.input_channels + workload.output_blocks * workload.output_lanes
    return 4 * tile_size(choice.outputs) ** 2 * tiles * values


def _candidates(workload: Workload) -> Iterator[Winograd]:
    for outputs in POINT_PAIRS:
        rows, columns = (-(-extent // outputs) for extent in (workload.out_height, workload.out_width))
        yield Winograd(outputs, rows, columns, staged=True)
        for some_rows in divisors(rows):
            for some_columns in divisors(columns):
                if (some_rows, some_columns) != (rows, columns):
                    yield Winograd(outputs, some_rows, some_columns, staged=False)


# The unrolled steps of the reduction over a block's channels.
UNROLLED_CHANNELS = 4
# The 16 or 36 values of a tile are in as many planes. Planes start one vector after a multiple of this. Otherwise they
# share a few sets of the first-level cache: 64 channels of 56 x 56 take 0.53 instead of 0.47 ms.
ALIGNED_FLOATS = 128
PLANE_AXIS = 3


def schedule_winograd(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule the blocks that `schedules.cpu.winograd_lowering` made, with the elementwise blocks after them."""
    schedule = new_schedule(function)
    parts = find_parts(schedule, FAMILY)
    if parts is None:
        return None
    staged = bool(parts.anchor.statement.annotations[STAGED])
    columns = int(parts.anchor.statement.annotations[COLUMNS])
    extents = parts.anchor.extents
    tile = dividing_tile(extents[5], extents[4], traits)
    sums, output_rows, output, *stores = parts.tail
    last, *after = inline_tail(schedule, output, stores)
    for block in after:
        schedule_spatial_block(schedule, block, traits)
    group = _tile_results(schedule, last, output, output_rows, columns, staged)
    _multiply(schedule, parts.anchor, sums, tile, group)
    _transform_input(schedule, parts, group)
    for block in (parts.preparation[-1], sums):
        schedule.storage_align(block.handle, 0, PLANE_AXIS, ALIGNED_FLOATS, traits.lanes)
    return prefetch_weights(schedule.mod["main"])


def _tile_results(
    schedule: s_tir.Schedule, last: Block, output: Block, output_rows: Block, columns: int, staged: bool
) -> LoopRV | None:
    """Tile the results and transform each tile back where it is stored; return the loop over groups, None if staged."""
    outputs, rows = output.extents[4], output.extents[3] // columns
    n, o, h, w, lane = schedule.get_loops(last.handle)
    g, r, a = schedule.split(h, [None, rows, outputs])
    across, column, b = schedule.split(w, [None, columns, outputs])
    schedule.reorder(n, g, across, o, r, column, a, b, lane)
    shared = schedule.fuse(n, g, across, o, r) if staged else schedule.fuse(n, g, across)
    schedule.parallel(shared)
    for block in (output, output_rows):
        schedule.compute_at(block.handle, column, preserve_unit_loops=True)
        schedule.set_scope(block.handle, 0, "local")
        unroll_and_vectorize(schedule, schedule.get_loops(block.handle)[-3:])
    unroll_and_vectorize(schedule, [a, b, lane])
    return None if staged else shared


def _multiply(schedule: s_tir.Schedule, anchor: Block, sums: Block, tile: RegisterTile, group: LoopRV | None) -> None:
    """Schedule one matrix product per plane, in register tiles; a tile's sums are accumulated in registers."""
    if group is not None:
        schedule.compute_at(sums.handle, group, preserve_unit_loops=True)
    n, g, i, j, o, t, lane = schedule.get_loops(sums.handle)[-7:]
    block_outer, block_inner = schedule.split(o, [None, tile.blocks])
    tile_outer, tile_inner = schedule.split(t, [None, tile.rows])
    schedule.reorder(i, j, block_outer, n, g, tile_outer, tile_inner, block_inner, lane)
    if group is None:
        schedule.parallel(schedule.fuse(i, j, block_outer))
    unroll_and_vectorize(schedule, [tile_inner, block_inner, lane])
    schedule.compute_at(anchor.handle, tile_outer, preserve_unit_loops=True)
    schedule.set_scope(anchor.handle, 0, "local")
    block_inner, tile_inner, lane, block, channel = schedule.get_loops(anchor.handle)[-5:]
    schedule.reorder(block, channel, tile_inner, block_inner, lane)
    channel, step = schedule.split(channel, [None, UNROLLED_CHANNELS])
    schedule.unroll(step)
    unroll_and_vectorize(schedule, [tile_inner, block_inner, lane])
    initial = schedule.decompose_reduction(anchor.handle, block)
    unroll_and_vectorize(schedule, schedule.get_loops(initial)[-3:])
    # The loops over images, groups and tiles, and the four loops inside each iteration, read a tile of weights again.
    channels = anchor.extents[7] * anchor.extents[8]
    # Prefetching in each step of the innermost loop instead costs half of what it gains at 512 channels of 28 x 28.
    mark_for_prefetch(schedule, schedule.get_loops(anchor.handle)[-6], Region(7, tile.blocks, channels, channels))


def _transform_input(schedule: s_tir.Schedule, parts: Parts, group: LoopRV | None) -> None:
    """Transform the input tile by tile, in two passes through registers, from a zero-padded copy of its pixels."""
    pad, input_rows, factors = parts.preparation
    if group is not None:
        schedule.compute_at(factors.handle, group, preserve_unit_loops=True)
    n, g, i, j, c, t, lane = schedule.get_loops(factors.handle)[-7:]
    schedule.reorder(n, g, c, t, i, j, lane)
    if group is None:
        c = schedule.fuse(n, g, c)
        schedule.parallel(c)
    unroll_and_vectorize(schedule, [i, j, lane])
    schedule.compute_at(input_rows.handle, t, preserve_unit_loops=True)
    schedule.set_scope(input_rows.handle, 0, "local")
    unroll_and_vectorize(schedule, schedule.get_loops(input_rows.handle)[-3:])
    schedule.compute_at(pad.handle, c, preserve_unit_loops=True)
    schedule.vectorize(schedule.get_loops(pad.handle)[-1])
