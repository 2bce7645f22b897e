"""Schedule half-precision products on tensor cores: warps multiply fragments of 16 x 16 x 16, and sum in float32.

    block of threads:  a tile of rows x columns (x slice of the sum, x batch)
      for each ``depth`` steps of the sum:
        all threads together load a [rows, depth] and a [depth, columns] part of the operands into shared memory
        each warp loads fragments of its rows and columns from there, and multiplies each with each
      each warp stores its results in shared memory, and its threads store them with the blocks that follow

Nothing is loaded for the next steps while these are multiplied; other blocks on the same multiprocessor fill the gap.
"""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.blocks import Block, Parts
from schedules.gpu.contraction import cut, finish, share_among_threads
from schedules.gpu.fragments import fragments_of
from schedules.gpu.tile import FETCH, FRAGMENT, STORE, WARP, FragmentTile, Tiling

# Padding elements per row of an operand in shared memory: rows start in different banks and stay aligned for fragments.
SHIFT_OF_HALVES = 8


def schedule_tensor_core(schedule: s_tir.Schedule, parts: Parts, tiling: Tiling[FragmentTile]) -> None:
    """Schedule a product on tensor cores; anchor iterators: batch, row, column | position, depth."""
    whole, tile = cut(schedule, parts, tiling), tiling.tile
    row_block, row_warp, row_fragment, row_element = schedule.split(
        whole.rows, [None, tile.row_warps, tile.rows // tile.row_warps // FRAGMENT, FRAGMENT]
    )
    column_block, column_warp, column_fragment, column_element = schedule.split(
        whole.columns, [None, tile.column_warps, tile.columns // tile.column_warps // FRAGMENT, FRAGMENT]
    )
    depth_outer, depth_fragment, depth_element = schedule.split(whole.depth, [None, tile.depth // FRAGMENT, FRAGMENT])
    schedule.reorder(
        *whole.outer, column_block, row_block, row_warp, column_warp,
        whole.position, depth_outer, depth_fragment, row_fragment, column_fragment,
        row_element, column_element, depth_element,
    )  # fmt: skip
    product = schedule.blockize(row_element)
    schedule.bind(schedule.fuse(*whole.outer, column_block, row_block), "blockIdx.x")
    warp = schedule.fuse(row_warp, column_warp)
    schedule.bind(warp, "threadIdx.y")

    for view in (whole.left, whole.right):
        _load_together(schedule, view, depth_outer, tile, tiling.lanes)
    loaded = []
    for index, scope in enumerate(("wmma.matrix_a", "wmma.matrix_b")):
        loaded.append(schedule.cache_read(product, index, scope))
        schedule.compute_at(loaded[-1], depth_fragment)
    to_memory = schedule.cache_write(product, 0, "shared")
    to_shared = schedule.cache_write(product, 0, "wmma.accumulator")
    schedule.reverse_compute_at(to_shared, warp)
    schedule.reverse_compute_at(to_memory, warp)
    initial = schedule.decompose_reduction(product, whole.position)

    pieces = [_in_fragments(schedule, block) for block in (*loaded, to_shared)]
    dtype = str(whole.left.statement.writes[0].source.dtype)
    _use_instructions(schedule, pieces, schedule.get_child_blocks(initial)[0], whole.block, dtype)
    finish(schedule, whole.tail, whole.adder)
    fused = schedule.fuse(*schedule.get_loops(to_memory)[-2:])
    lanes = min(tiling.lanes, int(parts.anchor.statement.annotations[STORE]))
    _, thread, vector = schedule.split(fused, [None, WARP, lanes])
    schedule.bind(thread, "threadIdx.x")
    schedule.vectorize(vector)


def _load_together(
    schedule: s_tir.Schedule, view: Block, depth_outer: LoopRV, tile: FragmentTile, most_lanes: int
) -> None:
    schedule.set_scope(view.handle, 0, "shared")
    schedule.compute_at(view.handle, depth_outer, preserve_unit_loops=True)
    lanes = min(most_lanes, int(view.statement.annotations[FETCH]))
    share_among_threads(schedule, schedule.get_loops(view.handle)[-2:], tile.warps, WARP, lanes)
    schedule.storage_align(view.handle, 0, axis=-2, factor=FRAGMENT, offset=SHIFT_OF_HALVES)


def _in_fragments(schedule: s_tir.Schedule, block: SBlockRV) -> LoopRV:
    """Split a copy of a matrix into fragments; return the loop around one fragment."""
    row, column = schedule.get_loops(block)[-2:]
    row_outer, row_inner = schedule.split(row, [None, FRAGMENT])
    column_outer, column_inner = schedule.split(column, [None, FRAGMENT])
    schedule.reorder(row_outer, column_outer, row_inner, column_inner)
    schedule.unroll(row_outer)
    schedule.unroll(column_outer)
    return row_inner


def _use_instructions(
    schedule: s_tir.Schedule, pieces: list[LoopRV], initial: SBlockRV, product: SBlockRV, dtype: str
) -> None:
    fragments = fragments_of(dtype)
    for piece, name in zip(pieces, (fragments.load_left, fragments.load_right, fragments.store), strict=True):
        schedule.tensorize(piece, name)
    schedule.tensorize(schedule.get_loops(initial)[-2], fragments.clear)
    schedule.tensorize(schedule.get_loops(product)[-3], fragments.multiply)
