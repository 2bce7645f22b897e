"""TIR -> fast TIR: layouts, lowerings and schedules per target; tuning is in `schedules.tuning`.

    convert_layouts(module, target)   Relax -> Relax, before lowering: blocked channels, packed matrices
    legalizations(target)             operator name -> lowering, for relax.transform.LegalizeOps
    apply(module, target, database)   every PrimFunc scheduled, after FuseTIR; tuned kernels from the database
    origins_of(function)              which variable of the module before an added one stands for
    chosen_rules(module)              which rule scheduled which PrimFunc: "fallback" and "none" are slow

Knows nothing of how a network is split, nor of where it runs.
"""

from __future__ import annotations

from tvm_split.schedules.apply import SCHEDULE_ATTRIBUTE, TUNED, TunedKernels, apply, chosen_rules
from tvm_split.schedules.layouts import convert_layouts
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
    "convert_layouts",
    "legalizations",
    "origins_of",
]
