"""Choose the tile that a kernel keeps in vector registers: `rows` broadcast values times `blocks` weight vectors.

Convolution and matrix multiplication use the same tile. A weight vector holds output channels (columns of the matrix).
A broadcast value is one pixel (row) of the input. Every step of the reduction loads ``blocks`` vectors, broadcasts
``rows`` values and issues ``rows * blocks`` fused multiply-adds (Goto, van de Geijn: Anatomy of High-Performance Matrix
Multiplication, 2008).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from schedules.traits import Traits

# Two multiply-adds start per cycle and take four cycles; with fewer independent accumulators they wait for each other.
# Measured: 8 accumulators take 1.05 (convolutions) to 1.16 (products, AVX2) times as long as 12, and 10 as long as 12.
ACCUMULATORS_TO_HIDE_LATENCY = 8.6
# The part of the time that storing partial tiles adds; 60 columns in tiles of 6 take as long as 56 in tiles of 4.
PARTIAL_TILES = 0.05
# Two loads start per cycle. Above this ratio of loads to multiply-adds, the load ports limit the kernel. Measured:
# tiles with a ratio of 0.63 (8 x 2) reach the peak, and those with 1.04 (28 x 1) still 95 %.
LOADS_PER_MULTIPLY_ADD = 0.9
LARGEST_ROWS = 28
SMALLEST_ACCUMULATORS = 4


@dataclass(frozen=True)
class RegisterTile:
    rows: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.blocks}"


def slowdown(tile: RegisterTile) -> float:
    """Return a tile's time for its multiply-adds, relative to the time at the peak rate; at least 1."""
    latency = ACCUMULATORS_TO_HIDE_LATENCY / (tile.rows * tile.blocks)
    loads = (tile.rows + tile.blocks) / (tile.rows * tile.blocks) / LOADS_PER_MULTIPLY_ADD
    return max(1.0, latency, loads)


def _cost(extent: int, rows: int, blocks: int) -> float:
    """Return the time to compute ``extent`` rows in tiles, relative to the time at the peak rate; at least 1."""
    waste = -(-extent // rows) * rows / extent
    partial = PARTIAL_TILES if extent % rows else 0.0
    # On a tie take fewer loads, and more rows per weight vector: weights come from the second-level cache, broadcast
    # values from the first. Measured on products of 128 rows: 8 x 3 takes 0.97 (768 deep) and 0.9 (3072) of 8 x 2.
    return waste * slowdown(RegisterTile(rows, blocks)) + partial + 0.2 * (1 / rows + 1 / blocks) + 0.1 / rows


def _fits(rows: int, blocks: int, traits: Traits) -> bool:
    """Return whether LLVM 22 keeps the tile in registers: its sums, a weight vector per block, one broadcast value.

    Measured with 32 registers: 14 x 2, 8 x 3 and 6 x 4 run at 90 % of the peak, 9 x 3 at 82 %,
    and 7 x 4 spills and falls to 70 %. One weight vector needs no broadcast register, because AVX-512 broadcasts from
    memory inside the multiply-add. With 16 registers, 4 x 3 and 6 x 2 run at the peak, and 3 x 4 at 77 % of it.
    """
    if traits.registers < 32:
        return rows * blocks <= 12 and rows * blocks + blocks + 1 <= traits.registers
    return rows <= LARGEST_ROWS if blocks == 1 else (rows + 2) * blocks <= traits.registers


def choose_tile(
    extent: int, block_count: int, traits: Traits, rows_candidates: Iterable[int] | None = None
) -> RegisterTile:
    """Return the cheapest tile for ``extent`` rows and ``block_count`` vectors of output channels.

    The tile's blocks always divide ``block_count``. ``extent`` may be rounded up, unless ``rows_candidates`` restricts
    the rows.
    """
    rows_choices = list(rows_candidates) if rows_candidates is not None else range(1, min(extent, LARGEST_ROWS) + 1)
    choices = [
        RegisterTile(rows, blocks)
        for blocks in (1, 2, 3, 4)
        if block_count % blocks == 0
        for rows in rows_choices
        if _fits(rows, blocks, traits)
    ]
    return min(choices, key=lambda tile: (_cost(extent, tile.rows, tile.blocks), tile.blocks, tile.rows))


def dividing_tile(extent: int, block_count: int, traits: Traits) -> RegisterTile:
    """Return the cheapest tile whose rows divide ``extent``."""
    return choose_tile(extent, block_count, traits, [rows for rows in divisors(extent) if rows <= LARGEST_ROWS])


def tiles_to_try(extent: int, block_count: int, traits: Traits) -> list[RegisterTile]:
    """Return the tiles that tuning tries, whose rows divide ``extent`` and whose blocks divide ``block_count``.

    These are the tiles that fit the registers, and those that are estimated to be slightly too large.

    What LLVM keeps in registers depends on the rest of the kernel, so the measured limit is not exact. Tiles of fewer
    than four accumulators are left out if there are larger ones, because they always wait for their own results.
    """
    tiles = [
        RegisterTile(rows, blocks)
        for blocks in (1, 2, 3, 4, 6)
        if block_count % blocks == 0
        for rows in divisors(extent)
        if _fits(rows, blocks, traits) or rows * blocks <= traits.registers - 2
    ]
    return [tile for tile in tiles if tile.rows * tile.blocks >= SMALLEST_ACCUMULATORS] or tiles


def divisors(extent: int) -> list[int]:
    return [divisor for divisor in range(1, extent + 1) if extent % divisor == 0]


def padded_blocks(extent: int, block_count: int, traits: Traits) -> int:
    """Return ``block_count`` or slightly more, so that a better tile divides it: 6283 vectors have no other divisor."""

    def cost(count: int) -> float:
        tile = choose_tile(extent, count, traits)
        return count * _cost(extent, tile.rows, tile.blocks)

    return min(range(block_count, block_count + 4), key=cost)


def padded_extent(extent: int, block_count: int, traits: Traits) -> int:
    """Return ``extent`` rounded up to whole tiles: partial tiles need predicates, which move sums out of registers."""
    rows = choose_tile(extent, block_count, traits).rows
    return -(-extent // rows) * rows
