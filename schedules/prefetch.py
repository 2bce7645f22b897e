"""Prefetch weights: while one tile of output channels is computed, the weights of the next one are loaded from memory.

Weights are read once per input, so they come from beyond the second-level cache. Without prefetching, the first rows of
each tile of channels wait for the weights, and memory is idle during the other rows. The hardware prefetches only a
little ahead within a page. A few prefetches per iteration of a loop around the tile spread the next region evenly.

A schedule marks that loop with `mark_for_prefetch`; `prefetch_weights` then rewrites the finished function. Nothing
else depends on it. An address after the last weight is harmless, because a prefetch never faults.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tvm import s_tir, tirx
from tvm.s_tir import SBlockRealize
from tvm.s_tir.schedule import LoopRV
from tvm.sym.analyzer import Analyzer
from tvm_ffi import structural_map

MARK = "tvm_split.prefetch"
"""Loop annotation: the fields of a `Region`."""
LOCALITY = 2
READ, DATA = 0, 1
# An iteration that needs more has few rows. Then weights are read in order about as fast as memory delivers them, and
# the hardware prefetcher alone is faster.
MOST_PER_ITERATION = 64


@dataclass(frozen=True)
class Region:
    """The part of the weights that one tile of output channels reads, before the next tile or its next chunk begins.

    The region is read while the marked loop and the ``loops_around`` loops just around it run. For each of ``blocks``
    channel blocks it holds ``vectors`` of the block's ``vectors_of_block`` vectors.
    """

    loops_around: int
    blocks: int
    vectors: int
    vectors_of_block: int


def mark_for_prefetch(schedule: s_tir.Schedule, loop: LoopRV, region: Region) -> None:
    """Mark a loop of a contraction: each of its iterations will prefetch a part of the next region."""
    schedule.annotate(loop, MARK, list(astuple(region)))


def prefetch_weights(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert prefetches into every marked loop; return the function itself if no loop is marked."""
    parameters = [parameter for parameter in function.params if hasattr(parameter, "shape")]
    rewritten = {
        hash(loop): _with_prefetches(loop, around, parameters)
        for loop, around in _loops_and_blocks(function.body, [])
        if isinstance(loop, tirx.For) and MARK in loop.annotations
    }
    return structural_map(function, [(tirx.For, lambda loop: rewritten.get(hash(loop), loop))])


def _loops_and_blocks(node: Any, around: list[tirx.For]) -> Iterator[tuple[tirx.For | SBlockRealize, list[tirx.For]]]:
    """Yield the loops and blocks of a statement, each with the loops around it, and ``around`` the statement."""
    if isinstance(node, tirx.SeqStmt):
        for part in node.seq:
            yield from _loops_and_blocks(part, around)
    elif isinstance(node, tirx.For):
        yield node, around
        yield from _loops_and_blocks(node.body, [*around, node])
    elif isinstance(node, SBlockRealize):
        yield node, around
        yield from _loops_and_blocks(node.block.body, around)


def _with_prefetches(loop: tirx.For, around: list[tirx.For], parameters: list[Any]) -> tirx.For:
    unmarked = {name: value for name, value in loop.annotations.items() if name != MARK}
    region = Region(*(int(value) for value in loop.annotations[MARK]))
    border = len(around) - region.loops_around
    weight = _weight_load(loop.body, parameters)
    if weight is None or border == 0:
        return _loop(loop, loop.body, unmarked)
    source, indices = weight
    beginning = [_replaced(index, _next_region(around[:border])) for index in indices]
    counted, iterations = tirx.const(0, "int32"), 1
    for inner_loop in (*around[border:], loop):
        counted = counted * inner_loop.extent + inner_loop.loop_var
        iterations *= int(inner_loop.extent)
    # If the region is only a part of each block, every part is a separate piece. Whole blocks are contiguous.
    in_pieces = region.vectors != region.vectors_of_block
    pieces = region.blocks if in_pieces else 1
    vectors = region.vectors if in_pieces else region.blocks * region.vectors
    per_iteration = -(-vectors // iterations)
    if pieces * per_iteration > MOST_PER_ITERATION:
        return _loop(loop, loop.body, unmarked)
    first = counted * per_iteration if per_iteration > 1 else counted * vectors // iterations
    prefetches = []
    for number in range(pieces * per_iteration):
        # The tensor is contiguous, so the offset continues through the outer axes.
        vector = first + (number // per_iteration * region.vectors_of_block + number % per_iteration)
        address = tirx.address_of(tirx.BufferLoad(source, [*beginning[:-1], vector * source.shape[-1]]))
        prefetches.append(tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, READ, LOCALITY, DATA)))
    return _loop(loop, tirx.SeqStmt([*prefetches, loop.body]), unmarked)


def _loop(loop: tirx.For, body: Any, annotations: Mapping[str, Any]) -> tirx.For:
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, dict(annotations))


def _next_region(beyond: Sequence[tirx.For]) -> dict[int, Any]:
    """Return the values that the loop variables around a region have in the next region, by the variables' hashes."""
    values: dict[int, Any] = {hash(loop.loop_var): loop.loop_var for loop in beyond}
    carry: Any = tirx.const(1, "int32")
    for loop in reversed(beyond):
        stepped = loop.loop_var + carry
        if loop.kind == tirx.ForKind.PARALLEL:
            values[hash(loop.loop_var)] = stepped
            break
        values[hash(loop.loop_var)] = stepped % loop.extent
        carry = stepped // loop.extent
    return values


def _weight_load(body: Any, parameters: list[Any]) -> tuple[Any, list[Any]] | None:
    """Return the weights, the parameter that a reduction reads vector by vector, and its indices; None without one."""
    for realize, around in _loops_and_blocks(body, []):
        if not isinstance(realize, SBlockRealize):
            continue
        vectorized = next((loop.loop_var for loop in around[::-1] if loop.kind == tirx.ForKind.VECTORIZED), None)
        iterators = realize.block.iter_vars
        bound = {hash(iterator.var): value for iterator, value in zip(iterators, realize.iter_values, strict=True)}
        if all(iterator.iter_type != tirx.IterVar.CommReduce for iterator in iterators):
            continue
        for read in realize.block.reads:
            last = read.region[-1].min
            lane = bound.get(hash(last)) if isinstance(last, tirx.Var) else None
            of_a_parameter = any(read.source.same_as(parameter) for parameter in parameters)
            if of_a_parameter and isinstance(lane, tirx.Var) and lane.same_as(vectorized):
                return read.source, [_replaced(bounds.min, bound) for bounds in read.region]
    return None


def _replaced(expression: Any, values: Mapping[int, Any]) -> Any:
    """Return an index with its variables replaced by ``values``, keyed by their hashes; other variables become zero."""
    zero = tirx.const(0, "int32")
    replaced = structural_map(expression, (tirx.Var, lambda variable: values.get(hash(variable), zero)))
    return Analyzer().simplify(replaced)
