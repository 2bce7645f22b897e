"""From operators to fast kernels, per target: layouts, lowerings and schedules; tuning is in `schedules.tuning`.

    layout_passes(target)             Relax -> Relax, before lowering: blocked channels, packed matrices, attention
    legalizations(target)             operator name -> lowering, for relax.transform.LegalizeOps
    apply(module, target, database)   every PrimFunc scheduled, after FuseTIR; tuned kernels from the database
    origins_of(function)              which variable of the module before an added one stands for
    chosen_rules(module)              which rule scheduled which PrimFunc: "fallback" and "none" are slow

Knows nothing of how a network is split, nor of where it runs.
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
    """See the targets' own."""
    return cpu.layout_passes(target) if is_cpu(target) else gpu.layout_passes(target)


def legalizations(target: Target) -> dict[str, Legalization]:
    """Own lowerings by operator name; operators that are not named keep TVM's."""
    return cpu.legalizations(target) if is_cpu(target) else gpu.legalizations(target)
