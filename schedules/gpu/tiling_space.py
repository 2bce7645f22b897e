"""The tuning space of tiled products: `Tiling` as named values, the values worth trying, and a block's limits.

Tiles are offered only if a block of threads can hold them: its threads, its shared memory as the schedules lay it out,
and the registers that a thread's results and operands need at least. The compiler detects other spills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

from tvm import s_tir, tirx
from tvm.runtime import DataType

from schedules.blocks import Parts, find_parts, new_schedule
from schedules.gpu.contraction import SHIFT_OF_COLUMNS, schedule_tiled
from schedules.gpu.tensor_core import SHIFT_OF_HALVES, schedule_tensor_core
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
from schedules.template import Choices, Space, Template, Value

# CUDA C++ Programming Guide, technical specifications per compute capability; equal for sm_50 and later.
REGISTERS_OF_A_THREAD = 255
REGISTERS_OF_A_BLOCK = 65536
BYTES_OF_A_SUM = 4
ADDRESSES = 40
"""Registers of a thread for addresses and counters, besides its results and operands; an estimate."""
EXTENTS = (16, 32, 64, 128, 256)
REGISTER_EXTENTS = (1, 2, 4, 8, 16)
DEPTHS = (8, 16, 32)
WARPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Form(Generic[AnyTile]):
    """One of the two kinds of tiles: its choices, their values, and the schedule that takes it.

    ``part`` names the pair of numbers of a tile besides its sizes: a thread's registers or a block's warps.
    """

    part: str
    pairs: tuple[str, ...]
    depths: tuple[int, ...]
    tile: Callable[[int, int, int, int, int], AnyTile]
    pair_of: Callable[[AnyTile], tuple[int, int]]
    choose: Callable[[Extents, int], tuple[AnyTile, int]]
    fits: Callable[[AnyTile, _Operands], bool]
    apply: Callable[[s_tir.Schedule, Parts, Tiling[AnyTile]], None]

    def choices_of(self, tiling: Tiling[AnyTile]) -> dict[str, Value]:
        """A tiling as named values; `Tile`, `FragmentTile` and `Tiling` describe them."""
        tile = tiling.tile
        return {
            "tile": _text(tile.rows, tile.columns),
            "depth": tile.depth,
            self.part: _text(*self.pair_of(tile)),
            "slices": tiling.slices,
            "lanes": tiling.lanes,
        }

    def tiling_of(self, choices: Choices) -> Tiling[AnyTile]:
        tile = self.tile(*_numbers(choices["tile"]), int(choices["depth"]), *_numbers(choices[self.part]))
        return Tiling(tile, int(choices["slices"]), int(choices["lanes"]))

    def template(self, name: str, family: str) -> Template[Gpu]:
        """A template for kernels with an anchor of ``family``."""

        def space(function: tirx.PrimFunc, gpu: Gpu) -> Space | None:
            parts = find_parts(new_schedule(function), family)
            return None if parts is None else self._space(parts, gpu)

        def schedule(function: tirx.PrimFunc, gpu: Gpu, choices: Choices) -> s_tir.Schedule:
            made = new_schedule(function)
            parts = find_parts(made, family)
            if parts is None:
                raise ValueError(f"the function has no single anchor of family {family!r}")
            self.apply(made, parts, self.tiling_of(choices))
            return made

        return Template(name, space, schedule)

    def _space(self, parts: Parts, gpu: Gpu) -> Space:
        """The tilings to try for an anchor with iterators batch, row, column | position, depth."""
        batch, rows, columns, positions, depth = parts.anchor.extents
        operands = _operands(parts)
        tile, slices = self.choose(Extents(batch, rows, columns, depth, positions), gpu.processors)
        default = self.choices_of(Tiling(tile, _fitting(slices, depth, tile.depth), operands.widest))
        values: dict[str, list[Value]] = {
            "tile": [_text(high, wide) for high in _sizes(rows) for wide in _sizes(columns)],
            "depth": list(self.depths),
            self.part: list(self.pairs),
            "slices": list(slices_to_try(depth * positions, self.depths[0])),
            "lanes": [lanes for lanes in sorted(VECTORS) if lanes <= operands.widest],
        }
        for name, value in default.items():
            if value not in values[name]:
                values[name].append(value)

        def allows(choices: Choices) -> bool:
            tiling = self.tiling_of(choices)
            unit = tiling.tile.depth
            if tiling.slices not in slices_to_try(depth * positions, unit) or not _divide(tiling.slices, depth, unit):
                return False
            return self.fits(tiling.tile, replace(operands, store=min(operands.store, tiling.lanes)))

        return Space({name: tuple(each) for name, each in values.items()}, default, allows)


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


def _text(first: int, second: int) -> str:
    return f"{first}x{second}"


def _numbers(value: Value) -> tuple[int, int]:
    first, _, second = str(value).partition("x")
    return int(first), int(second)


def _divide(slices: int, depth: int, unit: int) -> bool:
    """Whether slices of whole rounds have at most an eighth more rounds than the sum without slices."""
    rounds, of_slices = -(-depth // unit), -(-depth // (slices * unit)) * slices
    return of_slices * 8 <= rounds * 9


def _fitting(slices: int, depth: int, unit: int) -> int:
    """The number of slices, lowered until `_divide` accepts it."""
    return next(count for count in range(slices, 0, -1) if count == 1 or _divide(count, depth, unit))


def _sizes(extent: int) -> list[int]:
    """The tile rows or columns that are not mostly beyond the end of ``extent``."""
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
    """Whether a block of threads can hold a tile; all its threads load the same number of elements."""
    registers = held + ADDRESSES
    return (
        WARP <= tile.threads <= MOST_THREADS
        and not any(tile.depth * extent % tile.threads for extent in (tile.rows, tile.columns))
        and registers <= REGISTERS_OF_A_THREAD
        and registers * tile.threads <= REGISTERS_OF_A_BLOCK
        and shared_bytes <= MOST_STATIC_SHARED_BYTES
    )


REGISTERS: Form[Tile] = Form(
    "registers",
    tuple(_text(high, wide) for high in REGISTER_EXTENTS for wide in REGISTER_EXTENTS),
    DEPTHS,
    Tile,
    lambda tile: (tile.row_registers, tile.column_registers),
    choose_tile,
    _fits_registers,
    schedule_tiled,
)
FRAGMENTS: Form[FragmentTile] = Form(
    "warps",
    tuple(_text(high, wide) for high in WARPS for wide in WARPS),
    tuple(depth for depth in DEPTHS if depth >= FRAGMENT),
    FragmentTile,
    lambda tile: (tile.row_warps, tile.column_warps),
    choose_fragment_tile,
    _fits_fragments,
    schedule_tensor_core,
)
TEMPLATES: tuple[Template[Gpu], ...] = (
    REGISTERS.template("conv2d", f"{TILED}conv2d"),
    REGISTERS.template("matmul", f"{TILED}matmul"),
    FRAGMENTS.template(TENSOR_CORE, TENSOR_CORE),
)
"""The rules whose schedules have choices; tuning works on these."""
