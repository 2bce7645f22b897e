"""Tiles of attention for a GPU's blocks of threads, and the estimate whether one kernel is faster than three."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import prod

from schedules.gpu.tile import (
    BYTES_PER_CYCLE,
    FRAGMENT,
    LATENCY_CYCLES,
    MOST_STATIC_SHARED_BYTES,
    MULTIPLICATIONS_PER_CYCLE,
    SECOND_KERNEL_CYCLES,
    TENSOR_CORE_SMALLEST,
    TENSOR_MULTIPLICATIONS_PER_CYCLE,
    WARP,
    Extents,
    product_cycles,
)

ROW_THREADS = 16
"""The number of threads that share a row: a part of one warp."""
SHIFT = 4
"""Padding elements per row of shared memory: a column's elements are then in different banks, and rows stay aligned."""
LARGEST_WIDTH = 256
"""The largest width; wider values fill the registers of a thread."""
LARGEST_HALF_WIDTH = 128
"""The largest width on tensor cores, where a lane has half a row; wider keys also leave too few registers."""
ROUNDS = 3
"""Barriers of a block in each tile of keys."""
FRAGMENT_SHIFT = 8
"""Like `SHIFT`, for rows that fragments are loaded from and stored to, and that two neighbours read by fours."""


@dataclass(frozen=True)
class Attention:
    """The sizes of attention: per batch in ``outer``, ``rows`` queries and ``keys`` keys of ``width``.

    There are as many values, of ``value_width``. With a ``reach``, query ``row`` has no weight for keys beyond ``row +
    reach``, and has one for some key before these. For a causal mask it is ``keys - rows``, at least 0.
    """

    outer: tuple[int, ...]
    rows: int
    keys: int
    width: int
    value_width: int
    reach: int | None = None

    @property
    def value_columns(self) -> int:
        """The number of result columns that a thread has."""
        return -(-self.value_width // ROW_THREADS)


@dataclass(frozen=True)
class AnyAttentionTile(ABC):
    """A tile: the queries of one block of threads, and the keys it holds in shared memory at once.

    ``efficiency`` is the fraction of the peak. It is an estimate, not a measurement: that of a product's tile with the
    same registers, less the exponentials.
    """

    rows: int
    keys: int
    efficiency: float

    @property
    @abstractmethod
    def threads(self) -> int: ...

    @property
    @abstractmethod
    def multiplications_per_cycle(self) -> int:
        """Multiply-adds per cycle of one multiprocessor."""

    @abstractmethod
    def columns(self, sizes: Attention) -> int:
        """The widths of keys and values together, padded as they are multiplied."""

    @abstractmethod
    def shared_bytes(self, sizes: Attention) -> int: ...

    def key_tiles(self, sizes: Attention, first_row: int) -> int:
        """The number of tiles of keys for which the rows from ``first_row`` on have weights."""
        seen = sizes.keys if sizes.reach is None else min(sizes.keys, first_row + self.rows + sizes.reach)
        return -(-seen // self.keys)


@dataclass(frozen=True)
class AttentionTile(AnyAttentionTile):
    """A tile of the float32 kernel, with ``row_registers`` rows in a thread's registers."""

    row_registers: int

    @property
    def threads(self) -> int:
        return self.rows // self.row_registers * ROW_THREADS

    @property
    def multiplications_per_cycle(self) -> int:
        return MULTIPLICATIONS_PER_CYCLE

    @property
    def key_columns(self) -> int:
        return self.keys // ROW_THREADS

    def columns(self, sizes: Attention) -> int:
        return sizes.width + sizes.value_columns * ROW_THREADS

    def loaded_elements(self, sizes: Attention) -> int:
        """The elements of the shared memory that keys and values use one after the other."""
        return max(sizes.width * (self.keys + SHIFT), self.keys * ROW_THREADS * sizes.value_columns)

    def shared_bytes(self, sizes: Attention) -> int:
        queries, exponentials = sizes.width * (self.rows + SHIFT), self.rows * (self.keys + SHIFT)
        return 4 * (queries + exponentials + self.loaded_elements(sizes))


@dataclass(frozen=True)
class AttentionFragments(AnyAttentionTile):
    """A tile on tensor cores: each warp has a fragment's rows; operands are in ``dtype``, float16 or bfloat16."""

    dtype: str = "float16"

    @property
    def warps(self) -> int:
        return self.rows // FRAGMENT

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def multiplications_per_cycle(self) -> int:
        return TENSOR_MULTIPLICATIONS_PER_CYCLE

    def columns(self, sizes: Attention) -> int:
        return whole_fragments(sizes.width) + whole_fragments(sizes.value_width)

    def loaded_elements(self, sizes: Attention) -> int:
        """The elements of the shared memory that keys and values use one after the other."""
        return self.keys * (whole_fragments(max(sizes.width, sizes.value_width)) + FRAGMENT_SHIFT)

    def shared_bytes(self, sizes: Attention) -> int:
        queries = self.rows * (whole_fragments(sizes.width) + FRAGMENT_SHIFT)
        # Scores in float32, and their exponentials in half precision.
        scores = (4 + 2) * self.rows * (self.keys + FRAGMENT_SHIFT)
        return 2 * (queries + self.loaded_elements(sizes)) + scores


def whole_fragments(extent: int) -> int:
    return -(-extent // FRAGMENT) * FRAGMENT


TILES = tuple(
    AttentionTile(rows, keys, efficiency * keys_efficiency, row_registers)
    for rows in (64, 32, 16)
    for keys, keys_efficiency in ((64, 1.0), (32, 0.8), (16, 0.6))
    for row_registers, efficiency in ((8, 0.6), (4, 0.45))
)
# The efficiency is low: scores go through shared memory between the two products, whose instructions wait for it.
FRAGMENT_TILES = tuple(
    AttentionFragments(rows, keys, efficiency * keys_efficiency)
    for rows, efficiency in ((128, 0.25), (64, 0.25), (32, 0.2), (16, 0.12))
    for keys, keys_efficiency in ((64, 1.0), (32, 0.85), (16, 0.6))
)


def choose_attention_tile(
    sizes: Attention, processors: int, half: str | None, copies: int
) -> AttentionTile | AttentionFragments | None:
    """The tile with the shortest estimated time; None if two products and a softmax are estimated to be faster.

    These copy ``copies`` operands that are views. Both use tensor cores if ``half`` is the operands' dtype.
    """
    if sizes.rows < TENSOR_CORE_SMALLEST or max(sizes.width, sizes.value_width) > LARGEST_WIDTH:
        return None
    tiles: list[AttentionTile | AttentionFragments] = list(TILES)
    if half is not None and max(sizes.width, sizes.value_width) <= LARGEST_HALF_WIDTH:
        tiles += [replace(tile, dtype=half) for tile in FRAGMENT_TILES]
    fitting = [tile for tile in tiles if tile.shared_bytes(sizes) <= MOST_STATIC_SHARED_BYTES]
    best = min(fitting, key=lambda tile: _cycles(sizes, tile, processors), default=None)
    if best is None:
        return None
    of_three = _cycles_of_three(sizes, processors, half is not None, copies)
    return best if _cycles(sizes, best, processors) <= of_three else None


def _cycles(sizes: Attention, tile: AnyAttentionTile, processors: int) -> float:
    key_tiles = [tile.key_tiles(sizes, first) for first in range(0, sizes.rows, tile.rows)]
    blocks = prod(sizes.outer) * len(key_tiles)
    of_one = tile.rows * tile.keys * tile.columns(sizes) / (tile.multiplications_per_cycle * tile.efficiency)
    longest = of_one * max(key_tiles)
    alone = longest / min(1.0, tile.threads / 256) + max(key_tiles) * ROUNDS * LATENCY_CYCLES
    return max(-(-blocks // processors) * of_one * sum(key_tiles) / len(key_tiles), alone)


def _cycles_of_three(sizes: Attention, processors: int, in_half: bool, copies: int) -> float:
    batch = prod(sizes.outer)
    scores = product_cycles(Extents(batch, sizes.rows, sizes.keys, sizes.width), processors, in_half)
    product = product_cycles(Extents(batch, sizes.rows, sizes.value_width, sizes.keys), processors, in_half)
    # The scores are written and read, and then again as exponentials.
    moved = 4 * 4 * batch * sizes.rows * sizes.keys + copies * 2 * 4 * batch * sizes.keys * sizes.width
    return scores + product + (2 + copies) * SECOND_KERNEL_CYCLES + moved / BYTES_PER_CYCLE
