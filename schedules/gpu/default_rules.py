"""The rules that TVM ships (dlight), as rules of this package."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target


def apply_default(rule: ScheduleRule, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """The function as a rule of TVM schedules it, or None where that rule does not match."""
    schedule = rule.apply(in_loops(function), target, False)
    if isinstance(schedule, list):
        schedule = schedule[0] if schedule else None
    if not isinstance(schedule, s_tir.Schedule):
        return None
    _bind_what_all_threads_do(schedule)
    if any("blockIdx.x" not in _bindings(schedule, block) for block in _blocks(schedule) if schedule.get_loops(block)):
        return None  # a rule that takes scalars for rows without an end leaves what follows them out
    return schedule.mod["main"]


def in_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Scalars' blocks in loops of one step: beside one without, TVM cannot share a sum among threads (rfactor)."""
    root = function.body.block if isinstance(function.body, s_tir.SBlockRealize) else None
    if root is None or not isinstance(root.body, tirx.SeqStmt):
        return function
    body = tirx.SeqStmt([_in_loop(statement) for statement in root.body.seq])
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
    """What follows a sum that a block of threads shares (a mean's division) is left to all of them: to one, here."""
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
    """Extents of the threads around a block, by their tags."""
    loops = [schedule.get(loop) for loop in schedule.get_loops(block)]
    return {
        str(loop.thread_binding.thread_tag): int(loop.extent)
        for loop in loops
        if loop.thread_binding is not None and isinstance(loop.extent, tirx.IntImm)
    }
