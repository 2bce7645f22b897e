"""Schedule contractions: the computation that convolution and matrix multiplication have in common.

The legalizations write both as ``preparation blocks -> anchor -> store -> epilogues``. The anchor accumulates whole
register tiles over padded extents. The store crops and casts. The epilogues are what FuseOps added (bias, residual,
ReLU).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.blocks import Block, Parts, inline_tail
from schedules.cpu.elementwise import schedule_spatial_block
from schedules.cpu.register_tile import RegisterTile, divisors, tiles_to_try
from schedules.prefetch import Region, mark_for_prefetch
from schedules.template import Choices, Space, Template, Value, space_of
from schedules.traits import Traits

ALL_AT_ONCE = "all"
BLOCKS_OUTSIDE, ROWS_OUTSIDE = "blocks_outside", "rows_outside"
PREPARE_BEFORE, PREPARE_INSIDE = "before", "inside"
SMALLEST_CHUNK_STEPS = 16
LARGEST_UNROLL = 16
STEPS_BETWEEN_PREFETCHES = 64
"""Reduction steps per prefetch. LLVM assumes that a prefetch uses all memory, so sums leave their registers for it."""


@dataclass(frozen=True)
class LoopRoles:
    """The roles of the anchor's loops, by position.

    ``batch`` loops come first in the parallel loop; ``height`` (image rows, only for convolution) may be grouped.
    """

    batch: tuple[int, ...]
    blocks: int
    height: int | None
    rows: int
    lanes: int
    reduction: tuple[int, ...]


@dataclass(frozen=True)
class Tiling:
    """The tile sizes of a contraction's schedule, which the cost rule or tuning chooses; its fields are the choices.

    ``chunk`` iterations of the outermost reduction loop are accumulated in registers before they are added to a tile in
    memory. With `ALL_AT_ONCE` all are, and only results are written. ``group`` image rows share such a chunk of
    weights. ``order`` says which loop over tiles is outside. ``unroll`` steps of the innermost reduction loop are
    unrolled. ``prepare`` says when data is padded: the whole image beforehand, or only what a group of rows reads,
    inside the same thread. ``prefetch`` (0 or 1) says whether the weights of the next tile are prefetched meanwhile: on
    a Zen 5 this saves 5 % of ResNet-50 and 6 to 8 % of BERT-base; on another machine VGG-16 took 6 to 10 % longer.
    """

    tile: str
    chunk: int | str
    group: int
    order: str
    unroll: int
    prepare: str = PREPARE_BEFORE
    prefetch: int = 1

    @property
    def size(self) -> RegisterTile:
        rows, _, blocks = self.tile.partition("x")
        return RegisterTile(int(rows), int(blocks))


def contraction_template(
    name: str,
    anchor: str,
    roles_of: Callable[[Sequence[int]], LoopRoles],
    choose_tiling: Callable[[tuple[int, ...], Traits], Tiling],
    *,
    chunks: bool = True,
) -> Template[Traits]:
    """Return a template for kernels around an anchor.

    ``roles_of`` and ``choose_tiling`` take the anchor's extents. ``chunks`` says whether its reduction is long enough
    to be split into chunks.
    """

    def find_space(parts: Parts, traits: Traits) -> Space:
        extents = parts.anchor.extents
        return _space(parts, roles_of(extents), choose_tiling(extents, traits), traits, chunks=chunks)

    def apply(schedule: s_tir.Schedule, parts: Parts, choices: Choices, traits: Traits) -> None:
        tiling: Any = choices
        schedule_contraction(schedule, parts, roles_of(parts.anchor.extents), Tiling(**tiling), traits)

    return Template(name, anchor, find_space, apply)


def _space(parts: Parts, roles: LoopRoles, default: Tiling, traits: Traits, *, chunks: bool) -> Space:
    """Return the tilings to try for an anchor; ``default`` is the cost rule's choice."""
    extents = parts.anchor.extents
    outermost, innermost = extents[roles.reduction[0]], extents[roles.reduction[-1]]
    steps = [step for step in divisors(outermost) if step < outermost] if chunks else []
    if len(roles.reduction) == 1:
        steps = [step for step in steps if step >= SMALLEST_CHUNK_STEPS]
    is_image = roles.height is not None

    def allows(choices: Choices) -> bool:
        if is_image:
            return True
        if choices["group"] == 0:
            return choices["order"] == BLOCKS_OUTSIDE  # the parallel loop has nothing else
        return choices["chunk"] == ALL_AT_ONCE  # the sums of a chunk belong to several tiles of rows

    values: dict[str, Sequence[Value]] = {
        "tile": [str(tile) for tile in tiles_to_try(extents[roles.rows], extents[roles.blocks], traits)],
        "chunk": [*steps, ALL_AT_ONCE],
        # A matrix has no image rows to group: 1 shares its rows among the threads, 0 only its columns.
        "group": divisors(extents[roles.height]) if roles.height is not None else [0, 1],
        "order": [BLOCKS_OUTSIDE, ROWS_OUTSIDE],
        "unroll": [unroll for unroll in divisors(innermost) if unroll <= LARGEST_UNROLL],
        "prepare": [PREPARE_BEFORE, PREPARE_INSIDE] if parts.preparation else [PREPARE_BEFORE],
        "prefetch": [0, 1],
    }
    return space_of(values, vars(default), allows)


def schedule_contraction(
    schedule: s_tir.Schedule, parts: Parts, roles: LoopRoles, tiling: Tiling, traits: Traits
) -> None:
    """Tile the anchor, accumulate in registers, and compute the tail on each finished tile."""
    if tiling.prepare == PREPARE_BEFORE:
        for block in parts.preparation:
            schedule_spatial_block(schedule, block, traits)
    last, *after = inline_tail(schedule, parts.anchor, parts.tail)
    for block in after:
        schedule_spatial_block(schedule, block, traits)
    compute = _in_one_pass if tiling.chunk == ALL_AT_ONCE else _in_chunks
    compute(schedule, parts.anchor, last.handle, roles, tiling)
    if tiling.prepare == PREPARE_INSIDE:
        outermost = schedule.get_loops(parts.anchor.handle)[0]
        for block in reversed(parts.preparation):
            schedule.compute_at(block.handle, outermost, preserve_unit_loops=True, index=0)
            schedule.vectorize(schedule.get_loops(block.handle)[-1])


def _tile(schedule: s_tir.Schedule, anchor: SBlockRV, roles: LoopRoles, tiling: Tiling) -> tuple[list[LoopRV], ...]:
    """Tile the anchor; return the loops of the parallel part, of one thread, of the tile, and of the reduction."""
    loops = schedule.get_loops(anchor)
    block_outer, block_inner = schedule.split(loops[roles.blocks], [None, tiling.size.blocks])
    row_outer, row_inner = schedule.split(loops[roles.rows], [None, tiling.size.rows])
    parallel = [loops[position] for position in roles.batch]
    inner = [row_outer]
    height = []
    if roles.height is not None:
        height_outer, height_inner = schedule.split(loops[roles.height], [None, tiling.group])
        height = [height_outer]
        inner = [height_inner, row_outer]
    elif tiling.group == 1:
        # A matrix has no height: threads share its rows.
        height, inner = [row_outer], []
    parallel += [block_outer, *height] if tiling.order == BLOCKS_OUTSIDE else [*height, block_outer]
    reduction = [loops[position] for position in roles.reduction]
    # Blocks are inside rows: a broadcast value is used for all blocks at once and then dropped. In the other order LLVM
    # keeps one value per row, and 14 x 2 spills.
    return parallel, inner, [row_inner, block_inner, loops[roles.lanes]], reduction


def _in_one_pass(schedule: s_tir.Schedule, product: Block, last: SBlockRV, roles: LoopRoles, tiling: Tiling) -> None:
    """Schedule the whole reduction in registers: ``parallel, inner | reduction | tile``."""
    anchor, lanes, vectors = product.handle, product.extents[roles.lanes], _vectors(product, roles)
    parallel, inner, tile, reduction = _tile(schedule, anchor, roles, tiling)
    schedule.reorder(*parallel, *inner, *reduction, *tile)
    outermost = schedule.fuse(*parallel)
    schedule.parallel(outermost)
    around = inner[-1] if inner else outermost
    schedule.reverse_compute_at(last, around, preserve_unit_loops=True)
    schedule.set_scope(anchor, 0, "local")
    reduction = _unroll_step(schedule, reduction, tiling.unroll)
    reduction = _mark(schedule, inner, reduction, tiling, Region(0, tiling.size.blocks, vectors, vectors))
    unroll_and_vectorize(schedule, tile)
    initial = schedule.decompose_reduction(anchor, reduction[0])
    depth = 1 + len(inner)
    unroll_and_vectorize(schedule, schedule.get_loops(initial)[depth:])
    unroll_and_vectorize(schedule, schedule.get_loops(last)[depth:], lanes)


def _in_chunks(schedule: s_tir.Schedule, product: Block, last: SBlockRV, roles: LoopRoles, tiling: Tiling) -> None:
    """Schedule the reduction in chunks, so that a chunk of weights stays in the first-level cache for a group of rows.

    The loops are ``parallel | chunk, inner | (chunk's reduction | tile) + add tile to the sums``, then the tail on the
    whole group.
    """
    anchor, lanes, vectors = product.handle, product.extents[roles.lanes], _vectors(product, roles)
    chunk, _ = schedule.split(schedule.get_loops(anchor)[roles.reduction[0]], [None, int(tiling.chunk)])
    partial = schedule.rfactor(chunk, 0)
    one_step = replace(roles, reduction=(roles.reduction[0],))
    parallel, inner, sums_tile, (chunk,) = _tile(schedule, anchor, one_step, tiling)
    schedule.reorder(*parallel, chunk, *inner, *sums_tile)
    outermost = schedule.fuse(*parallel)
    schedule.parallel(outermost)
    around = inner[-1]
    schedule.reverse_compute_at(last, outermost, preserve_unit_loops=True)
    schedule.compute_at(partial, around, preserve_unit_loops=True)
    schedule.set_scope(partial, 0, "local")
    loops = schedule.get_loops(partial)[2 + len(inner) :]
    # After rfactor the loops are the chunk's own axis, the anchor's spatial axes, and the rest of the reduction.
    spatial, reduction = loops[: len(loops) - len(roles.reduction)], loops[len(loops) - len(roles.reduction) :]
    tile = [loop for position, loop in enumerate(spatial) if position not in (0, 1 + roles.blocks)]
    tile.insert(len(tile) - 1, spatial[1 + roles.blocks])
    schedule.reorder(spatial[0], *reduction, *tile)
    reduction = _unroll_step(schedule, reduction, tiling.unroll)
    region = Region(0, tiling.size.blocks, vectors // int(schedule.get(chunk).extent), vectors)
    # The loop over the chunk itself, around the reduction, has one iteration.
    reduction = _mark(schedule, [*inner, spatial[0]], reduction, tiling, region)
    unroll_and_vectorize(schedule, tile)
    unroll_and_vectorize(schedule, sums_tile)
    initial_partial = schedule.decompose_reduction(partial, reduction[0])
    unroll_and_vectorize(schedule, schedule.get_loops(initial_partial)[2 + len(inner) :])
    initial = schedule.decompose_reduction(anchor, chunk)
    schedule.vectorize(schedule.get_loops(initial)[-1])
    unroll_and_vectorize(schedule, schedule.get_loops(last)[-1:], lanes)


def _unroll_step(schedule: s_tir.Schedule, reduction: list[LoopRV], unroll: int) -> list[LoopRV]:
    """Unroll ``unroll`` steps of the innermost reduction loop; return the reduction's loops."""
    if unroll <= 1:
        return reduction
    outer, inner = schedule.split(reduction[-1], [None, unroll])
    schedule.unroll(inner)
    return [*reduction[:-1], outer]


def _vectors(anchor: Block, roles: LoopRoles) -> int:
    """Return the number of weight vectors of one block of output channels."""
    return prod(anchor.extents[position] for position in roles.reduction)


def _mark(
    schedule: s_tir.Schedule, around: list[LoopRV], reduction: list[LoopRV], tiling: Tiling, region: Region
) -> list[LoopRV]:
    """Mark a loop with about `STEPS_BETWEEN_PREFETCHES` steps per iteration, of the reduction or ``around`` it.

    Returns the reduction's loops; one of them may have been split in two.
    """
    if not tiling.prefetch:
        return reduction
    steps = max(tiling.unroll, 1)
    loops = [*around, *reduction]
    for position in reversed(range(len(loops))):
        extent = int(schedule.get(loops[position]).extent)
        inside = next((divisor for divisor in divisors(extent) if divisor * steps >= STEPS_BETWEEN_PREFETCHES), extent)
        if inside < extent and (inside == 1 or position >= len(around)):
            split = [loops[position]] if inside == 1 else list(schedule.split(loops[position], [None, inside]))
            mark_for_prefetch(schedule, split[0], replace(region, loops_around=position))
            loops[position : position + 1] = split
            break
        steps *= extent
    return loops[len(around) :]


def unroll_and_vectorize(schedule: s_tir.Schedule, loops: Sequence[LoopRV], lanes: int | None = None) -> None:
    """Vectorize the last loop and unroll the others, so that every accumulator has its own register.

    A matrix's rows are longer than a vector. ``lanes`` splits them, because a longer vector would gather from two
    blocks.
    """
    *outer, last = loops
    if lanes is not None and int(schedule.get(last).extent) > lanes:
        cut, last = schedule.split(last, [None, lanes])
        outer.append(cut)
    for loop in outer:
        schedule.unroll(loop)
    schedule.vectorize(last)
