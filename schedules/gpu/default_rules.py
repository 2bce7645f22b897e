"""The rules that TVM ships (dlight), as rules of this package."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target


def apply_default(rule: ScheduleRule, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """The function as a rule of TVM schedules it, or None where that rule does not match."""
    schedule = rule.apply(function, target, False)
    if isinstance(schedule, list):
        schedule = schedule[0] if schedule else None
    if not isinstance(schedule, s_tir.Schedule):
        return None
    _bind_what_all_threads_do(schedule)
    return schedule.mod["main"]


def _bind_what_all_threads_do(schedule: s_tir.Schedule) -> None:
    """What follows a sum that a block of threads shares (a mean's division) is left to all of them: to one, here."""
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
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
