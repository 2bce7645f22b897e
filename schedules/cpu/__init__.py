"""Schedules for CPUs, in the order they are tried: the special before the general."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from tvm_split.schedules.cpu.columns import schedule_columns
from tvm_split.schedules.cpu.conv2d import CONV2D
from tvm_split.schedules.cpu.depthwise_conv2d import DEPTHWISE_CONV2D
from tvm_split.schedules.cpu.elementwise import schedule_elementwise
from tvm_split.schedules.cpu.fallback import schedule_fallback
from tvm_split.schedules.cpu.matmul import MATMUL
from tvm_split.schedules.cpu.pooling import schedule_pooling
from tvm_split.schedules.cpu.reduction import schedule_reduction
from tvm_split.schedules.cpu.winograd import schedule_winograd
from tvm_split.schedules.template import Template, default_rule
from tvm_split.schedules.traits import Traits

Rule = Callable[[tirx.PrimFunc, Traits], tirx.PrimFunc | None]

TEMPLATES: tuple[Template, ...] = (CONV2D, DEPTHWISE_CONV2D, MATMUL)
"""Rules whose schedules have choices; tuning looks here for what it can tune."""

RULES: tuple[tuple[str, Rule], ...] = (
    *((template.name, default_rule(template)) for template in TEMPLATES),
    ("winograd", schedule_winograd),
    ("columns", schedule_columns),
    ("elementwise", schedule_elementwise),
    ("pooling", schedule_pooling),
    ("reduction", schedule_reduction),
    ("fallback", schedule_fallback),
)
