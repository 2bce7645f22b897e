"""The templates of tiled products: their choices, a block's limits, and the schedule for tensor cores.

A tile is offered only if a block of threads can hold it: its threads, its shared memory as the schedules lay it out,
and the registers that a thread's results and operands need at least. The compiler detects other spills.

`schedule_tensor_core` is for half precision: warps multiply fragments of 16 x 16 x 16, and sum in float32.

    block of threads:  a tile of rows x columns (x slice of the sum, x batch)
      for each ``depth`` steps of the sum:
        all threads together load a [rows, depth] and a [depth, columns] part of the operands into shared memory
        each warp loads fragments of its rows and columns from there, and multiplies each with each
      each warp stores its results in shared memory, and its threads store them with the blocks that follow

Nothing is loaded for the next steps while these are multiplied; other blocks on the same multiprocessor fill the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import s_tir
from tvm.runtime import DataType
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.blocks import Block, Parts
from schedules.gpu.contraction import SHIFT_OF_COLUMNS, cut, finish, schedule_tiled, share_among_threads
from schedules.gpu.fragments import fragments_of
from schedules.gpu.tile import (
    DEPTH_FIRST,
    FETCH,
    FRAGMENT,
    MOST_STATIC_SHARED_BYTES,
    MOST_THREADS,
    STORE,
    TENSOR_CORE,
    TILED,
    VECTORS,
    WARP,
    AnyTile,
    Extents,
    FragmentTile,
    Gpu,
    Tile,
    Tiling,
    choose_fragment_tile,
    choose_tile,
    slices_to_try,
)
from schedules.template import Choices, Space, Template, Value, space_of

SHIFT_OF_HALVES = 8
"""Padding elements per row of an operand in shared memory, so that rows start in different banks.

Fragments stay aligned.
"""


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
    fragments = fragments_of(str(whole.left.statement.writes[0].source.dtype))
    for piece, kind in zip(pieces, ("load_left", "load_right", "store"), strict=True):
        schedule.tensorize(piece, fragments[kind])
    schedule.tensorize(schedule.get_loops(schedule.get_child_blocks(initial)[0])[-2], fragments["clear"])
    schedule.tensorize(schedule.get_loops(whole.block)[-3], fragments["multiply"])
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


# CUDA C++ Programming Guide, technical specifications per compute capability: these are equal from sm_50 on.
REGISTERS_OF_A_THREAD = 255
REGISTERS_OF_A_BLOCK = 65536
BYTES_OF_A_SUM = 4
ADDRESSES = 40
"""Registers of a thread for addresses and counters, besides its results and operands; an estimate."""
EXTENTS = (16, 32, 64, 128, 256)
REGISTER_EXTENTS = (1, 2, 4, 8, 16)
DEPTHS = (8, 16, 32)
WARPS = (1, 2, 4, 8)


def _template(
    name: str,
    anchor: str,
    kind: type[AnyTile],
    pairs: Sequence[int],
    depths: Sequence[int],
    choose: Callable[[Extents, int], tuple[AnyTile, int]],
    fits: Callable[[AnyTile, _Operands], bool],
    schedule_product: Callable[[s_tir.Schedule, Parts, Tiling[AnyTile]], None],
) -> Template[Gpu]:
    """Return a template for products in one kind of tiles: the values of its choices, and the schedule."""

    def tiling_of(choices: Choices) -> Tiling[AnyTile]:
        return Tiling(kind.of(choices), int(choices["slices"]), int(choices["lanes"]))

    def find_space(parts: Parts, gpu: Gpu) -> Space:
        # The anchor's iterators are batch, row, column | position, depth.
        batch, rows, columns, positions, depth = parts.anchor.extents
        operands = _operands(parts)
        tile, slices = choose(Extents(batch, rows, columns, depth, positions), gpu.processors)
        values: dict[str, Sequence[Value]] = {
            "tile": [f"{high}x{wide}" for high in _sizes(rows) for wide in _sizes(columns)],
            "depth": depths,
            kind.PAIR: [f"{high}x{wide}" for high in pairs for wide in pairs],
            "slices": slices_to_try(depth * positions, depths[0]),
            "lanes": [lanes for lanes in sorted(VECTORS) if lanes <= operands.widest],
        }

        def allows(choices: Choices) -> bool:
            tiling = tiling_of(choices)
            unit = tiling.tile.depth
            if tiling.slices not in slices_to_try(depth * positions, unit) or not _divide(tiling.slices, depth, unit):
                return False
            return fits(tiling.tile, replace(operands, store=min(operands.store, tiling.lanes)))

        default = {**tile.choices, "slices": _fitting(slices, depth, tile.depth), "lanes": operands.widest}
        return space_of(values, default, allows)

    def apply(schedule: s_tir.Schedule, parts: Parts, choices: Choices, _: Gpu) -> None:
        schedule_product(schedule, parts, tiling_of(choices))

    return Template(name, anchor, find_space, apply)


@dataclass(frozen=True)
class _Operands:
    """The properties of the operands that limit tiles.

    ``fetch`` and ``store`` are the most elements that a load and a store may take. ``bytes`` per element and
    ``shifts``, the padding elements of each row in shared memory, are for the left and the right operand.
    """

    fetch: int
    store: int
    bytes: tuple[int, int]
    shifts: tuple[int, int]

    @property
    def widest(self) -> int:
        return max(self.fetch, self.store)


def _operands(parts: Parts) -> _Operands:
    views = {view.name.partition("_")[0]: view.statement for view in parts.preparation}
    sides = views["left"], views["right"]
    left, right = (DataType(str(view.writes[0].source.dtype)).itemsize for view in sides)
    first, second = (SHIFT_OF_COLUMNS * int(view.annotations[DEPTH_FIRST]) for view in sides)
    return _Operands(
        max(int(view.annotations[FETCH]) for view in sides),
        int(parts.anchor.statement.annotations[STORE]),
        (left, right),
        (first, second),
    )


def _divide(slices: int, depth: int, unit: int) -> bool:
    """Return whether slices of whole rounds (``unit`` steps) add at most an eighth to the rounds of the sum."""
    rounds, of_slices = -(-depth // unit), -(-depth // (slices * unit)) * slices
    return of_slices * 8 <= rounds * 9


def _fitting(slices: int, depth: int, unit: int) -> int:
    """Return the number of slices, lowered until `_divide` accepts it."""
    return next(count for count in range(slices, 0, -1) if count == 1 or _divide(count, depth, unit))


def _sizes(extent: int) -> list[int]:
    """Return the numbers of rows or columns of a tile to try: the smallest, and those that ``extent`` half fills."""
    return [size for size in EXTENTS if size == EXTENTS[0] or size < 2 * extent]


def _fits_registers(tile: Tile, operands: _Operands) -> bool:
    if tile.rows % tile.row_registers or tile.columns % tile.column_registers or tile.column_registers % operands.store:
        return False
    held = tile.row_registers * tile.column_registers + tile.row_registers + tile.column_registers
    (left, right), (first, second) = operands.bytes, operands.shifts
    shared = tile.depth * ((tile.rows + first) * left + (tile.columns + second) * right)
    return _fits(tile, held, shared)


def _fits_fragments(tile: FragmentTile, operands: _Operands) -> bool:
    if tile.rows % (tile.row_warps * FRAGMENT) or tile.columns % (tile.column_warps * FRAGMENT):
        return False
    row_fragments = tile.rows // tile.row_warps // FRAGMENT
    column_fragments = tile.columns // tile.column_warps // FRAGMENT
    # A warp's threads share the fragment of each result (float32) and of each operand (held twice).
    held = FRAGMENT * FRAGMENT // WARP * (row_fragments * column_fragments + row_fragments + column_fragments)
    left = tile.rows * (tile.depth + SHIFT_OF_HALVES) * operands.bytes[0]
    right = tile.depth * (tile.columns + SHIFT_OF_HALVES) * operands.bytes[1]
    sums = tile.rows * tile.columns * BYTES_OF_A_SUM
    # TVM 0.27 would place the sums in the memory of an operand of the same size, and then reject the other dtype.
    return max(left, right) < sums and _fits(tile, held, left + right + sums)


def _fits(tile: Tile | FragmentTile, held: int, shared_bytes: int) -> bool:
    """Return whether a block of threads can hold a tile, and each of its threads loads the same number of elements.

    ``held`` is the number of a thread's registers for results and operands.
    """
    registers = held + ADDRESSES
    return (
        WARP <= tile.threads <= MOST_THREADS
        and not any(tile.depth * extent % tile.threads for extent in (tile.rows, tile.columns))
        and registers <= REGISTERS_OF_A_THREAD
        and registers * tile.threads <= REGISTERS_OF_A_BLOCK
        and shared_bytes <= MOST_STATIC_SHARED_BYTES
    )


def _in_registers(operator: str) -> Template[Gpu]:
    return _template(
        operator, f"{TILED}{operator}", Tile, REGISTER_EXTENTS, DEPTHS, choose_tile, _fits_registers, schedule_tiled
    )


TEMPLATES: tuple[Template[Gpu], ...] = (
    _in_registers("conv2d"),
    _in_registers("matmul"),
    _template(
        TENSOR_CORE, TENSOR_CORE, FragmentTile, WARPS, DEPTHS[1:], choose_fragment_tile, _fits_fragments,
        schedule_tensor_core,
    ),
)  # fmt: skip
"""The rules whose schedules have choices; tuning works on these."""
