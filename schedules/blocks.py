"""Reading PrimFuncs: which blocks a function has, what they iterate over, which of them is the anchor.

What the schedules for all targets share: finding a kernel's parts, and inlining what needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm_ffi import structural_walk

ANCHOR = "tvm_split.anchor"
"""Block annotation that legalizations give the block a schedule is built around; its value names the family."""

INLINE = "tvm_split.inline"
"""Block annotation of what is only another way to read a tensor: never worth memory of its own."""

LARGEST_EXPRESSION = 20000
"""Nodes that a block which is read in several places may become. Chains of gates would double in every step."""


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


def last_line(error: object) -> str:
    """What an error of TVM, whose message begins with its trace, says in the end; lines without letters underline."""
    said = [line for line in str(error).strip().splitlines() if any(map(str.isalpha, line))]
    return (said or [type(error).__name__])[-1]


def new_schedule(function: tirx.PrimFunc) -> s_tir.Schedule:
    # A fixed seed, so that nothing depends on the clock; checks of the state would cost half the scheduling time.
    return s_tir.Schedule(tvm.IRModule({"main": function}), seed=1, debug_mask="none", error_render_level="fast")


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
    """Inline what lies between inputs and outputs; the blocks that are left, or None where one reduces."""
    blocks = blocks_of(schedule)
    if blocks is None or any(block.is_reduction for block in blocks):
        return None
    return inline_between(schedule, function)


def inline_between(schedule: s_tir.Schedule, function: tirx.PrimFunc) -> list[Block] | None:
    """Inline what lies between inputs, reductions and outputs; the blocks that are left, or None as of `blocks_of`."""
    blocks = blocks_of(schedule)
    outputs = {buffer.name for buffer in buffers_of(function)}

    def stays(block: Block) -> bool:
        written = block.statement.writes
        return block.is_reduction or len(written) != 1 or written[0].source.name in outputs

    return None if blocks is None else _inlined(schedule, blocks, stays)


def finished_block(schedule: s_tir.Schedule, anchor: Block, tail: Sequence[Block]) -> s_tir.schedule.SBlockRV | None:
    """The block that stores a reduction's finished results, one for each of its sums; None where shapes differ.

    It is the last of the elementwise ``tail``, with the others inlined, or a copy where nothing follows the reduction.
    """
    if not tail:
        return schedule.cache_write(anchor.handle, 0, "local")
    last, *rest = inline_tail(schedule, anchor, tail)
    return last.handle if not rest and last.extents == anchor.extents[: anchor.spatial] else None


def inline_tail(schedule: s_tir.Schedule, anchor: Block, tail: Sequence[Block]) -> list[Block]:
    """Inline the spatial blocks behind an anchor. The first that is left can be computed on a finished tile.

    It has an element for each of the first block's: a gate of one value a channel ends its tile, and the image that is
    multiplied by it is computed after it.

    Raises:
        ValueError: more than one block that is left reads the anchor.
    """
    iterations = {block.name: block.iterations for block in tail}

    def ends_tile(block: Block) -> bool:
        readers = [str(schedule.get(reader).name_hint) for reader in schedule.get_consumers(block.handle)]
        return not readers or block.iterations == tail[0].iterations < max(iterations[reader] for reader in readers)

    kept = _inlined(schedule, tail, ends_tile)
    if len(schedule.get_consumers(anchor.handle)) > 1:
        raise ValueError(f"{anchor.name} is read by more than what ends its tiles")
    return kept


def _inlined(schedule: s_tir.Schedule, blocks: Sequence[Block], stays: Callable[[Block], bool]) -> list[Block]:
    """Inline blocks into what reads them, but those that stay and those that are `_too_large` for that."""
    kept: list[Block] = []
    for block in blocks:
        if stays(block) or _too_large(schedule, block):
            kept.append(block)
        else:
            schedule.compute_inline(block.handle)
    return [replace(block, statement=schedule.get(block.handle)) for block in kept]


def _too_large(schedule: s_tir.Schedule, block: Block) -> bool:
    """Whether a block's expression, in all places that read it, would be more than a compiler gets through."""
    written = block.statement.writes[0].source
    reads: list[bool] = []
    nodes: list[object] = []
    for reader in schedule.get_consumers(block.handle):
        body = schedule.get(reader).body
        structural_walk(body, (tvm.ir.TensorLoad, lambda load: reads.append(load.source.same_as(written))))
    if sum(reads) > 1:
        structural_walk(schedule.get(block.handle).body, nodes.append)
    return sum(reads) * len(nodes) > LARGEST_EXPRESSION


def reduced_types(function: tirx.PrimFunc) -> set[str]:
    """The types in which a function reduces."""
    found: set[str] = set()

    def see(block: s_tir.SBlock) -> None:
        if any(each.iter_type == tirx.IterVar.CommReduce for each in block.iter_vars):
            found.update(str(region.source.dtype) for region in block.writes)

    structural_walk(function.body, (s_tir.SBlock, see))
    return found
