"""Compile the pure function of a stage into a shared library and prepacked weights, and list its kernels."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.s_tir.analysis import estimate_tir_flops

import schedules
from relay_passes.costs import calls, size_bytes, tensors_in
from relay_passes.extern_kernels import with_extern_kernels
from relay_passes.ir import bindings_of, main_function, operator_name
from relay_passes.kernel_sources import kernel_sources
from relay_passes.lift_weights import lift_weights
from relay_passes.one_at_a_time import ONE_AT_A_TIME
from relay_passes.pipeline import stage_phases
from rpc_runtime.files import FULL
from schedules.traits import is_cpu
from tvm_split.compiler.blob_folder import no_room
from tvm_split.compiler.cuda_code import machine_code
from tvm_split.compiler.kernel_objects import kernel_objects
from tvm_split.compiler.linking import linker
from tvm_split.compiler.targets import tvm_target
from tvm_split.errors import CompileError, last_line
from tvm_split.progress import show_part
from tvm_split.units import count_text


class StageCompiler:
    """Compiles stages for one target, with the tuned kernels of ``database``.

    Raises:
        PlanError: TVM or LLVM does not accept the target.
        CompileError: of any method: TVM cannot compile for the target, or there is no linker for it.
        OutputError: the disk of temporary files is full.
    """

    def __init__(self, target: Mapping[str, Any], database: schedules.TunedKernels | None = None) -> None:
        self._target = target
        self._built_for = built_for = tvm_target(target)
        self._phases = stage_phases(
            schedules.layout_passes(built_for),
            schedules.legalizations(built_for),
            lambda module: schedules.apply(module, built_for, database, _show_scheduled),
        )

    def lower(self, function: relax.Function, *, until: str = "name") -> dict[str, tvm.IRModule]:
        """Return a stage's module after each phase up to ``until``, by the phase's name.

        ``main`` still holds the weights. Errors name the stage by the function's symbol.
        """
        module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        modules: dict[str, tvm.IRModule] = {}
        with self._compiling(str(function.attrs["global_symbol"])):
            for phase, passes in self._phases.items():
                for run_pass in passes:
                    module = run_pass(module)
                modules[phase] = module
                if phase == until:
                    break
        return modules

    def build(self, scheduled: tvm.IRModule, library: Path, name: str) -> tuple[tvm.runtime.Tensor, ...]:
        """Compile and link a module after the last phase; return the weights, which ``main`` takes after the inputs.

        ``name`` is for errors.
        """
        with self._compiling(name), linker(self._target, library, name) as link:
            lifted, weights = lift_weights(scheduled)
            if is_cpu(self._built_for):
                kernels = _kernels_in(lifted)
                libraries = link.static_libraries(kernel_objects(kernels, self._target, lambda: kernels))
                link.export(relax.build(with_extern_kernels(lifted, libraries), self._built_for))
            else:
                show_part(f"building {count_text(len(_kernels_in(lifted)), 'kernel')}", 1, 2)
                link.export(code_of(lifted, self._built_for))
        return weights

    def build_kernels(
        self, names: Collection[str], kernels: Callable[[], Mapping[str, tirx.PrimFunc]], library: Path, purpose: str
    ) -> None:
        """Compile scheduled kernels into a library that exports each under its name.

        ``kernels`` returns at least those that were not compiled before; ``purpose`` names the library in errors.
        """
        with self._compiling(purpose), linker(self._target, library, purpose) as link:
            if is_cpu(self._built_for):
                link.link(kernel_objects(names, self._target, kernels))
            else:
                functions = kernels()
                named = {name: functions[name].with_attr("global_symbol", name) for name in names}
                link.export(tvm.tirx.build(tvm.IRModule(named), self._built_for))

    def compile_until(
        self, names: Collection[str], kernels: Callable[[], Mapping[str, tirx.PrimFunc]], deadline: float
    ) -> frozenset[str]:
        """Compile kernels, the first ones first; return those that `build_kernels` need not compile after ``deadline``.

        The deadline is in seconds of `time.monotonic`. GPU kernels are compiled together, so all are returned.
        """
        if not is_cpu(self._built_for):
            return frozenset(names)
        with self._compiling("a kernel to time"):
            return frozenset(kernel_objects(names, self._target, kernels, deadline))

    @contextmanager
    def _compiling(self, name: str) -> Iterator[None]:
        """Make the target TVM's current one inside the block; turn any error into a `CompileError` about ``name``."""
        try:
            with ONE_AT_A_TIME, self._built_for, machine_code(self._target):
                yield
        except CompileError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise no_room(tempfile.gettempdir(), error) from error
            raise CompileError(f"{name} cannot be compiled for {dict(self._target)}: {last_line(error)}") from error


def _kernels_in(module: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    functions = {variable.name_hint: function for variable, function in module.functions_items()}
    return {name: function for name, function in functions.items() if isinstance(function, tirx.PrimFunc)}


def _show_scheduled(done: int, kernels: int) -> None:
    # Building, which TVM does without calling back, takes the other half of the time.
    show_part(f"{done} of {kernels} kernels scheduled", done, 2 * kernels)


def code_of(module: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Compile a module to machine code in which only ``main`` checks its arguments.

    Kernels get their arguments from ``main``. Checking them again would be half of all code and a quarter of the
    compile time.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        return relax.build(module, target)


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
        """Whether the kernel is plain loops, or a convolution that was scheduled by the rule for pooling."""
        return self.rule in SLOW_RULES or (self.rule == "pooling" and "conv" in self.function)


def kernels_of(phases: Mapping[str, tvm.IRModule], layers: Mapping[str, str]) -> tuple[Kernel, ...]:
    """List a stage's kernels from its module after each phase; ``layers`` maps variables to layers of the source."""
    works = {name: work for name, work, _ in calls(phases["simplify"])}
    operations = bindings_of(main_function(phases["simplify"]))
    dequantised = {binding.var.name for binding in operations if operator_name(binding.value) == "relax.dequantize"}
    origins = schedules.origins_of(main_function(phases["layout"]))
    sources = {
        name: tuple(dict.fromkeys(origins.get(variable, variable) for variable in behind))
        for name, behind in kernel_sources(phases["lower"], phases["group"]).items()
    }
    scheduled = phases["name"]
    rules = schedules.chosen_rules(scheduled)
    kernel_calls = {
        binding.var.name: binding.value
        for binding in bindings_of(main_function(scheduled))
        if operator_name(binding.value) == "relax.call_tir"
    }
    functions = {name: str(call.args[0].name_hint) for name, call in kernel_calls.items()}
    fused = {binding.var.name: binding.value for binding in bindings_of(main_function(phases["fuse"]))}
    computed_by: dict[str, list[str]] = {}
    for name in kernel_calls:
        for variable in sources.get(name, ()):
            computed_by.setdefault(variable, []).append(name)

    def most_work(names: Sequence[str]) -> str:
        # Padding and changes of layout map to their layer's variable too; its operations belong to one kernel.
        if len(names) == 1:
            return names[0]
        kernels = {name: phases["fuse"][fused[name].args[0]] for name in names}
        return max(names, key=lambda name: estimate_tir_flops(tvm.IRModule({"main": kernels[name]})))

    works_of: defaultdict[str, float] = defaultdict(float)
    for variable, names in computed_by.items():
        works_of[most_work(names)] += works.get(variable, 0.0)
    kernels = []
    for name, call in kernel_calls.items():
        function = functions[name]
        behind = [source for source in sources.get(name, ()) if source in layers]
        # A kernel may end by dequantising its result for the layers that read it. These are no layers of the kernel: on
        # another machine they do it themselves.
        behind = [source for source in behind if source not in dequantised] or behind
        operands = [tensor for argument in call.args[1].fields for tensor in tensors_in(argument.ty)]
        kernels.append(
            Kernel(
                function=function,
                layers=tuple(dict.fromkeys(layers[source] for source in behind)),
                rule=rules.get(function, "none"),
                choices=str(scheduled[function].attrs.get(schedules.CHOICES_ATTRIBUTE, "")),
                operations=works_of[name],
                moved_bytes=sum(size_bytes(tensor) for tensor in [*operands, *tensors_in(call.ty)]),
            )
        )
    return tuple(kernels)
