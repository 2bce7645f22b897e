"""What lowerings and schedules for a GPU agree on: families of kernels, their annotations, and tile sizes.

A tile is the part of a product that one block of threads computes; several blocks may share a sum.

A small model of time chooses among few tiles where nothing was measured; `schedules.gpu.tiling_space` has more. It
knows three things: a large tile needs fewer loads from shared memory
for each multiplication, a block with few threads cannot keep a multiprocessor busy alone, and a product with few tiles
leaves most multiprocessors idle unless its sum is cut into slices, which costs a second kernel and its traffic.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvm.target import Target

TILED = "tiled "
"""Anchors of tiled contractions are named with this prefix and the operator's name: ``tiled conv2d``."""
TENSOR_CORE = "tensor_core"
FEW_ROWS = "few_rows"
DEPTHWISE = "depthwise_conv2d"
FETCH = "tvm_split.fetch_lanes"
"""On an operand's view: how many of its elements one load may take."""
DEPTH_FIRST = "tvm_split.depth_first"
"""On an operand's view: 1 where neighbours in memory are neighbours in the sum, and threads should take them so."""
STORE = "tvm_split.store_lanes"
"""On a tiled anchor: how many results of one row one store may take."""
VECTORS = (4, 2, 1)
"""Elements of one load or store, the best first."""
MOST_ROWS = 4
"""Products of up to this many rows are bound by reading the right operand once."""
TENSOR_CORE_SMALLEST = 16
"""Tensor cores take products all of whose extents fill a fragment at least."""

MULTIPLICATIONS_PER_CYCLE = 128
"""float32 multiply-adds of one multiprocessor of an H100. An A100 has 64: everything but memory takes longer there."""
TENSOR_MULTIPLICATIONS_PER_CYCLE = 1024
"""The same for float16 on tensor cores: an A100's; the instructions used here reach about as much on an H100."""
BYTES_PER_CYCLE = 2000
"""What the whole GPU moves between its second-level cache and its multiprocessors in a cycle."""
SECOND_KERNEL_CYCLES = 4000
"""Starting one more kernel: 2 to 3 microseconds."""
LATENCY_CYCLES = 400
"""One round of loads to shared memory, a barrier, and the first use."""
# Of the largest part of each family that is sold: A100 and H100.
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132}
FRAGMENTS_SINCE = {"float16": 70, "bfloat16": 80}
"""The compute capability, times ten, since which tensor cores multiply a dtype (CUDA C++ Programming Guide, wmma)."""
LARGEST_SLICES = 8
SMALL_COLUMNS = 64
"""Columns of one block of threads where a product has few rows."""
LARGEST_SLICES_OF_ROWS = 32


@dataclass(frozen=True)
class _AnyTile(ABC):
    """``rows * columns`` results of one block of threads; ``depth`` steps of the sum lie in shared memory at once."""

    rows: int
    columns: int
    depth: int

    @property
    @abstractmethod
    def threads(self) -> int: ...


@dataclass(frozen=True)
class Tile(_AnyTile):
    """``row_registers * column_registers`` results in each thread's registers."""

    row_registers: int
    column_registers: int

    @property
    def threads(self) -> int:
        return self.row_threads * self.column_threads

    @property
    def row_threads(self) -> int:
        return self.rows // self.row_registers

    @property
    def column_threads(self) -> int:
        return self.columns // self.column_registers


# With each the share of the peak that the inner loop reaches when loads from shared memory are counted against
# multiplications: an estimate, not a measurement.
TILES: dict[Tile, float] = {
    Tile(128, 128, 8, 8, 8): 0.9,
    Tile(64, 128, 8, 8, 8): 0.8,
    Tile(64, 64, 16, 4, 8): 0.7,
    Tile(32, 128, 16, 4, 8): 0.65,
    Tile(32, 64, 16, 4, 4): 0.55,
    Tile(32, 32, 16, 4, 4): 0.45,
    Tile(16, 64, 16, 2, 4): 0.4,
    Tile(16, 32, 32, 2, 4): 0.3,
}


# CUDA C++ Programming Guide, technical specifications per compute capability: the same from sm_50 on.
WARP = 32
MOST_THREADS = 1024
"""Of a block."""
MOST_STATIC_SHARED_BYTES = 48 * 1024
"""Of a block, without asking for more when it is launched."""
FRAGMENT = 16
"""Rows, columns and depth of what one tensor core instruction multiplies."""


@dataclass(frozen=True)
class FragmentTile(_AnyTile):
    """Results on tensor cores, shared by ``row_warps * column_warps`` warps."""

    row_warps: int
    column_warps: int

    @property
    def warps(self) -> int:
        return self.row_warps * self.column_warps

    @property
    def threads(self) -> int:
        return self.warps * WARP


# Nothing is loaded while fragments are multiplied, so that far less than the peak is reached.
FRAGMENT_TILES: dict[FragmentTile, float] = {
    FragmentTile(64, 128, 32, 2, 4): 0.4,
    FragmentTile(64, 64, 32, 2, 2): 0.3,
    FragmentTile(32, 64, 32, 2, 2): 0.2,
    FragmentTile(32, 32, 32, 2, 2): 0.12,
}


AnyTile = TypeVar("AnyTile", bound=_AnyTile)


@dataclass(frozen=True)
class Tiling(Generic[AnyTile]):
    """What the schedule of a tiled product leaves open: its tile, the slices of its sum, which blocks of threads share,
    and ``lanes``, how many elements one load or store takes at most."""

    tile: AnyTile
    slices: int
    lanes: int


@dataclass(frozen=True)
class Extents:
    """``batch`` products [rows, depth] x [depth, columns], at each of ``positions``."""

    batch: int
    rows: int
    columns: int
    depth: int
    positions: int = 1


@dataclass(frozen=True)
class Gpu:
    """What lowerings and schedules look at: multiprocessors, and the dtypes that tensor cores multiply in fragments."""

    processors: int
    fragment_dtypes: frozenset[str]


def gpu_of(target: Target) -> Gpu:
    arch = str(target.attrs.get("arch", ""))
    generation = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    number = int(generation[1]) if generation else max(FRAGMENTS_SINCE.values())
    processors = MULTIPROCESSORS.get(arch, 108)
    return Gpu(processors, frozenset(dtype for dtype, since in FRAGMENTS_SINCE.items() if number >= since))


def choose_tile(extents: Extents, processors: int) -> tuple[Tile, int]:
    """The tile, and the slices of the sum, with the shortest estimated time."""
    return _choose(TILES, MULTIPLICATIONS_PER_CYCLE, extents, processors)


def choose_fragment_tile(extents: Extents, processors: int) -> tuple[FragmentTile, int]:
    """The same for tensor cores."""
    return _choose(FRAGMENT_TILES, TENSOR_MULTIPLICATIONS_PER_CYCLE, extents, processors)


def product_cycles(extents: Extents, processors: int, on_tensor_cores: bool) -> float:
    """Estimated time of a product in its best tile, in cycles."""
    if on_tensor_cores:
        fragment, slices = choose_fragment_tile(extents, processors)
        rate = TENSOR_MULTIPLICATIONS_PER_CYCLE * FRAGMENT_TILES[fragment]
        return _cycles(fragment, slices, rate, extents, processors)
    tile, slices = choose_tile(extents, processors)
    return _cycles(tile, slices, MULTIPLICATIONS_PER_CYCLE * TILES[tile], extents, processors)


def slices_to_try(depth: int, unit: int) -> list[int]:
    """Into how many slices a sum may be cut, in rounds of ``unit``: a slice of less than four only waits for memory."""
    return [slices for slices in range(1, LARGEST_SLICES + 1) if slices == 1 or depth >= slices * 4 * unit]


def _choose(tiles: Mapping[AnyTile, float], rate: int, extents: Extents, processors: int) -> tuple[AnyTile, int]:
    candidates = [
        (tile, slices)
        for tile in tiles
        for slices in slices_to_try(extents.depth * extents.positions, tile.depth)
        # Each position's channels are cut by themselves.
        if slices == 1 or extents.depth >= slices * tile.depth
    ]

    def cycles(candidate: tuple[AnyTile, int]) -> float:
        tile, slices = candidate
        return _cycles(tile, slices, rate * tiles[tile], extents, processors)

    return min(candidates, key=cycles)


def _cycles(tile: _AnyTile, slices: int, rate: float, extents: Extents, processors: int) -> float:
    blocks = extents.batch * _whole(extents.rows, tile.rows) * _whole(extents.columns, tile.columns) * slices
    rounds = extents.positions * _whole(_whole(extents.depth, slices), tile.depth)
    work = tile.rows * tile.columns * tile.depth * rounds / rate
    # Alone, a block of fewer than 256 threads waits for its own instructions.
    alone = work / min(1.0, tile.threads / 256) + rounds * LATENCY_CYCLES
    cycles = max(_whole(blocks, processors) * work, alone)
    if slices > 1:
        partial_bytes = (slices + 1) * extents.batch * extents.rows * extents.columns * 4
        cycles += SECOND_KERNEL_CYCLES + partial_bytes / BYTES_PER_CYCLE
    return cycles


def _whole(extent: int, part: int) -> int:
    return -(-extent // part)


def choose_slices(batch: int, columns: int, depth: int, processors: int) -> int:
    """Slices of a sum for one row: four blocks of threads on every multiprocessor, 32 steps a slice at least."""
    blocks = batch * _whole(columns, SMALL_COLUMNS)
    return max(1, min(4 * processors // blocks, depth // 32, LARGEST_SLICES_OF_ROWS))
