"""Schedules for GPUs: TVM's own (dlight), which bind every kernel to threads without tuning."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir import dlight
from tvm.target import Target

# Fallback stands last: it takes every function, and leaves no block without threads.
RULES: tuple[tuple[str, object], ...] = (
    ("matmul", dlight.gpu.Matmul()),
    ("gemv", dlight.gpu.GEMV()),
    ("reduction", dlight.gpu.Reduction()),
    ("general_reduction", dlight.gpu.GeneralReduction()),
    ("transpose", dlight.gpu.Transpose()),
    ("fallback", dlight.gpu.Fallback()),
)


def apply_rule(rule: object, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """The scheduled function, or None where the rule does not match."""
    with target:
        schedule = rule.apply(function, target, False)  # type: ignore[attr-defined]
    if isinstance(schedule, list):
        schedule = schedule[0] if schedule else None
    if not isinstance(schedule, s_tir.Schedule):
        return None
    return schedule.mod["main"]
