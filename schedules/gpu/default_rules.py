"""Schedule all but products: element by element, sums of all elements, and the rest by TVM's own rules (dlight)."""

from math import prod

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import dlight
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from schedules.blocks import Block, inline_between, inline_into_outputs, new_schedule
from schedules.gpu.tile import MOST_THREADS, WARP


def apply_default(rule: ScheduleRule, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Return the function scheduled by a TVM rule, or None if that rule does not match."""
    schedule = _applied(rule, in_loops(function), target)
    return None if schedule is None else _bound(schedule)


def apply_reduction(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Return the function scheduled by TVM's rule for sums, or None; products and extremes get the same schedule."""
    looped = in_loops(function)
    schedule = _applied(dlight.gpu.Reduction(), _with_sums(looped), target)
    if schedule is None:
        return None
    replayed = new_schedule(looped)
    schedule.trace.apply_to_schedule(replayed, remove_postproc=False)
    return _bound(replayed)


def _applied(rule: ScheduleRule, function: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
    schedule = rule.apply(function, target, False)
    if isinstance(schedule, list):
        schedule = schedule[0] if schedule else None
    return schedule if isinstance(schedule, s_tir.Schedule) else None


def _with_sums(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with sums in place of products and extremes."""

    def block(original: s_tir.SBlock) -> s_tir.SBlock:
        store = original.body
        if not isinstance(original.init, tirx.BufferStore) or not isinstance(store, tirx.BufferStore):
            return original
        if not isinstance(store.value, tirx.Mul | tirx.Max | tirx.Min):
            return original
        zero = tirx.const(0, str(store.buffer.dtype))
        return s_tir.SBlock(
            original.iter_vars, original.reads, original.writes, original.name_hint,
            tirx.BufferStore(store.buffer, tirx.Add(store.value.a, store.value.b), store.indices),
            tirx.BufferStore(store.buffer, zero, original.init.indices),
            original.alloc_buffers, original.match_buffers, original.annotations,
        )  # fmt: skip

    return tvm_ffi.structural_map(function, [(s_tir.SBlock, block)])


def _bound(schedule: s_tir.Schedule) -> tirx.PrimFunc | None:
    _bind_what_all_threads_do(schedule)
    if any("blockIdx.x" not in _bindings(schedule, block) for block in _blocks(schedule) if schedule.get_loops(block)):
        return None  # a rule that takes scalars for endless rows leaves out the blocks after them
    return schedule.mod["main"]


def in_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with a loop of one step around blocks without loops, next to which TVM's rfactor fails."""
    root = function.body.block if isinstance(function.body, s_tir.SBlockRealize) else None
    if root is None:
        return function
    outermost = set(map(hash, root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]))

    def in_loop(realize: s_tir.SBlockRealize) -> tirx.Stmt:
        if hash(realize) not in outermost or len(realize.iter_values) != 1:
            return realize
        extent = realize.block.iter_vars[0].dom.extent
        step = tirx.Var("step", extent.ty)
        once = s_tir.SBlockRealize([step], realize.predicate, realize.block)
        return tirx.For(step, tirx.const(0, str(extent.ty)), extent, tirx.ForKind.SERIAL, once)

    return tvm_ffi.structural_map(function, [(s_tir.SBlockRealize, in_loop)])


def _blocks(schedule: s_tir.Schedule) -> list[s_tir.schedule.SBlockRV]:
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def _bind_what_all_threads_do(schedule: s_tir.Schedule) -> None:
    """Bind the blocks after a shared sum (such as a mean's division) to threads, so that each element is computed once.

    TVM's rules leave these blocks to all threads.
    """
    blocks = _blocks(schedule)
    extents = {tag: extent for block in blocks for tag, extent in _bindings(schedule, block).items()}
    for block in blocks:
        bound = _bindings(schedule, block)
        if "blockIdx.x" not in bound or any(tag.startswith("threadIdx") for tag in bound):
            continue
        if "threadIdx.x" not in extents or any(tag in extents for tag in ("threadIdx.y", "threadIdx.z")):
            continue
        inner = [loop for loop in schedule.get_loops(block) if schedule.get(loop).thread_binding is None]
        loop = inner[-1] if inner else schedule.add_unit_loop(block)
        _, thread = schedule.split(loop, [None, extents["threadIdx.x"]])
        schedule.bind(thread, "threadIdx.x")


def _bindings(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> dict[str, int]:
    """Return the extents of the thread loops around a block, by thread tag."""
    loops = [schedule.get(loop) for loop in schedule.get_loops(block)]
    return {
        str(loop.thread_binding.thread_tag): int(loop.extent)
        for loop in loops
        if loop.thread_binding is not None and isinstance(loop.extent, tirx.IntImm)
    }


THREADS = 256


def schedule_elementwise(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Inline intermediate blocks and make each output a separate kernel; None for functions with reductions."""
    schedule = new_schedule(in_loops(function))
    remaining = inline_into_outputs(schedule, function)
    if remaining is None or not all(block.statement.iter_vars for block in remaining):
        return None  # blocks without axes bind threads themselves
    for block in remaining:
        bind_elements(schedule, block.handle)
    return schedule.mod["main"]


def bind_elements(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> s_tir.schedule.LoopRV:
    """Bind threads along the innermost axis, so that neighbours write neighbouring elements; return their loop."""
    loops = schedule.get_loops(block) or [schedule.add_unit_loop(block)]
    iterations = prod(int(schedule.get(loop).extent) for loop in loops)
    outer, threads = schedule.split(schedule.fuse(*loops), [None, min(THREADS, -(-iterations // WARP) * WARP)])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    return threads


def uses(expression: tirx.Expr, variable: tirx.Var) -> bool:
    return any(variable.same_as(used) for used in tirx.analysis.undefined_vars(expression))


def schedule_whole_reduction(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Schedule a function whose reductions all cover all elements; None for other functions."""
    schedule = new_schedule(in_loops(function))
    remaining = inline_between(schedule, function)
    reductions = [block for block in remaining or () if block.is_reduction]
    if not reductions or any(prod(block.extents[: block.spatial]) != 1 for block in reductions):
        return None
    for block in remaining or ():
        if block.is_reduction:
            _reduce(schedule, block)
        else:
            bind_elements(schedule, block.handle)
    return schedule.mod["main"]


def _reduce(schedule: s_tir.Schedule, block: Block) -> None:
    loop = schedule.fuse(*schedule.get_loops(block.handle)[block.spatial :])
    threads = min(MOST_THREADS, 1 << (block.iterations - 1).bit_length())
    _, thread = schedule.split(loop, [None, threads])
    schedule.bind(thread, "threadIdx.x")
    schedule.bind(schedule.add_unit_loop(schedule.get_loops(block.handle)[0]), "blockIdx.x")
