"""Compile the pure function of a stage into a shared library and prepacked weights, and list its kernels."""

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.support.cc import get_cc

import schedules
from relay_passes.costs import calls, size_bytes, tensors_in
from relay_passes.ir import bindings_of, main_function, operator_name
from relay_passes.kernel_sources import kernel_sources
from relay_passes.lift_weights import lift_weights
from relay_passes.one_at_a_time import ONE_AT_A_TIME
from relay_passes.pipeline import stage_phases
from tvm_split.compiler.cuda_code import machine_code
from tvm_split.compiler.targets import cpu_part, tvm_target
from tvm_split.errors import CompileError, last_line
from tvm_split.progress import show_part
from tvm_split.units import bytes_text, count_text

LARGEST_OBJECT_BYTES = 64 * 1024 * 1024
"""The file size that a compilation may need: several times the largest object file of a stage, without weights."""
BUILT_TOGETHER = 8
"""The number of kernels per module; 63 kernels take 1.1 times as long to build one by one as all together."""


class StageCompiler:
    """Compiles stages for one target, with the tuned kernels of ``database``.

    Raises:
        PlanError: TVM or LLVM does not accept the target.
        CompileError: of any method: TVM cannot compile for the target, or there is no linker for it.
    """

    def __init__(self, target: Mapping[str, Any], database: schedules.TunedKernels | None = None) -> None:
        self._target = target
        self._built_for = built_for = tvm_target(target)
        self._phases = stage_phases(
            schedules.layout_passes(built_for),
            schedules.legalizations(built_for),
            lambda module: schedules.apply(module, built_for, database, _show_scheduled),
        )

    def lower(self, function: relax.Function, *, until: str = "schedule") -> dict[str, tvm.IRModule]:
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
        with self._compiling(name):
            lifted, weights = lift_weights(scheduled)
            show_part(f"building {count_text(len(lifted.get_global_vars()) - 1, 'kernel')}", 1, 2)
            self._export(code_of(lifted, self._built_for), library, name)
        return weights

    def build_kernels(self, functions: Mapping[str, tirx.PrimFunc], library: Path, name: str) -> None:
        """Compile scheduled kernels into a library that exports each under its key; ``name`` is for errors."""
        named = {symbol: function.with_attr("global_symbol", symbol) for symbol, function in functions.items()}
        with self._compiling(name):
            modules = self._built(named)
            for module in modules[1:]:
                modules[0].import_module(module)
            self._export(modules[0], library, name, len(modules))

    def _built(self, functions: Mapping[str, tirx.PrimFunc]) -> list[Any]:
        """Return compiled modules of `BUILT_TOGETHER` kernels each, and show the progress after each module.

        GPU kernels are one module, as their library has one file of device code.
        """
        symbols, modules = list(functions), []
        size = BUILT_TOGETHER if self._built_for.kind.name == "llvm" else len(symbols)
        for first in range(0, len(symbols), size):
            show_part(f"{first} of {len(symbols)} kernels built", len(symbols) + first, 2 * len(symbols))
            group = {symbol: functions[symbol] for symbol in symbols[first : first + size]}
            modules.append(tvm.tirx.build(tvm.IRModule(group), self._built_for))
        return modules

    @contextmanager
    def _compiling(self, name: str) -> Iterator[None]:
        """Make the target TVM's current one inside the block; turn any error into a `CompileError` about ``name``."""
        try:
            with ONE_AT_A_TIME, self._built_for, machine_code(self._target):
                yield
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(f"{name} cannot be compiled for {dict(self._target)}: {last_line(error)}") from error

    def _export(self, module: Any, library: Path, name: str, modules: int = 1) -> None:
        """Link a library. Temporary files lie in its folder, so they are removed with it even after a crash.

        ``modules`` is the number of modules of machine code.
        """
        command = link_command(self._target, name) or [get_cc()]

        def link(output: str, objects: Sequence[str], options: Sequence[str] = ()) -> None:
            arguments = [*command, "-shared", "-fPIC", "-o", output, *objects, *options]
            result = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603
            if result.returncode != 0:
                reason = "; ".join(result.stderr.split("\n")).strip("; ")
                raise CompileError(f"linking {name} in {library.parent} with {command[0]} failed: {reason}")

        _require_large_files(name)
        with _objects_in_memory(library.parent, modules) as objects:
            module.export_library(str(library), fcompile=link, workspace_dir=objects)


def _show_scheduled(done: int, kernels: int) -> None:
    # Building, which TVM does without calling back, takes the other half of the time.
    show_part(f"{done} of {kernels} kernels scheduled", done, 2 * kernels)


def _require_large_files(name: str) -> None:
    """Raise a `CompileError` if the limit on file sizes, also in memory, is below `LARGEST_OBJECT_BYTES`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < LARGEST_OBJECT_BYTES:
        raise CompileError(
            f"{name} cannot be compiled where files are limited to {bytes_text(limit)}, since object files may have "
            f"{bytes_text(LARGEST_OBJECT_BYTES)}: raise the limit (ulimit -f)"
        )


@contextmanager
def _objects_in_memory(parent: Path, modules: int) -> Iterator[str]:
    """Yield a folder in which TVM's object files link to memory: LLVM ends the process if a disk is full."""
    with tempfile.TemporaryDirectory(dir=parent) as folder, ExitStack() as files:
        for name in (*(f"lib{number}.o" for number in range(modules)), "devc.o"):
            descriptor = os.memfd_create(name)
            files.callback(os.close, descriptor)
            (Path(folder) / name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield folder


def code_of(module: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Compile a module to machine code in which only ``main`` checks its arguments.

    Kernels get their arguments from ``main``. Checking them again would be half of all code and a quarter of the
    compile time.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        return relax.build(module, target)


def link_command(target: Mapping[str, Any], purpose: str) -> list[str] | None:
    """Return the command that links for a target's architecture; None for this host's own architecture.

    Raises:
        CompileError: this host has no linker for the architecture.
    """
    architecture = str(cpu_part(target).get("mtriple", "")).partition("-")[0]
    if architecture in ("", str(tvm.target.codegen.llvm_get_system_triple()).partition("-")[0]):
        return None
    command = _cross_linker(architecture)
    if command is None:
        raise CompileError(
            f"{purpose} is for {architecture}, and no linker for it is here; install the extra tvm-split[cross], or "
            f"a compiler named {architecture}-linux-gnu-gcc"
        )
    return command


def _cross_linker(architecture: str) -> list[str] | None:
    """Return a command that links for Linux on another architecture: a cross gcc, or zig from the extra ``cross``."""
    compiler = shutil.which(f"{architecture}-linux-gnu-gcc")
    if compiler is not None:
        return [compiler]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu"]
    return None


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
