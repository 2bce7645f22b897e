"""Tiles of attention on tensor cores, and the estimate whether one kernel is faster than three."""

from dataclasses import dataclass, replace
from math import prod

from schedules.gpu.tile import (
    BYTES_PER_CYCLE,
    FRAGMENT,
    LATENCY_CYCLES,
    MOST_STATIC_SHARED_BYTES,
    SECOND_KERNEL_CYCLES,
    TENSOR_CORE_SMALLEST,
    TENSOR_MULTIPLICATIONS_PER_CYCLE,
    WARP,
    Extents,
    fragment_cycles,
)

LARGEST_WIDTH = 128
"""The largest width: a lane has half a row of the values, and wider keys leave too few registers."""
ROUNDS = 3
"""Barriers of a block in each tile of keys."""
FRAGMENT_SHIFT = 8
"""Padding elements per row of shared memory: rows that are read together are in different banks and stay aligned."""


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


@dataclass(frozen=True)
class AttentionTile:
    """A tile on tensor cores: the queries of one block of threads, and the keys it holds in shared memory at once.

    Each warp has a fragment's rows; operands are in ``dtype``, float16 or bfloat16. ``efficiency`` is the fraction of
    the peak. It is an estimate, not a measurement.
    """

    rows: int
    keys: int
    efficiency: float
    dtype: str = "float16"

    @property
    def warps(self) -> int:
        return self.rows // FRAGMENT

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def loaded_elements(self, sizes: Attention) -> int:
        """Return the number of elements of the shared memory that first the keys and then the values use."""
        return self.keys * (whole_fragments(max(sizes.width, sizes.value_width)) + FRAGMENT_SHIFT)

    def shared_bytes(self, sizes: Attention) -> int:
        queries = self.rows * (whole_fragments(sizes.width) + FRAGMENT_SHIFT)
        # Scores in float32, and their exponentials in half precision.
        scores = (4 + 2) * self.rows * (self.keys + FRAGMENT_SHIFT)
        return 2 * (queries + self.loaded_elements(sizes)) + scores

    def key_tiles(self, sizes: Attention, first_row: int) -> int:
        """Return the number of tiles of keys that have a weight for any row of the tile from ``first_row`` on."""
        seen = sizes.keys if sizes.reach is None else min(sizes.keys, first_row + self.rows + sizes.reach)
        return -(-seen // self.keys)


def whole_fragments(extent: int) -> int:
    return -(-extent // FRAGMENT) * FRAGMENT


# The efficiency is low: scores go through shared memory between the two products, whose instructions wait for it.
TILES = tuple(
    AttentionTile(rows, keys, efficiency * keys_efficiency)
    for rows, efficiency in ((128, 0.25), (64, 0.25), (32, 0.2), (16, 0.12))
    for keys, keys_efficiency in ((64, 1.0), (32, 0.85), (16, 0.6))
    if rows * keys <= 64 * 64  # More scores do not fit in shared memory, whatever the widths.
)


def choose_attention_tile(sizes: Attention, processors: int, dtype: str, copies: int) -> AttentionTile | None:
    """Return the tile with the shortest estimated time; None if none fits or three kernels are estimated to be faster.

    The three kernels are two products and a softmax; they also copy ``copies`` operands that are views.
    """
    if sizes.rows < TENSOR_CORE_SMALLEST or max(sizes.width, sizes.value_width) > LARGEST_WIDTH:
        return None
    fitting = [tile for tile in TILES if tile.shared_bytes(sizes) <= MOST_STATIC_SHARED_BYTES]
    best = min(fitting, key=lambda tile: _cycles(sizes, tile, processors), default=None)
    if best is None or _cycles(sizes, best, processors) > _cycles_of_three(sizes, processors, copies):
        return None
    return replace(best, dtype=dtype)


def _cycles(sizes: Attention, tile: AttentionTile, processors: int) -> float:
    key_tiles = [tile.key_tiles(sizes, first) for first in range(0, sizes.rows, tile.rows)]
    blocks = prod(sizes.outer) * len(key_tiles)
    columns = whole_fragments(sizes.width) + whole_fragments(sizes.value_width)
    of_one = tile.rows * tile.keys * columns / (TENSOR_MULTIPLICATIONS_PER_CYCLE * tile.efficiency)
    longest = of_one * max(key_tiles)
    alone = longest / min(1.0, tile.threads / 256) + max(key_tiles) * ROUNDS * LATENCY_CYCLES
    return max(-(-blocks // processors) * of_one * sum(key_tiles) / len(key_tiles), alone)


def _cycles_of_three(sizes: Attention, processors: int, copies: int) -> float:
    batch = prod(sizes.outer)
    scores = fragment_cycles(Extents(batch, sizes.rows, sizes.keys, sizes.width), processors)
    product = fragment_cycles(Extents(batch, sizes.rows, sizes.value_width, sizes.keys), processors)
    # The scores are written and read, and then again as exponentials.
    moved = 4 * 4 * batch * sizes.rows * sizes.keys + copies * 2 * 4 * batch * sizes.keys * sizes.width
    return scores + product + (2 + copies) * SECOND_KERNEL_CYCLES + moved / BYTES_PER_CYCLE
