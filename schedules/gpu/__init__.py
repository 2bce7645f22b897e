"""GPU targets: layout passes, lowerings, and the schedule rules in the order they are tried, special ones first.

This package's rules schedule the kernels that its own legalizations made. TVM's rules (dlight) schedule kernels for
tensor cores and reductions, which they share well among threads. All rules bind every block to threads.
"""

from collections.abc import Callable
from functools import partial

import tvm
from tvm import tirx
from tvm.s_tir import dlight
from tvm.target import Target

from schedules.arithmetic import ARITHMETIC, legalize_arithmetic
from schedules.blocks import reduced_types
from schedules.extremes import EXTREMES, LOWERINGS, legalize_extreme
from schedules.gpu.attention import FuseAttention
from schedules.gpu.default_rules import apply_default, apply_reduction, schedule_elementwise, schedule_whole_reduction
from schedules.gpu.lower_contraction import matmul
from schedules.gpu.lower_convolution import CONVOLUTIONS, legalize_convolution
from schedules.gpu.scan import SCANS, legalize_scan
from schedules.gpu.tile import Gpu, gpu_of
from schedules.gpu.tiling_space import TEMPLATES
from schedules.gpu.window import schedule_depthwise_conv2d, schedule_pooling
from schedules.relax_tools import Legalization, legalize_matmul
from schedules.template import Template

__all__ = ["TEMPLATES", "layout_passes", "legalizations", "rules"]

Rule = Callable[[tirx.PrimFunc, Target], tirx.PrimFunc | None]
SHUFFLED = frozenset(["float16", "float32", "float64", "int32", "int64", "uint32", "uint64"])
"""The dtypes that TVM's lowering of a reduction passes from thread to thread in registers.

For other dtypes it has no barriers within a warp, although a warp's threads have not run in lockstep since sm_70.
"""


def _by_default(template: Template[Gpu]) -> Rule:
    return lambda function, target: template.rule(function, gpu_of(target))


def _if_threads_may_reduce(rule: Rule) -> Rule:
    """Return the rule, which now returns None for a function that reduces other dtypes than `SHUFFLED`.

    TVM reduces these dtypes in shared memory, where the threads of a warp would race.
    """

    def guarded(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        return rule(function, target) if reduced_types(function) <= SHUFFLED else None

    return guarded


# The fallback is last: it takes every function, uses one thread per output, and loads every value from memory each
# time.
RULES: tuple[tuple[str, Rule], ...] = (
    *((template.name, _by_default(template)) for template in TEMPLATES),
    ("depthwise_conv2d", schedule_depthwise_conv2d),
    ("default_matmul", partial(apply_default, dlight.gpu.Matmul())),
    ("default_gemv", _if_threads_may_reduce(partial(apply_default, dlight.gpu.GEMV()))),
    ("elementwise", schedule_elementwise),
    ("pooling", schedule_pooling),
    ("reduction", _if_threads_may_reduce(apply_reduction)),
    ("general_reduction", _if_threads_may_reduce(partial(apply_default, dlight.gpu.GeneralReduction()))),
    ("whole_reduction", _if_threads_may_reduce(schedule_whole_reduction)),
    ("fallback", partial(apply_default, dlight.gpu.Fallback())),
)


def layout_passes(target: Target) -> tuple[Callable[[tvm.IRModule], tvm.IRModule], ...]:
    """Return the passes that fuse several operators into one kernel; none unless the target is CUDA."""
    if str(target.kind.name) != "cuda":
        return ()
    return (lambda module: FuseAttention(module, gpu_of(target)).transform(),)


def legalizations(target: Target) -> dict[str, Legalization]:
    """Return this package's lowerings by operator name; none unless the target is CUDA. TVM lowers all others."""
    if str(target.kind.name) != "cuda":
        return {}
    return {
        **LOWERINGS,
        **dict.fromkeys(EXTREMES, partial(legalize_extreme, widened=True)),
        **dict.fromkeys(ARITHMETIC, partial(legalize_arithmetic, is_widened=False)),
        **dict.fromkeys(SCANS, legalize_scan),
        **dict.fromkeys(CONVOLUTIONS, partial(legalize_convolution, gpu=gpu_of(target))),
        "relax.matmul": partial(legalize_matmul, compute=partial(matmul, gpu=gpu_of(target))),
    }


def rules(target: Target) -> list[tuple[str, Callable[[tirx.PrimFunc], tirx.PrimFunc | None]]]:
    """Return the target's rules with their names, in the order they are tried; one that does not match returns None."""
    return [(name, partial(_apply, rule, target=target)) for name, rule in RULES]


def _apply(rule: Rule, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    with target:
        return rule(function, target)
