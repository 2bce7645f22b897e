"""Scheduling the shared shape of convolution and matrix multiplication.

The legalizations write both as ``preparation blocks -> anchor -> store -> epilogues``: the anchor accumulates whole
register tiles over padded extents, the store crops and casts, epilogues are what FuseOps added (bias, residual, ReLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir

from schedules.blocks import Block, blocks_of, inline_into_last
from schedules.cpu.elementwise import schedule_spatial_block
from schedules.cpu.register_tile import RegisterTile
from schedules.traits import Traits


@dataclass(frozen=True)
class Parts:
    """The blocks of a contraction by their role."""

    preparation: tuple[Block, ...]
    anchor: Block
    tail: tuple[Block, ...]


def find_parts(schedule: s_tir.Schedule, family: str) -> Parts | None:
    """The parts, if the function's anchor is of ``family`` and nothing else in it reduces."""
    blocks = blocks_of(schedule)
    if blocks is None:
        return None
    anchors = [position for position, block in enumerate(blocks) if block.anchor == family]
    if len(anchors) != 1:
        return None
    position = anchors[0]
    parts = Parts(tuple(blocks[:position]), blocks[position], tuple(blocks[position + 1 :]))
    if not parts.tail or any(block.is_reduction for block in (*parts.preparation, *parts.tail)):
        return None
    return parts


@dataclass(frozen=True)
class LoopRoles:
    """Which loop of the anchor is which, by position; ``outer`` are all that are not tiled."""

    blocks: int
    rows: int
    lanes: int
    outer: tuple[int, ...]
    reduction: tuple[int, ...]


def schedule_contraction(
    schedule: s_tir.Schedule,
    parts: Parts,
    roles: LoopRoles,
    tile: RegisterTile,
    traits: Traits,
    *,
    blocks_outermost: bool,
    unroll_innermost: int,
) -> None:
    """Tile the anchor, accumulate in registers, compute the tail on each finished tile."""
    for block in parts.preparation:
        schedule_spatial_block(schedule, block, traits)
    last = inline_into_last(schedule, list(parts.tail))
    anchor = parts.anchor.handle
    loops = schedule.get_loops(anchor)
    block_outer, block_inner = schedule.split(loops[roles.blocks], [None, tile.blocks])
    row_outer, row_inner = schedule.split(loops[roles.rows], [None, tile.rows])
    lane = loops[roles.lanes]
    outer = [loops[position] for position in roles.outer]
    reduction = [loops[position] for position in roles.reduction]
    parallel = [outer[0], block_outer, *outer[1:]] if blocks_outermost else [*outer, block_outer]
    schedule.reorder(*parallel, row_outer, *reduction, block_inner, row_inner, lane)
    schedule.parallel(schedule.fuse(*parallel))
    schedule.reverse_compute_at(last.handle, row_outer, preserve_unit_loops=True)
    schedule.set_scope(anchor, 0, "local")
    if unroll_innermost > 1:
        outer_step, inner_step = schedule.split(reduction[-1], [None, unroll_innermost])
        schedule.unroll(inner_step)
        reduction[-1] = outer_step
    schedule.unroll(block_inner)
    schedule.unroll(row_inner)
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(anchor, reduction[0])
    _unroll_all_but_lanes(schedule, initial, inside=2)
    _finish_tail(schedule, last)


def _unroll_all_but_lanes(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, inside: int) -> None:
    loops = schedule.get_loops(block)
    schedule.vectorize(loops[-1])
    for loop in loops[inside:-1]:
        schedule.unroll(loop)


def _finish_tail(schedule: s_tir.Schedule, last: Block) -> None:
    """Vectorise the tail's innermost loop, and unroll the rest so that accumulators never leave their registers."""
    _unroll_all_but_lanes(schedule, last.handle, inside=2)


def order_of(positions: Sequence[int], without: Sequence[int]) -> tuple[int, ...]:
    return tuple(position for position in positions if position not in without)
