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
    return schedule.mod["main"] if isinstance(schedule, s_tir.Schedule) else None
