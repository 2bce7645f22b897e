"""Schedule every PrimFunc of a module: rules in order, the first that matches, each workload once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import tvm
from tvm import tirx
from tvm.target import Target
from tvm_ffi.structural import StructuralKey

from schedules import cpu, gpu
from schedules.blocks import has_static_shapes, last_line, without_symbol
from schedules.template import CHOICES_ATTRIBUTE
from schedules.traits import is_cpu

SCHEDULE_ATTRIBUTE = "tvm_split.schedule"
"""PrimFunc attribute: the name of the rule that scheduled it; `chosen_rules` lists them."""
UNSCHEDULED = "none"
TUNED = " (tuned)"
"""What the rule's name ends in where the choices were measured."""
IS_SCHEDULED = "tirx.is_scheduled"

logger = logging.getLogger(__name__)

NamedRule = tuple[str, Callable[[tirx.PrimFunc], tirx.PrimFunc | None]]


class TunedKernels(Protocol):
    """What tuning decided, as `schedules.tuning.TuningDatabase` knows it."""

    def kernel(self, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """The function scheduled as was decided for this target, or None where nothing was."""


def apply(module: tvm.IRModule, target: Target, database: TunedKernels | None = None) -> tvm.IRModule:
    """Every PrimFunc scheduled for ``target``, each with the attribute `SCHEDULE_ATTRIBUTE`.

    A kernel that ``database`` has measured to be faster with other choices is taken from there, and its rule is marked
    with `TUNED`.

    Requires the module after FuseTIR. Where a rule fails on a function, the next one is taken, with a warning in the
    log; a function that is scheduled already (``tirx.is_scheduled``) stays. The input module is not changed.
    """
    rules = (cpu if is_cpu(target) else gpu).rules(target)
    done: dict[StructuralKey, tirx.PrimFunc] = {}
    functions = {}
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc) and not function.attrs.get(IS_SCHEDULED, 0):
            workload = StructuralKey(without_symbol(function))
            if workload not in done:
                default = _schedule(workload.key, rules, variable.name_hint)
                done[workload] = default if database is None else _tuned(workload.key, default, target, database)
            functions[variable] = _keep_symbol(done[workload], function)
        else:
            functions[variable] = function
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def chosen_rules(module: tvm.IRModule) -> dict[str, str]:
    """The rule's name for each PrimFunc, by the function's name, in order of names."""
    return {
        variable.name_hint: str(function.attrs[SCHEDULE_ATTRIBUTE])
        for variable, function in sorted(module.functions_items(), key=lambda item: str(item[0].name_hint))
        if isinstance(function, tirx.PrimFunc) and SCHEDULE_ATTRIBUTE in function.attrs
    }


def _schedule(function: tirx.PrimFunc, rules: Sequence[NamedRule], kernel: str) -> tirx.PrimFunc:
    for name, rule in rules:
        if not has_static_shapes(function) and name != "fallback":
            continue
        try:
            scheduled = rule(function)
        except Exception as error:
            # No user's mistake: the next rule is slower, and right. But nobody should find out from the clock.
            logger.warning("%s gets a slower kernel, since the rule %s failed: %s", kernel, name, last_line(error))
            continue
        if scheduled is not None:
            return scheduled.with_attr(SCHEDULE_ATTRIBUTE, name).with_attr(IS_SCHEDULED, True)
    return function.with_attr(SCHEDULE_ATTRIBUTE, UNSCHEDULED)


def _tuned(function: tirx.PrimFunc, default: tirx.PrimFunc, target: Target, database: TunedKernels) -> tirx.PrimFunc:
    """The function as tuning decided, where that is anything else than its default."""
    choices = default.attrs.get(CHOICES_ATTRIBUTE, None)
    if choices is None:
        return default  # no template, so nothing that could be tuned
    found = database.kernel(function, target)
    if found is None or found.attrs.get(CHOICES_ATTRIBUTE, None) == choices:
        return default
    return found.with_attr(SCHEDULE_ATTRIBUTE, f"{default.attrs[SCHEDULE_ATTRIBUTE]}{TUNED}").with_attr(
        IS_SCHEDULED, True
    )


def _keep_symbol(scheduled: tirx.PrimFunc, original: tirx.PrimFunc) -> tirx.PrimFunc:
    symbol = original.attrs.get("global_symbol", None)
    if symbol is None:
        return without_symbol(scheduled)
    return scheduled.with_attr("global_symbol", symbol)
