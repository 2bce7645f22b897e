"""From operators to fast kernels, per target: layouts, lowerings and schedules; tuning is in `schedules.tuning`.

    layout_passes(target)             Relax -> Relax, before lowering: blocked channels, packed matrices
    legalizations(target)             operator name -> lowering, for relax.transform.LegalizeOps
    apply(module, target, database)   every PrimFunc scheduled, after FuseTIR; tuned kernels from the database
    origins_of(function)              which variable of the module before an added one stands for
    chosen_rules(module)              which rule scheduled which PrimFunc: "fallback" and "none" are slow

Knows nothing of how a network is split, nor of where it runs.
"""

from __future__ import annotations

from tvm_split.schedules.apply import SCHEDULE_ATTRIBUTE, TUNED, TunedKernels, apply, chosen_rules
from tvm_split.schedules.layouts import layout_passes
from tvm_split.schedules.legalize import legalizations
from tvm_split.schedules.module_mutator import origins_of
from tvm_split.schedules.template import CHOICES_ATTRIBUTE

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
