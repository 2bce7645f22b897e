"""Turn operators into fast kernels for a target: layouts, lowerings and schedules. Tuning is in `schedules.tuning`.

    layout_passes(target)             Relax -> Relax, before lowering: blocked channels, packed matrices, attention
    legalizations(target)             operator name -> lowering, for relax.transform.LegalizeOps
    apply(module, target, database)   schedules every PrimFunc, after FuseTIR; takes tuned kernels from the database
    origins_of(function)              for each added variable, the variable of the original module it stands for
    chosen_rules(module)              the rule that scheduled each PrimFunc: "fallback" and "none" are slow

This package does not know how a network is split or where it runs.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm.target import Target

from schedules import cpu, gpu
from schedules.apply import SCHEDULE_ATTRIBUTE, TUNED, TunedKernels, apply, chosen_rules
from schedules.expressions import Legalization
from schedules.module_mutator import origins_of
from schedules.template import CHOICES_ATTRIBUTE
from schedules.traits import is_cpu

__all__ = [
    "CHOICES_ATTRIBUTE",
    "SCHEDULE_ATTRIBUTE",
    "TUNED",
    "TunedKernels",
    "apply",
    "chosen_rules",
    "layout_passes",
    "legalizations",
    "origins_of",
]


def layout_passes(target: Target) -> tuple[Callable[[tvm.IRModule], tvm.IRModule], ...]:
    """The passes to run before lowering, in order; the target's package (`cpu` or `gpu`) lists them."""
    return cpu.layout_passes(target) if is_cpu(target) else gpu.layout_passes(target)


def legalizations(target: Target) -> dict[str, Legalization]:
    """This package's lowerings by operator name; TVM lowers all other operators."""
    return cpu.legalizations(target) if is_cpu(target) else gpu.legalizations(target)
