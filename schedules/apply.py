"""Schedule every PrimFunc of a module with the first rule that matches; equal workloads are scheduled once."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import tvm
from tvm import tirx
from tvm.target import Target
from tvm_ffi.structural import StructuralKey

from schedules import cpu, gpu
from schedules.blocks import has_static_shapes, is_plain_code, last_line, without_pragma_scope, without_symbol
from schedules.template import CHOICES_ATTRIBUTE, IS_SCHEDULED, SCHEDULE_ATTRIBUTE
from schedules.traits import is_cpu

UNSCHEDULED = "none"
TUNED = " (tuned)"
"""Suffix of the rule's name where tuning measured the choices."""

logger = logging.getLogger(__name__)

NamedRule = tuple[str, Callable[[tirx.PrimFunc], tirx.PrimFunc | None]]


class TunedKernels(Protocol):
    """The interface to tuned kernels; `schedules.tuning.database.TuningDatabase` implements it."""

    def kernel(self, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the function scheduled with the choices tuned for this target, or None if there is no decision."""


def apply(
    module: tvm.IRModule,
    target: Target,
    database: TunedKernels | None = None,
    on_kernel: Callable[[int, int], None] = lambda done, kernels: None,
) -> tvm.IRModule:
    """Return the module with every PrimFunc scheduled for ``target`` and marked with `SCHEDULE_ATTRIBUTE`.

    If ``database`` has measured a kernel to be faster with other choices, the tuned kernel is used, and the rule's name
    gets the suffix `TUNED`. ``on_kernel`` is called before each function, with the number of those done and of all.

    The module must have been through FuseTIR. If a rule fails on a function, the next rule is tried, and the log gets a
    warning. Functions that are already scheduled (``tirx.is_scheduled``) are kept. The input module is not changed.
    """
    rules = (cpu if is_cpu(target) else gpu).rules(target)
    done: dict[StructuralKey, tirx.PrimFunc] = {}
    functions = dict(module.functions_items())
    kernels = [(variable, function) for variable, function in functions.items() if isinstance(function, tirx.PrimFunc)]
    for number, (variable, function) in enumerate(kernels):
        on_kernel(number, len(kernels))
        if not function.attrs.get(IS_SCHEDULED, 0):
            workload = StructuralKey(without_symbol(function))
            if workload not in done:
                default = without_pragma_scope(_schedule(workload.key, rules, variable.name_hint))
                done[workload] = default if database is None else _tuned(workload.key, default, target, database)
            scheduled, symbol = without_symbol(done[workload]), function.attrs.get("global_symbol", None)
            functions[variable] = scheduled if symbol is None else scheduled.with_attr("global_symbol", symbol)
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def chosen_rules(module: tvm.IRModule) -> dict[str, str]:
    """Return the name of the rule that scheduled each PrimFunc, by function name, in alphabetical order."""
    return {
        variable.name_hint: str(function.attrs[SCHEDULE_ATTRIBUTE])
        for variable, function in sorted(module.functions_items(), key=lambda item: str(item[0].name_hint))
        if isinstance(function, tirx.PrimFunc) and SCHEDULE_ATTRIBUTE in function.attrs
    }


def _schedule(function: tirx.PrimFunc, rules: Sequence[NamedRule], kernel: str) -> tirx.PrimFunc:
    if is_plain_code(function):
        return function.with_attr(SCHEDULE_ATTRIBUTE, UNSCHEDULED)
    for name, rule in rules:
        if not has_static_shapes(function) and name != "fallback":
            continue
        try:
            scheduled = rule(function)
        except Exception as error:
            # The user did nothing wrong. The next rule gives a correct but slower kernel, so warn about it.
            logger.warning("%s gets a slower kernel, since the rule %s failed: %s", kernel, name, last_line(error))
            continue
        if scheduled is not None:
            return scheduled.with_attr(SCHEDULE_ATTRIBUTE, name).with_attr(IS_SCHEDULED, True)
    return function.with_attr(SCHEDULE_ATTRIBUTE, UNSCHEDULED)


def _tuned(function: tirx.PrimFunc, default: tirx.PrimFunc, target: Target, database: TunedKernels) -> tirx.PrimFunc:
    """Return the tuned kernel if its choices differ from the default's; otherwise the default."""
    choices = default.attrs.get(CHOICES_ATTRIBUTE, None)
    if choices is None:
        return default  # no template, so nothing to tune
    tuned = database.kernel(function, target)
    if tuned is None or tuned.attrs.get(CHOICES_ATTRIBUTE, None) == choices:
        return default
    return tuned.with_attr(SCHEDULE_ATTRIBUTE, f"{default.attrs[SCHEDULE_ATTRIBUTE]}{TUNED}").with_attr(
        IS_SCHEDULED, True
    )
