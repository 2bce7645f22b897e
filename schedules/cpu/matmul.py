"""Matrix multiplication with the right operand packed in column blocks (``[N / lanes, K, lanes]``)."""

from __future__ import annotations

from tvm_split.schedules.cpu.contraction import LoopRoles, Tiling
from tvm_split.schedules.cpu.register_tile import dividing_tile, divisors
from tvm_split.schedules.cpu.tiling_space import contraction_template
from tvm_split.schedules.traits import Traits

FAMILY = "matmul_packed"
# Measured on 128 rows: chunks gain 4 % at a depth of 3072 and lose 2 % at 768, where the sums go to memory in vain.
DEPTH_IN_ONE_PASS = 1024
DEPTH_OF_CHUNK = 256
SMALLEST_CHUNK = 64
SMALLEST_REUSE = 4


def roles_of(extents: tuple[int, ...]) -> LoopRoles:
    """Anchor iterators: batch ..., column block, m, lane | k."""
    count = len(extents)
    return LoopRoles(
        batch=tuple(range(count - 4)),
        blocks=count - 4,
        height=None,
        rows=count - 3,
        lanes=count - 2,
        reduction=(count - 1,),
    )


def choose_tiling(extents: tuple[int, ...], traits: Traits) -> Tiling:
    """Sizes for an anchor of these extents; `Tiling` says what they mean."""
    tile = dividing_tile(extents[-3], extents[-4], traits)
    depth = extents[-1]
    chunk = None
    if depth > DEPTH_IN_ONE_PASS and extents[-3] // tile.rows >= SMALLEST_REUSE:
        chunk = max(divisor for divisor in divisors(depth) if divisor <= DEPTH_OF_CHUNK)
        if chunk < SMALLEST_CHUNK:
            chunk = None
    return Tiling(tile=tile, chunk=chunk, group=0, blocks_outermost=True, unroll=4 if depth % 4 == 0 else 1)


MATMUL = contraction_template("matmul", FAMILY, roles_of, choose_tiling)
