"""Schedule Winograd convolution over blocked channels: transform tiles, multiply 16 or 36 matrices, transform back.

*Grouped*: one parallel loop over groups of rows of tiles; all values between image and result stay in the second-level
cache. *Staged*: three parallel loops, the middle one over products and channel blocks; every weight is read once.
"""

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV

from schedules.blocks import Block, Parts, anchors_of, find_parts, inline_tail, new_schedule
from schedules.cpu.contraction import unroll_and_vectorize
from schedules.cpu.elementwise import schedule_spatial_block
from schedules.cpu.register_tile import RegisterTile, dividing_tile
from schedules.cpu.winograd import COLUMNS, FAMILY, STAGED
from schedules.prefetch import Region, mark_for_prefetch, prefetch_weights
from schedules.traits import Traits

UNROLLED_CHANNELS = 4
"""The unrolled steps of the reduction over a block's channels."""
ALIGNED_FLOATS = 128
"""The 16 or 36 planes, one for each value of a tile, start one vector after a multiple of this.

Otherwise they share a few sets of the first-level cache: 64 channels of 56 x 56 take 0.53 instead of 0.47 ms.
"""
PLANE_AXIS = 3


def schedule_winograd(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule the blocks that `schedules.cpu.winograd` made and what follows; None for other functions."""
    if FAMILY not in anchors_of(function):
        return None
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
