"""Read PrimFuncs: list their blocks and iterators, and find the anchor block.

The schedules for all targets share these functions, and those that inline blocks which need no buffer of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm_ffi import structural_walk

ANCHOR = "tvm_split.anchor"
"""Block annotation: legalizations mark the block a schedule is built around, the anchor. The value is its family."""

INLINE = "tvm_split.inline"
"""Block annotation of views, which only read a tensor in another way. They are always inlined."""

KINDS = {tirx.IterVar.DataPar: "S", tirx.IterVar.CommReduce: "R"}
"""The letters of a block's iterators."""

LARGEST_EXPRESSION = 20000
"""Most nodes, over all readers, of an expression that is inlined. Chains of gates would double it at every step."""


@dataclass(frozen=True)
class Block:
    """One block of a PrimFunc before scheduling: it has one loop per iterator, in order.

    ``kinds`` has one letter per iterator: S for a spatial one, R for one of a reduction.
    """

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
        """The number of spatial iterators, which precede all reduction iterators."""
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
    """The blocks of a kernel by role: those that the anchor reads, the anchor, and the others.

    The ``tail`` has first the blocks computed from the anchor, and then blocks that they read besides it.
    """

    preparation: tuple[Block, ...]
    anchor: Block
    tail: tuple[Block, ...]


def buffers_of(function: tirx.PrimFunc) -> list[tirx.Buffer]:
    """Return the function's buffer parameters: inputs first, outputs last."""
    return [parameter for parameter in function.params if hasattr(parameter, "shape")]


def has_static_shapes(function: tirx.PrimFunc) -> bool:
    return all(isinstance(extent, tirx.IntImm) for buffer in buffers_of(function) for extent in buffer.shape)


def is_plain_code(function: tirx.PrimFunc) -> bool:
    """Return whether the function has no block "root", below which rules find blocks: TVM writes scatters this way."""
    return isinstance(function.body, s_tir.SBlockRealize) and function.body.block.name_hint != "root"


def without_pragma_scope(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function without TVM's mark ``pragma_scope``, which only makes the code generator warn."""

    def attribute(statement: tirx.AttrStmt) -> tirx.Stmt:
        return statement.body if statement.attr_key == "pragma_scope" else statement

    return tvm_ffi.structural_map(function, [(tirx.AttrStmt, attribute)])


def blocks_of(schedule: s_tir.Schedule) -> list[Block] | None:
    """Return all blocks in program order; None if one of them is not a plain loop nest with constant extents."""
    blocks: list[Block] = []
    root = schedule.get_sblock("root")
    for handle in schedule.get_child_blocks(root):
        statement = schedule.get(handle)
        iterators = statement.iter_vars
        kinds = "".join(KINDS.get(iterator.iter_type, "?") for iterator in iterators)
        bounds = [bound for iterator in iterators for bound in (iterator.dom.min, iterator.dom.extent)]
        if "?" in kinds or "RS" in kinds or not all(isinstance(bound, tirx.IntImm) for bound in bounds):
            return None
        if len(schedule.get_loops(handle)) != len(iterators):
            return None
        blocks.append(Block(handle, statement, kinds, tuple(map(int, bounds[1::2]))))
    return blocks or None


def anchors_of(function: tirx.PrimFunc) -> set[str]:
    """Return the families of the function's anchors. No schedule is needed for it, which would cost a millisecond."""
    families: set[str] = set()

    def see(block: s_tir.SBlock) -> None:
        if ANCHOR in block.annotations:
            families.add(str(block.annotations[ANCHOR]))

    structural_walk(function.body, (s_tir.SBlock, see))
    return families


def without_symbol(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function without its symbol name, so that equal kernels with different names compare equal."""
    return function.without_attr("global_symbol") if "global_symbol" in function.attrs else function


def last_line(error: object) -> str:
    """Return the message of a TVM error, its last line with letters: the trace precedes it, underlines may follow."""
    lines = [line for line in str(error).strip().splitlines() if any(map(str.isalpha, line))]
    return (lines or [type(error).__name__])[-1]


class _Schedule(s_tir.Schedule):  # type: ignore[misc]
    """A schedule whose methods do not check the types of their arguments, which takes longer than what they do."""


for _name, _method in vars(s_tir.Schedule).items():
    if hasattr(_method, "__wrapped__"):
        setattr(_Schedule, _name, _method.__wrapped__)


def new_schedule(function: tirx.PrimFunc) -> s_tir.Schedule:
    # The fixed seed makes results reproducible. State checks would cost half of the scheduling time.
    return _Schedule(tvm.IRModule({"main": function}), seed=1, debug_mask="none", error_render_level="fast")


def find_parts(schedule: s_tir.Schedule, family: str) -> Parts | None:
    """Inline views and return the kernel's parts.

    None unless one anchor is of ``family``, only the anchor reduces, and other blocks read its result.
    """
    blocks = blocks_of(schedule)
    if blocks is None:
        return None
    views = [block for block in blocks if block.is_inline]
    if views:
        for view in views:
            schedule.compute_inline(view.handle)
        return find_parts(schedule, family)
    anchors = [block for block in blocks if block.anchor == family]
    if len(anchors) != 1 or sum(block.is_reduction for block in blocks) > 1:
        return None
    (anchor,) = anchors
    before = _reached(schedule, anchor, schedule.get_producers)
    behind = _reached(schedule, anchor, schedule.get_consumers)
    preparation = tuple(block for block in blocks if block.name in before)
    tail = [block for block in blocks if block.name in behind]
    operands = [block for block in blocks if block.name not in {anchor.name, *before, *behind}]
    return Parts(preparation, anchor, (*tail, *operands)) if tail else None


def _reached(
    schedule: s_tir.Schedule, block: Block, step: Callable[[s_tir.schedule.SBlockRV], list[s_tir.schedule.SBlockRV]]
) -> set[str]:
    """Return the names of the blocks that a block reaches in one or more steps, to producers or to consumers."""
    names: set[str] = set()
    waiting = [block.handle]
    while waiting:
        handles = step(waiting.pop())
        waiting += [
            handle for handle, name in zip(handles, _names(schedule, handles), strict=True) if name not in names
        ]
        names.update(_names(schedule, handles))
    return names


def _names(schedule: s_tir.Schedule, handles: Sequence[s_tir.schedule.SBlockRV]) -> list[str]:
    return [str(schedule.get(handle).name_hint) for handle in handles]


def inline_into_outputs(schedule: s_tir.Schedule, function: tirx.PrimFunc) -> list[Block] | None:
    """Inline the blocks between inputs and outputs and return the remaining ones; None if any block reduces."""
    blocks = blocks_of(schedule)
    if blocks is None or any(block.is_reduction for block in blocks):
        return None
    return _inline_between(schedule, function, blocks)


def inline_between(schedule: s_tir.Schedule, function: tirx.PrimFunc) -> list[Block] | None:
    """Inline the blocks between inputs, reductions and outputs; return the others, or None if `blocks_of` fails."""
    blocks = blocks_of(schedule)
    return None if blocks is None else _inline_between(schedule, function, blocks)


def _inline_between(schedule: s_tir.Schedule, function: tirx.PrimFunc, blocks: Sequence[Block]) -> list[Block]:
    outputs = {buffer.name for buffer in buffers_of(function)}

    def stays(block: Block) -> bool:
        written = block.statement.writes
        return block.is_reduction or len(written) != 1 or written[0].source.name in outputs

    return _inlined(schedule, blocks, stays)


def finished_block(schedule: s_tir.Schedule, anchor: Block, tail: Sequence[Block]) -> s_tir.schedule.SBlockRV | None:
    """Return the block that stores a reduction's results; None unless it stores one element for each of them.

    This is the last block of the elementwise ``tail``, after the others are inlined. An empty tail gets a copy block.
    """
    if not tail:
        return schedule.cache_write(anchor.handle, 0, "local")
    last, *rest = inline_tail(schedule, anchor, tail)
    return last.handle if not rest and last.extents == anchor.extents[: anchor.spatial] else None


def inline_tail(schedule: s_tir.Schedule, anchor: Block, tail: Sequence[Block]) -> list[Block]:
    """Inline the spatial blocks after an anchor; return the others, the first of which runs on each finished tile.

    The first remaining block has as many elements as the first block of the tail. For example, a gate with one value
    per channel ends the tile, and the image that it multiplies is computed afterwards. So are slices of the results and
    blocks that also read an operand that is too large to be inlined.

    Raises:
        ValueError: more than one remaining block reads the anchor.
    """
    iterations = {block.name: block.iterations for block in tail}
    behind = _reached(schedule, anchor, schedule.get_consumers)
    results = [block for block in tail if block.name in behind]
    operands = [block for block in tail if block.name not in behind]
    operands = _inlined(schedule, operands, lambda block: not schedule.get_consumers(block.handle))
    outside = {block.name for block in operands}

    def ends_tile(block: Block) -> bool:
        readers = schedule.get_consumers(block.handle)
        producers = {name for reader in readers for name in _names(schedule, schedule.get_producers(reader))}
        is_respread = any(iterations[reader] != block.iterations for reader in _names(schedule, readers))
        return not readers or bool(outside & producers) or (block.iterations == results[0].iterations and is_respread)

    remaining = _inlined(schedule, results, ends_tile)
    if len(schedule.get_consumers(anchor.handle)) > 1:
        raise ValueError(f"{anchor.name} is read by more than what ends its tiles")
    return [*remaining, *operands]


def _inlined(schedule: s_tir.Schedule, blocks: Sequence[Block], stays: Callable[[Block], bool]) -> list[Block]:
    """Inline each block into its readers, unless it ``stays`` or is `_too_large`; return those that remain."""
    remaining: list[Block] = []
    for block in blocks:
        if stays(block) or _too_large(schedule, block):
            remaining.append(block)
        else:
            schedule.compute_inline(block.handle)
    return [replace(block, statement=schedule.get(block.handle)) for block in remaining]


def _too_large(schedule: s_tir.Schedule, block: Block) -> bool:
    """Return whether inlining the block into all its readers would make an expression too large to compile."""
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
    """Return the dtypes of the function's reductions."""
    dtypes: set[str] = set()

    def see(block: s_tir.SBlock) -> None:
        if any(iterator.iter_type == tirx.IterVar.CommReduce for iterator in block.iter_vars):
            dtypes.update(str(region.source.dtype) for region in block.writes)

    structural_walk(function.body, (s_tir.SBlock, see))
    return dtypes
