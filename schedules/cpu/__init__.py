"""Schedules for CPUs, in the order they are tried: the special before the general."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from schedules.cpu.columns import schedule_columns
from schedules.cpu.conv2d import schedule_conv2d
from schedules.cpu.depthwise_conv2d import schedule_depthwise_conv2d
from schedules.cpu.elementwise import schedule_elementwise
from schedules.cpu.fallback import schedule_fallback
from schedules.cpu.matmul import schedule_matmul
from schedules.cpu.pooling import schedule_pooling
from schedules.cpu.prefetch import prefetch_weights
from schedules.cpu.reduction import schedule_reduction
from schedules.traits import Traits

Rule = Callable[[tirx.PrimFunc, Traits], tirx.PrimFunc | None]

RULES: tuple[tuple[str, Rule], ...] = (
    ("conv2d", schedule_conv2d),
    ("depthwise_conv2d", schedule_depthwise_conv2d),
    ("matmul", schedule_matmul),
    ("columns", schedule_columns),
    ("elementwise", schedule_elementwise),
    ("pooling", schedule_pooling),
    ("reduction", schedule_reduction),
    ("fallback", schedule_fallback),
)


def apply_rule(rule: Rule, function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """The scheduled function, or None where the rule does not match."""
    scheduled = rule(function, traits)
    return None if scheduled is None else prefetch_weights(scheduled)
