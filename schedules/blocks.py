"""Reading PrimFuncs: which blocks a function has, what they iterate over, which of them is the anchor.

What the schedules for all targets share: finding a kernel's parts, and inlining what needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import tvm
from tvm import s_tir, tirx

ANCHOR = "tvm_split.anchor"
"""Block annotation that legalizations give the block a schedule is built around; its value names the family."""

INLINE = "tvm_split.inline"
"""Block annotation of what is only another way to read a tensor: never worth memory of its own."""


@dataclass(frozen=True)
class Block:
    """One block of a PrimFunc before scheduling: a loop per iterator, in order."""

    handle: s_tir.schedule.SBlockRV
    statement: s_tir.SBlock
    kinds: str
    extents: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.statement.name_hint)

    @property
    def is_reduction(self) -> bool:
        return "R" in self.kinds

    @property
    def spatial(self) -> int:
        """How many iterators come before the first reduction."""
        return self.kinds.index("R") if self.is_reduction else len(self.kinds)

    @property
    def anchor(self) -> str | None:
        annotation = self.statement.annotations.get(ANCHOR, None)
        return None if annotation is None else str(annotation)

    @property
    def is_inline(self) -> bool:
        return INLINE in self.statement.annotations

    @property
    def iterations(self) -> int:
        return prod(self.extents)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(int(extent) for extent in self.statement.writes[0].source.shape)


@dataclass(frozen=True)
class Parts:
    """The blocks of a kernel by their role: what stands before the anchor, it, and what is computed from it."""

    preparation: tuple[Block, ...]
    anchor: Block
    tail: tuple[Block, ...]


def buffers_of(function: tirx.PrimFunc) -> list[tirx.Buffer]:
    """The function's parameters that are buffers: inputs first, outputs last."""
    return [parameter for parameter in function.params if hasattr(parameter, "shape")]


def has_static_shapes(function: tirx.PrimFunc) -> bool:
    return all(isinstance(extent, tirx.IntImm) for buffer in buffers_of(function) for extent in buffer.shape)


def blocks_of(schedule: s_tir.Schedule) -> list[Block] | None:
    """All blocks in program order, or None where one is not a plain loop nest with constant extents."""
    found: list[Block] = []
    root = schedule.get_sblock("root")
    for handle in schedule.get_child_blocks(root):
        statement = schedule.get(handle)
        loops = schedule.get_loops(handle)
        extents = []
        kinds = ""
        if len(loops) != len(statement.iter_vars):
            return None
        for iterator in statement.iter_vars:
            extent = iterator.dom.extent
            if not isinstance(extent, tirx.IntImm) or not isinstance(iterator.dom.min, tirx.IntImm):
                return None
            if iterator.iter_type == tirx.IterVar.DataPar:
                kinds += "S"
            elif iterator.iter_type == tirx.IterVar.CommReduce:
                kinds += "R"
            else:
                return None
            extents.append(int(extent))
        if "RS" in kinds:
            return None
        found.append(Block(handle, statement, kinds, tuple(extents)))
    return found or None


def without_symbol(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function under no name: equal kernels of different names are equal."""
    return function.without_attr("global_symbol") if "global_symbol" in function.attrs else function


def new_schedule(function: tirx.PrimFunc) -> s_tir.Schedule:
    # A fixed seed, so that nothing depends on the clock; checks of the state would cost half the scheduling time.
    return s_tir.Schedule(tvm.IRModule({"main": function}), seed=1, debug_mask="none", error_render_level="none")


def find_parts(schedule: s_tir.Schedule, family: str) -> Parts | None:
    """The parts, if the function's anchor is of ``family`` and nothing else in it reduces; views are inlined."""
    blocks = blocks_of(schedule)
    if blocks is None:
        return None
    views = [block for block in blocks if block.is_inline]
    if views:
        for view in views:
            schedule.compute_inline(view.handle)
        return find_parts(schedule, family)
    anchors = [position for position, block in enumerate(blocks) if block.anchor == family]
    if len(anchors) != 1:
        return None
    position = anchors[0]
    parts = Parts(tuple(blocks[:position]), blocks[position], tuple(blocks[position + 1 :]))
    if not parts.tail or any(block.is_reduction for block in (*parts.preparation, *parts.tail)):
        return None
    return parts


def inline_into_outputs(schedule: s_tir.Schedule, function: tirx.PrimFunc) -> list[Block] | None:
    """Inline all that lies between inputs and outputs; the blocks that write outputs, or None where one reduces."""
    blocks = blocks_of(schedule)
    if blocks is None or any(block.is_reduction for block in blocks):
        return None
    outputs = {buffer.name for buffer in buffers_of(function)}
    kept: list[Block] = []
    for block in blocks:
        written = block.statement.writes
        if len(written) == 1 and written[0].source.name not in outputs:
            schedule.compute_inline(block.handle)
        else:
            kept.append(block)
    return kept


def finished_block(schedule: s_tir.Schedule, anchor: Block, tail: Sequence[Block]) -> s_tir.schedule.SBlockRV | None:
    """The block that stores a reduction's finished results, one for each of its sums; None where shapes differ.

    It is the last of the elementwise ``tail``, with the others inlined, or a copy where nothing follows the reduction.
    """
    if not tail:
        return schedule.cache_write(anchor.handle, 0, "local")
    last = inline_into_last(schedule, tail)
    return last.handle if last.extents == anchor.extents[: anchor.spatial] else None


def inline_into_last(schedule: s_tir.Schedule, blocks: Sequence[Block]) -> Block:
    """Inline each of a chain of spatial blocks into the next; returns the last, where all of them are computed."""
    for block in blocks[:-1]:
        schedule.compute_inline(block.handle)
    last = blocks[-1]
    return Block(last.handle, schedule.get(last.handle), last.kinds, last.extents)
