"""List the kernels of a compiled stage in the order of their calls, each with its layers and its schedule rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm.s_tir.analysis import estimate_tir_flops

import schedules
from relay_passes.ir import bindings_of, main_function, operator_name
from relay_passes.kernel_sources import kernel_sources
from tvm_split.compiler.describe import calls, size_bytes, tensors_in

SLOW_RULES = ("fallback", "none")
"""Rules that leave a kernel as plain loops, which are correct but slow."""


@dataclass(frozen=True)
class Kernel:
    """One call of a compiled function.

    ``function`` is its symbol in the library; equal kernels share it. ``layers`` are the source's names of the layers
    that it computes, empty for a change of layout. ``rule`` is the schedule rule, and ``choices`` its parameters
    (``tile=14x2 unroll=4``), which tuning may have measured. ``operations`` counts the operations by the layers'
    definition (a multiplication and an addition are two), independent of the algorithm; ``moved_bytes`` counts every
    operand and result once.
    """

    function: str
    layers: tuple[str, ...]
    rule: str
    choices: str
    operations: float
    moved_bytes: int

    @property
    def is_slow(self) -> bool:
        return self.rule in SLOW_RULES


def kernels_of(phases: Mapping[str, tvm.IRModule], layers: Mapping[str, str]) -> tuple[Kernel, ...]:
    """List a stage's kernels from its module after each phase; ``layers`` maps variables to layers of the source."""
    works = {name: work for name, work, _ in calls(phases["simplify"])}
    origins = schedules.origins_of(main_function(phases["layout"]))
    sources = {
        name: tuple(dict.fromkeys(origins.get(variable, variable) for variable in behind))
        for name, behind in kernel_sources(phases["lower"], phases["group"]).items()
    }
    scheduled = phases["schedule"]
    rules = schedules.chosen_rules(scheduled)
    kernel_calls = {
        binding.var.name: binding.value
        for binding in bindings_of(main_function(scheduled))
        if operator_name(binding.value) == "relax.call_tir"
    }
    functions = {name: str(call.args[0].name_hint) for name, call in kernel_calls.items()}
    computed_by: dict[str, list[str]] = {}
    for name in kernel_calls:
        for variable in sources.get(name, ()):
            computed_by.setdefault(variable, []).append(name)

    def most_work(names: Sequence[str]) -> str:
        # Padding and changes of layout map to their layer's variable too; its operations belong to one kernel.
        if len(names) == 1:
            return names[0]
        return max(names, key=lambda name: estimate_tir_flops(tvm.IRModule({"main": phases["fuse"][functions[name]]})))

    works_of: defaultdict[str, float] = defaultdict(float)
    for variable, names in computed_by.items():
        works_of[most_work(names)] += works.get(variable, 0.0)
    kernels = []
    for name, call in kernel_calls.items():
        function = functions[name]
        operands = [tensor for argument in call.args[1].fields for tensor in tensors_in(argument.ty)]
        kernels.append(
            Kernel(
                function=function,
                layers=tuple(dict.fromkeys(layers[behind] for behind in sources.get(name, ()) if behind in layers)),
                rule=rules.get(function, "none"),
                choices=str(scheduled[function].attrs.get(schedules.CHOICES_ATTRIBUTE, "")),
                operations=works_of[name],
                moved_bytes=sum(size_bytes(tensor) for tensor in [*operands, *tensors_in(call.ty)]),
            )
        )
    return tuple(kernels)
