"""Turn operators into fast kernels for a target: layouts, lowerings and schedules. Tuning is in `schedules.tuning`.

    layout_passes(target)             Relax -> Relax, before lowering: blocked channels, packed matrices, attention
    legalizations(target)             operator name -> lowering, for relax.transform.LegalizeOps
    apply(module, target, database)   schedules every PrimFunc, after FuseTIR; takes tuned kernels from the database
    origins_of(function)              for each added variable, the variable of the original module it stands for
    chosen_rules(module)              the rule that scheduled each PrimFunc: "fallback" and "none" are slow
    templates_of(target)              the rules whose schedules have choices; these take machine_of(target)

This package does not know how a network is split or where it runs.
"""

from collections.abc import Callable
from typing import Any

import tvm
from tvm.target import Target

from schedules import cpu, gpu
from schedules.apply import TUNED, TunedKernels, apply, chosen_rules
from schedules.gpu.tile import Gpu, gpu_of
from schedules.relax_tools import Legalization, origins_of
from schedules.template import CHOICES_ATTRIBUTE, SCHEDULE_ATTRIBUTE, Template
from schedules.traits import Traits, is_cpu, traits_of

__all__ = [
    "CHOICES_ATTRIBUTE",
    "SCHEDULE_ATTRIBUTE",
    "TUNED",
    "TunedKernels",
    "apply",
    "chosen_rules",
    "layout_passes",
    "legalizations",
    "machine_of",
    "origins_of",
    "templates_of",
]


def layout_passes(target: Target) -> tuple[Callable[[tvm.IRModule], tvm.IRModule], ...]:
    """Return the passes to run before lowering, in order; the target's package (`cpu` or `gpu`) lists them."""
    return cpu.layout_passes(target) if is_cpu(target) else gpu.layout_passes(target)


def legalizations(target: Target) -> dict[str, Legalization]:
    """Return this package's lowerings by operator name; TVM lowers all other operators."""
    return cpu.legalizations(target) if is_cpu(target) else gpu.legalizations(target)


def templates_of(target: Target) -> tuple[Template[Any], ...]:
    """Return the templates for CPUs if the target is one, else those for GPUs."""
    return cpu.TEMPLATES if is_cpu(target) else gpu.TEMPLATES


def machine_of(target: Target) -> Traits | Gpu:
    """Return the description of a target's machine, which its templates take besides a function."""
    return traits_of(target) if is_cpu(target) else gpu_of(target)
