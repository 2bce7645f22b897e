"""Tile sizes, kernel families and annotations that the lowerings and schedules for a GPU share.

A tile is the part of a product that one block of threads computes. Several blocks may share a sum.

Without measurements, a small time model chooses among few tiles; `schedules.gpu.tiling_space` has more. The model has
three effects. A large tile needs fewer loads from shared memory per multiplication. A block with few threads cannot
keep a multiprocessor busy alone. A product with few tiles leaves most multiprocessors idle unless its sum is cut into
slices, which costs a second kernel and its traffic.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from tvm.target import Target

from schedules.template import Choices, Value

TILED = "tiled "
"""The anchor of a tiled contraction is named with this prefix and the operator's name: ``tiled conv2d``."""
TENSOR_CORE = "tensor_core"
DEPTHWISE = "depthwise_conv2d"
FETCH = "tvm_split.fetch_lanes"
"""Annotation of an operand's view: how many of its elements one load may take."""
DEPTH_FIRST = "tvm_split.depth_first"
"""Annotation of an operand's view: 1 if its elements are contiguous along the sum; threads should load them so."""
STORE = "tvm_split.store_lanes"
"""Annotation of a tiled anchor: how many results of one row one store may take."""
VECTORS = (4, 2, 1)
"""The numbers of elements that one load or store may take, the best first."""
TENSOR_CORE_SMALLEST = 16
"""Smallest extent for tensor cores: all extents of a product must fill at least one fragment."""

MULTIPLICATIONS_PER_CYCLE = 128
"""float32 multiply-adds per cycle of one multiprocessor of an H100.

An A100 has 64, so everything except memory takes longer there.
"""
TENSOR_MULTIPLICATIONS_PER_CYCLE = 1024
"""float16 multiply-adds per cycle on tensor cores of one multiprocessor of an A100.

The instructions used here reach about as many on an H100.
"""
BYTES_PER_CYCLE = 2000
"""Bytes per cycle that the whole GPU moves between its second-level cache and its multiprocessors."""
SECOND_KERNEL_CYCLES = 4000
"""Cycles to start one more kernel: 2 to 3 microseconds."""
LATENCY_CYCLES = 400
"""Cycles of one round: loads to shared memory, a barrier, and the first use."""
# Multiprocessors of the largest product of each family: A100 and H100.
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132}
FRAGMENTS_SINCE = {"float16": 70, "bfloat16": 80}
"""The compute capability, times ten, from which tensor cores multiply a dtype (CUDA C++ Programming Guide, wmma)."""
LARGEST_SLICES = 8


@dataclass(frozen=True)
class _AnyTile(ABC):
    """A tile: ``rows * columns`` results per block of threads; shared memory holds ``depth`` steps of the sum."""

    rows: int
    columns: int
    depth: int
    PAIR: ClassVar[str]
    """The name of the template's choice for a tile's last two fields, such as ``registers``."""

    @property
    @abstractmethod
    def threads(self) -> int: ...

    @classmethod
    def of(cls, choices: Choices) -> Self:
        """Return the tile with the choices of a template."""
        sizes, pair = (map(int, str(choices[name]).split("x")) for name in ("tile", cls.PAIR))
        numbers: Any = (*sizes, int(choices["depth"]), *pair)
        return cls(*numbers)

    @property
    def choices(self) -> dict[str, Value]:
        rows, columns, depth, *pair = astuple(self)
        return {"tile": f"{rows}x{columns}", "depth": depth, self.PAIR: "x".join(map(str, pair))}


@dataclass(frozen=True)
class Tile(_AnyTile):
    """A tile with ``row_registers * column_registers`` results in each thread's registers."""

    row_registers: int
    column_registers: int
    PAIR = "registers"

    @property
    def threads(self) -> int:
        return self.row_threads * self.column_threads

    @property
    def row_threads(self) -> int:
        return self.rows // self.row_registers

    @property
    def column_threads(self) -> int:
        return self.columns // self.column_registers


# Each tile's fraction of the peak in the inner loop, counting loads from shared memory against multiplications; an
# estimate, not a measurement.
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


# CUDA C++ Programming Guide, technical specifications per compute capability; equal for sm_50 and later.
WARP = 32
MOST_THREADS = 1024
"""Most threads of a block."""
MOST_STATIC_SHARED_BYTES = 48 * 1024
"""Most shared memory of a block that needs no extra request at launch."""
FRAGMENT = 16
"""Rows, columns and depth of the operands of one tensor core instruction."""


@dataclass(frozen=True)
class FragmentTile(_AnyTile):
    """A tile on tensor cores, shared by ``row_warps * column_warps`` warps."""

    row_warps: int
    column_warps: int
    PAIR = "warps"

    @property
    def warps(self) -> int:
        return self.row_warps * self.column_warps

    @property
    def threads(self) -> int:
        return self.warps * WARP


# Nothing is loaded while fragments are multiplied, so the fractions are far below the peak.
FRAGMENT_TILES: dict[FragmentTile, float] = {
    FragmentTile(64, 128, 32, 2, 4): 0.4,
    FragmentTile(64, 64, 32, 2, 2): 0.3,
    FragmentTile(32, 64, 32, 2, 2): 0.2,
    FragmentTile(32, 32, 32, 2, 2): 0.12,
}


AnyTile = TypeVar("AnyTile", bound=_AnyTile)


@dataclass(frozen=True)
class Tiling(Generic[AnyTile]):
    """The sizes of a tiled product's schedule.

    ``tile`` is its tile. ``slices`` is the number of slices of its sum, which blocks of threads share. ``lanes`` is the
    most elements that one load or store takes.
    """

    tile: AnyTile
    slices: int
    lanes: int


@dataclass(frozen=True)
class Extents:
    """The extents of ``batch`` products [rows, depth] x [depth, columns], at each of ``positions``."""

    batch: int
    rows: int
    columns: int
    depth: int
    positions: int = 1


@dataclass(frozen=True)
class Gpu:
    """The GPU's properties that matter: its multiprocessors, and the dtypes that tensor cores multiply in fragments."""

    processors: int
    fragment_dtypes: frozenset[str]


def gpu_of(target: Target) -> Gpu:
    """Return the GPU of a target, by its ``arch``; one that is not in `MULTIPROCESSORS` has 108 multiprocessors."""
    arch = str(target.attrs.get("arch", ""))
    generation = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    number = int(generation[1]) if generation else max(FRAGMENTS_SINCE.values())
    processors = MULTIPROCESSORS.get(arch, 108)
    return Gpu(processors, frozenset(dtype for dtype, since in FRAGMENTS_SINCE.items() if number >= since))


def choose_tile(extents: Extents, processors: int) -> tuple[Tile, int]:
    """Return the tile and the number of slices of the sum with the shortest estimated time."""
    return _choose(TILES, MULTIPLICATIONS_PER_CYCLE, extents, processors)


def choose_fragment_tile(extents: Extents, processors: int) -> tuple[FragmentTile, int]:
    """Return the tile for tensor cores and the number of slices of the sum with the shortest estimated time."""
    return _choose(FRAGMENT_TILES, TENSOR_MULTIPLICATIONS_PER_CYCLE, extents, processors)


def fragment_cycles(extents: Extents, processors: int) -> float:
    """Return the estimated cycles of a product on tensor cores in its best tile."""
    tile, slices = choose_fragment_tile(extents, processors)
    rate = TENSOR_MULTIPLICATIONS_PER_CYCLE * FRAGMENT_TILES[tile]
    return _cycles(tile, slices, rate, extents, processors)


def slices_to_try(depth: int, unit: int) -> list[int]:
    """Return the numbers of slices to try for a sum of ``depth`` steps, in rounds of ``unit`` steps.

    Slices of fewer than four rounds only wait for memory.
    """
    return [slices for slices in range(1, LARGEST_SLICES + 1) if slices == 1 or depth >= slices * 4 * unit]


def _choose(tiles: Mapping[AnyTile, float], rate: int, extents: Extents, processors: int) -> tuple[AnyTile, int]:
    candidates = [
        (tile, slices)
        for tile in tiles
        for slices in slices_to_try(extents.depth * extents.positions, tile.depth)
        # Each position's channels are cut separately.
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
    # A block of fewer than 256 threads that runs alone waits for its own instructions.
    alone = work / min(1.0, tile.threads / 256) + rounds * LATENCY_CYCLES
    cycles = max(_whole(blocks, processors) * work, alone)
    if slices > 1:
        partial_bytes = (slices + 1) * extents.batch * extents.rows * extents.columns * 4
        cycles += SECOND_KERNEL_CYCLES + partial_bytes / BYTES_PER_CYCLE
    return cycles


def _whole(extent: int, part: int) -> int:
    return -(-extent // part)
