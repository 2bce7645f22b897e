"""Schedule contractions in tiles: operands go through shared memory, results stay in registers, the tail is fused.

    block of threads:  a tile of rows x columns (x slice of the sum, x batch)
      for each ``depth`` steps of the sum:
        all threads together load a [depth, rows] and a [depth, columns] part of the operands into shared memory
        for each step: every thread loads its rows and columns into registers, and multiplies each with each
      every thread stores its results, with bias, residual and activation if the sum is not in slices

Extents are padded to whole tiles, by zeros that the loads supply. A second kernel adds the slices of a sum and computes
the tail. The threads of a warp write neighbouring columns, and neighbouring threads load neighbouring elements.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.sym.analyzer import Analyzer

from schedules.blocks import Block, Parts, inline_tail
from schedules.gpu.default_rules import bind_elements
from schedules.gpu.tile import DEPTH_FIRST, FETCH, STORE, AnyTile, Tile, Tiling

logger = logging.getLogger(__name__)

UNROLL = 512
"""Up to this many statements, nvcc is asked to unroll loops that the schedule does not unroll."""
SHIFT_OF_COLUMNS = 4
"""Padding elements per row of shared memory that threads write by columns."""


@dataclass(frozen=True)
class Cut:
    """A product before it is tiled, whose loops all consist of whole tiles.

    ``part`` is the loop over slices of the sum, if there are any. ``adder`` adds the slices.
    """

    block: SBlockRV
    part: LoopRV | None
    batch: LoopRV
    rows: LoopRV
    columns: LoopRV
    position: LoopRV
    depth: LoopRV
    left: Block
    right: Block
    tail: list[Block]
    adder: SBlockRV | None

    @property
    def outer(self) -> list[LoopRV]:
        """The loops over blocks of threads, except those over tiles."""
        return [self.batch] if self.part is None else [self.part, self.batch]


def cut(schedule: s_tir.Schedule, parts: Parts, tiling: Tiling[AnyTile]) -> Cut:
    """Pad the product of the kernel's left and right operand blocks to whole tiles; inline the other blocks.

    Its sum is split into ``tiling.slices``, if these are several. Return the loops and blocks.
    """
    anchor, tile = parts.anchor, tiling.tile
    left, right = _operand_views(schedule, parts)
    tail = inline_tail(schedule, anchor, parts.tail)
    units = [1, tile.rows, tile.columns, 1, tiling.slices * tile.depth]
    if any(extent % unit for extent, unit in zip(anchor.extents, units, strict=True)):
        schedule.pad_einsum(anchor.handle, units)
        left, right = (_padded(schedule, anchor, view) for view in (left, right))
        (cropped,) = schedule.get_consumers(anchor.handle)
        if str(schedule.get(cropped).name_hint) != tail[0].name:
            schedule.compute_inline(cropped)
    block, part, adder = anchor.handle, None, None
    if tiling.slices > 1:
        part, _ = schedule.split(schedule.get_loops(block)[-1], [tiling.slices, None])
        adder, block = block, schedule.rfactor(part, 0)
    batch, rows, columns, position, *slices, depth = schedule.get_loops(block)
    return Cut(block, slices[0] if slices else None, batch, rows, columns, position, depth, left, right, tail, adder)


def _operand_views(schedule: s_tir.Schedule, parts: Parts) -> tuple[Block, Block]:
    """Return the views that the legalization named ``left`` and ``right``; inline other blocks before the anchor."""
    named = {view.name.partition("_")[0]: view for view in parts.preparation}
    for view in parts.preparation:
        if view is not named["left"] and view is not named["right"]:
            schedule.compute_inline(view.handle)
    return named["left"], named["right"]


def _padded(schedule: s_tir.Schedule, anchor: Block, view: Block) -> Block:
    """Return the block that the anchor reads after padding, which is the view itself if that has whole tiles."""
    readers = schedule.get_consumers(view.handle)
    if str(schedule.get(readers[0]).name_hint) == anchor.name:
        return view
    schedule.compute_inline(view.handle)
    return replace(view, handle=readers[0])


def schedule_tiled(schedule: s_tir.Schedule, parts: Parts, tiling: Tiling[Tile]) -> None:
    """Schedule two operand views, an anchor (batch, row, column | position, depth) and the spatial blocks after it."""
    product, tile = cut(schedule, parts, tiling), tiling.tile
    lanes = min(tiling.lanes, int(parts.anchor.statement.annotations[STORE]))
    row_block, row_thread, row = schedule.split(product.rows, [None, tile.row_threads, tile.row_registers])
    # A thread's columns are groups of ``lanes``; the groups of all threads alternate, so that stores are contiguous.
    column_block, column_group, column_thread, column = schedule.split(
        product.columns, [None, tile.column_registers // lanes, tile.column_threads, lanes]
    )
    depth_outer, depth_inner = schedule.split(product.depth, [None, tile.depth])
    schedule.reorder(
        *product.outer, column_block, row_block, column_group, row_thread, column_thread,
        product.position, depth_outer, depth_inner, row, column,
    )  # fmt: skip
    schedule.bind(schedule.fuse(*product.outer, column_block, row_block), "blockIdx.x")
    schedule.bind(column_group, "vthread.x")
    schedule.bind(row_thread, "threadIdx.y")
    schedule.bind(column_thread, "threadIdx.x")
    for loop in (depth_inner, row, column):
        schedule.unroll(loop)
    schedule.annotate(column_thread, "pragma_auto_unroll_max_step", UNROLL)
    schedule.annotate(column_thread, "pragma_unroll_explicit", 0)

    stored = schedule.cache_write(product.block, 0, "local")
    schedule.reverse_compute_at(stored, column_thread, preserve_unit_loops=True)
    finish(schedule, product.tail, product.adder)
    schedule.vectorize(schedule.get_loops(stored)[-1])

    for index, view in enumerate((product.left, product.right)):
        _load_together(schedule, view, depth_outer, tile, tiling.lanes)
        registers = schedule.cache_read(product.block, index, "local")
        schedule.compute_at(registers, depth_inner, preserve_unit_loops=True)
        innermost = schedule.get_loops(registers)[-1]
        _, vector = schedule.split(innermost, [None, min(4, int(schedule.get(innermost).extent))])
        schedule.vectorize(vector)
    schedule.decompose_reduction(product.block, product.position)


def _load_together(schedule: s_tir.Schedule, view: Block, depth_outer: LoopRV, tile: Tile, most_lanes: int) -> None:
    """Load a view's part for ``depth`` steps of the sum into shared memory, with all threads of the block."""
    schedule.set_scope(view.handle, 0, "shared")
    schedule.compute_at(view.handle, depth_outer, preserve_unit_loops=True)
    depth, extent = schedule.get_loops(view.handle)[-2:]
    elements = int(schedule.get(depth).extent) * int(schedule.get(extent).extent)
    lanes = min(most_lanes, int(view.statement.annotations[FETCH]), max(1, elements // tile.threads))
    if int(view.statement.annotations[DEPTH_FIRST]):
        lanes = 1
        schedule.reorder(extent, depth)
        depth, extent = extent, depth
        # Threads write one column of the shared matrix: the padding per row puts them into different banks.
        schedule.storage_align(view.handle, 0, axis=-2, factor=32, offset=SHIFT_OF_COLUMNS)
    share_among_threads(schedule, [depth, extent], tile.row_threads, tile.column_threads, lanes)


def share_among_threads(schedule: s_tir.Schedule, loops: Sequence[LoopRV], rows: int, columns: int, lanes: int) -> None:
    """Share a copy's elements among ``rows * columns`` threads, ``lanes`` at a time."""
    _, row_thread, column_thread, vector = schedule.split(schedule.fuse(*loops), [None, rows, columns, lanes])
    schedule.bind(row_thread, "threadIdx.y")
    schedule.bind(column_thread, "threadIdx.x")
    schedule.vectorize(vector)


def finish(schedule: s_tir.Schedule, tail: Sequence[Block], adder: SBlockRV | None) -> None:
    """Schedule the blocks after a sum: the first where the sum is stored, if possible; the others as separate kernels.

    The first block cannot be computed there if it makes several elements from one, or if the sum is in slices; then the
    first block's threads compute the ``adder``, which adds them.
    """
    if adder is not None:
        thread = bind_elements(schedule, tail[0].handle)
        schedule.compute_at(adder, thread, preserve_unit_loops=True)
        schedule.set_scope(adder, 0, "local")
        schedule.unroll(schedule.get_loops(adder)[-1])
        tail = tail[1:]
    elif not _would_store_padding(schedule, tail[0]):
        try:
            schedule.reverse_compute_inline(tail[0].handle)
            tail = tail[1:]
        except Exception as error:
            logger.debug("%s is a kernel of its own: %s", tail[0].name, error)
    for block in tail:
        bind_elements(schedule, block.handle)


def _would_store_padding(schedule: s_tir.Schedule, block: Block) -> bool:
    """Return whether TVM's reverse_compute_inline would store padding as results.

    It keeps conditions of the block's own loops only, and none of an index that is constant or a remainder and so stays
    below an axis's padding. Examples are the first of rows that are padded from one, and the channel within its group.
    """
    analyzer = Analyzer()
    return any(
        int(part.extent) == 1 and analyzer.const_int_bound(part.min).max_value + 1 < int(extent)
        for read in schedule.get(block.handle).reads
        for part, extent in zip(read.region, read.source.shape, strict=True)
    )
