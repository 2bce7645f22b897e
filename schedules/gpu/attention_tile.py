"""How attention is cut for a GPU's blocks of threads, and whether one kernel of it takes less time than three."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm_split.schedules.gpu.tile import (
    BYTES_PER_CYCLE,
    LATENCY_CYCLES,
    MULTIPLICATIONS_PER_CYCLE,
    SECOND_KERNEL_CYCLES,
    TENSOR_CORE_SMALLEST,
    Extents,
    product_cycles,
)

SHARED_BYTES = 48 * 1024
ROW_THREADS = 16
"""Threads that have a row in common: a part of one warp."""
SHIFT = 4
"""More elements in a row of shared memory, so that a column's lie in different banks, and rows stay aligned."""
LARGEST_WIDTH = 256
"""Values wider than this fill the registers of a thread."""
ROUNDS = 3
"""Waits for all threads in each tile of keys."""


@dataclass(frozen=True)
class Attention:
    """For each of ``outer``: ``rows`` queries of ``width``, of as many ``keys`` as values of ``value_width``."""

    outer: tuple[int, ...]
    rows: int
    keys: int
    width: int
    value_width: int

    @property
    def value_columns(self) -> int:
        """Columns of the result that a thread has."""
        return -(-self.value_width // ROW_THREADS)


@dataclass(frozen=True)
class AttentionTile:
    """Queries of one block of threads, keys that it has in shared memory at once, and rows in a thread's registers.

    ``efficiency`` is the share of the peak: as of a product's tile of the same registers, less exponentials; an
    estimate, no measurement.
    """

    rows: int
    keys: int
    row_registers: int
    efficiency: float

    @property
    def threads(self) -> int:
        return self.rows // self.row_registers * ROW_THREADS

    @property
    def key_columns(self) -> int:
        return self.keys // ROW_THREADS

    def loaded_elements(self, sizes: Attention) -> int:
        """Of the memory that keys and values have in turns."""
        return max(sizes.width * (self.keys + SHIFT), self.keys * ROW_THREADS * sizes.value_columns)

    def shared_bytes(self, sizes: Attention) -> int:
        queries, exponentials = sizes.width * (self.rows + SHIFT), self.rows * (self.keys + SHIFT)
        return 4 * (queries + exponentials + self.loaded_elements(sizes))


TILES = tuple(
    AttentionTile(rows, keys, row_registers, efficiency * keys_efficiency)
    for rows in (64, 32, 16)
    for keys, keys_efficiency in ((64, 1.0), (32, 0.8), (16, 0.6))
    for row_registers, efficiency in ((8, 0.6), (4, 0.45))
)


def choose_attention_tile(sizes: Attention, processors: int, in_half: bool, copies: int) -> AttentionTile | None:
    """The tile with the shortest estimated time; None where two products and a softmax are estimated to take less.

    These have tensor cores where they are ``in_half``, and take ``copies`` of operands that are views.
    """
    if sizes.rows < TENSOR_CORE_SMALLEST or max(sizes.width, sizes.value_width) > LARGEST_WIDTH:
        return None
    fitting = [tile for tile in TILES if tile.shared_bytes(sizes) <= SHARED_BYTES]
    best = min(fitting, key=lambda tile: _cycles(sizes, tile, processors), default=None)
    if best is None or _cycles(sizes, best, processors) > _cycles_of_three(sizes, processors, in_half, copies):
        return None
    return best


def _cycles(sizes: Attention, tile: AttentionTile, processors: int) -> float:
    blocks = prod(sizes.outer) * -(-sizes.rows // tile.rows)
    tiles_of_keys = -(-sizes.keys // tile.keys)
    multiplications = tile.rows * tile.keys * tiles_of_keys * (sizes.width + sizes.value_columns * ROW_THREADS)
    work = multiplications / (MULTIPLICATIONS_PER_CYCLE * tile.efficiency)
    alone = work / min(1.0, tile.threads / 256) + tiles_of_keys * ROUNDS * LATENCY_CYCLES
    return max(-(-blocks // processors) * work, alone)


def _cycles_of_three(sizes: Attention, processors: int, in_half: bool, copies: int) -> float:
    batch = prod(sizes.outer)
    scores = product_cycles(Extents(batch, sizes.rows, sizes.keys, sizes.width), processors, in_half)
    product = product_cycles(Extents(batch, sizes.rows, sizes.value_width, sizes.keys), processors, in_half)
    # Written and read as scores, and again as what they become.
    moved = 4 * 4 * batch * sizes.rows * sizes.keys + copies * 2 * 4 * batch * sizes.keys * sizes.width
    return scores + product + (2 + copies) * SECOND_KERNEL_CYCLES + moved / BYTES_PER_CYCLE
