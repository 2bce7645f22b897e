"""TVM's own rules (dlight) in the form of this package's rules."""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import dlight
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from schedules.blocks import new_schedule


def apply_default(rule: ScheduleRule, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """The function scheduled by a TVM rule, or None if that rule does not match."""
    schedule = _applied(rule, in_loops(function), target)
    return None if schedule is None else _bound(schedule)


def apply_reduction(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """The function scheduled by TVM's rule for sums, which also schedules products and extremes with the same steps."""
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
    """The function with sums in place of products and extremes."""

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
    """Put blocks without loops into loops of one step; TVM cannot share a sum (rfactor) next to a block without one."""
    root = function.body.block if isinstance(function.body, s_tir.SBlockRealize) else None
    if root is None:
        return function
    several = isinstance(root.body, tirx.SeqStmt)
    body = tirx.SeqStmt([_in_loop(statement) for statement in root.body.seq]) if several else _in_loop(root.body)
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
        root.match_buffers, root.annotations,
    )  # fmt: skip
    return function.with_body(s_tir.SBlockRealize(function.body.iter_values, function.body.predicate, block))


def _in_loop(statement: tirx.Stmt) -> tirx.Stmt:
    if not isinstance(statement, s_tir.SBlockRealize) or len(statement.iter_values) != 1:
        return statement
    extent = statement.block.iter_vars[0].dom.extent
    step = tirx.Var("step", extent.ty)
    once = s_tir.SBlockRealize([step], statement.predicate, statement.block)
    return tirx.For(step, tirx.const(0, str(extent.ty)), extent, tirx.ForKind.SERIAL, once)


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
    """The extents of the thread loops around a block, by thread tag."""
    loops = [schedule.get(loop) for loop in schedule.get_loops(block)]
    return {
        str(loop.thread_binding.thread_tag): int(loop.extent)
        for loop in loops
        if loop.thread_binding is not None and isinstance(loop.extent, tirx.IntImm)
    }
