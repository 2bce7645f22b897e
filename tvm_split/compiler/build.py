"""Build one stage: compile its pure function into a shared library and prepacked weights."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

import schedules
from relay_passes.lift_weights import lift_weights
from relay_passes.partition import Computation
from relay_passes.pipeline import Observer, Schedules, run_phases, stage_phases, up_to_layouts
from tvm_split.compiler.cuda_code import CudaNeeds, machine_code, needs_of
from tvm_split.compiler.instruction_sets import cpu_part
from tvm_split.compiler.kernels import Kernel, kernels_of
from tvm_split.compiler.placement import tvm_target
from tvm_split.errors import CompileError, last_line


@dataclass(frozen=True)
class BuiltStage:
    """A compiled stage: its library file, weights and kernels.

    ``weights`` are in the order of the function's last parameters. ``cuda`` is what a GPU stage needs of its worker;
    None for other stages.
    """

    library: Path
    weights: tuple[tvm.runtime.Tensor, ...]
    kernels: tuple[Kernel, ...]
    cuda: CudaNeeds | None = None


def build_stage(
    computation: Computation,
    target: Mapping[str, Any],
    library: Path,
    layers: Mapping[str, str] | None = None,
    database: schedules.TunedKernels | None = None,
    observe: Observer | None = None,
) -> BuiltStage:
    """Optimise, compile and link one stage for a target, with the tuned kernels of ``database``.

    ``layers`` maps each variable to the name of its layer in the source.

    Raises:
        CompileError: TVM cannot compile the stage or the target, or there is no linker for the target.
    """
    layers = layers or {}
    other_forms = {form: layers[name] for form, name in computation.origins.items() if name in layers}
    named = {**layers, **other_forms}
    return build_module(_module_of(computation), target, library, computation.name, named, database, observe)


def build_module(
    module: tvm.IRModule,
    target: Mapping[str, Any],
    library: Path,
    name: str,
    layers: Mapping[str, str] | None = None,
    database: schedules.TunedKernels | None = None,
    observe: Observer | None = None,
) -> BuiltStage:
    """Build a module like `build_stage`; its ``main`` may call functions of the module. ``name`` is for errors."""
    with _compiling(name, target) as built_for:
        module, phases = _scheduled(module, built_for, database, observe)
        lifted = lift_weights(module)
        _export(code_of(lifted.module, built_for), target, library, name)
    return BuiltStage(library, lifted.weights, kernels_of(phases, layers or {}), needs_of(target))


def code_of(module: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Compile a module to machine code in which only ``main`` checks its arguments.

    Kernels get their arguments from ``main``. Checking them again would be half of all code and a quarter of the
    compile time.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        return relax.build(module, target)


def _scheduled(
    module: tvm.IRModule,
    target: tvm.target.Target,
    database: schedules.TunedKernels | None,
    observe: Observer | None,
) -> tuple[tvm.IRModule, dict[str, tvm.IRModule]]:
    """Return the module with scheduled kernels, and the module after each phase, by the phase's name."""
    phases: dict[str, tvm.IRModule] = {}

    def remember(name: str, after: tvm.IRModule) -> None:
        phases[name] = after
        if observe is not None:
            observe(name, after)

    return run_phases(module, stage_phases(_schedules(target, database)), remember), phases


@dataclass(frozen=True)
class ScheduledStage:
    """A stage with scheduled kernels, before code generation: ``main`` still contains the weights."""

    module: tvm.IRModule
    kernels: tuple[Kernel, ...]


def schedule_stage(
    module: tvm.IRModule,
    target: Mapping[str, Any],
    layers: Mapping[str, str],
    database: schedules.TunedKernels | None = None,
) -> ScheduledStage:
    """Optimise and schedule a module like `build_module`, without generating code."""
    built_for = tvm_target(target)
    with built_for:
        scheduled, phases = _scheduled(module, built_for, database, None)
    return ScheduledStage(scheduled, kernels_of(phases, layers))


def build_kernels(functions: Mapping[str, tirx.PrimFunc], target: Mapping[str, Any], library: Path, name: str) -> None:
    """Compile scheduled kernels into a library that exports each under its key; ``name`` is for errors.

    Raises:
        CompileError: TVM cannot compile for the target, or there is no linker for it.
    """
    named = {symbol: function.with_attr("global_symbol", symbol) for symbol, function in functions.items()}
    with _compiling(name, target) as built_for:
        _export(tvm.tirx.build(tvm.IRModule(named), built_for), target, library, name)


def build_scheduled(module: tvm.IRModule, target: Mapping[str, Any], library: Path, name: str) -> None:
    """Compile a scheduled module, whose ``main`` calls its kernels, into a library; ``name`` is for errors."""
    with _compiling(name, target) as built_for:
        _export(code_of(module, built_for), target, library, name)


@contextmanager
def _compiling(name: str, target: Mapping[str, Any]) -> Iterator[tvm.target.Target]:
    """Make a target TVM's current one inside the block; turn any error into a `CompileError` about ``name``."""
    built_for = tvm_target(target)
    try:
        with built_for, machine_code(target):
            yield built_for
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"{name} cannot be compiled for {dict(target)}: {last_line(error)}") from error


def laid_out_stage(computation: Computation, target: tvm.target.Target) -> tvm.IRModule:
    """Run a stage's phases up to the choice of layouts."""
    with target:
        return run_phases(_module_of(computation), up_to_layouts(_schedules(target, None)))


def unscheduled_stage(computation: Computation, target: tvm.target.Target) -> tvm.IRModule:
    """Run all phases of a stage but the last, scheduling. Tuning starts from this module."""
    with target:
        return run_phases(_module_of(computation), stage_phases(_schedules(target, None))[:-1])


def _module_of(computation: Computation) -> tvm.IRModule:
    return tvm.IRModule({"main": computation.function.with_attr("global_symbol", "main")})


def _schedules(target: tvm.target.Target, database: schedules.TunedKernels | None) -> Schedules:
    return Schedules(
        layout_passes=schedules.layout_passes(target),
        legalizations=schedules.legalizations(target),
        schedule=lambda module: schedules.apply(module, target, database),
    )


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


def _export(module: Any, target: Mapping[str, Any], library: Path, name: str) -> None:
    """Link a library. TVM's temporary files lie in the same folder, so they are removed with it even after a crash."""
    with tempfile.TemporaryDirectory(dir=library.parent) as objects:
        module.export_library(str(library), workspace_dir=objects, **_linker(target, name))


def _linker(target: Mapping[str, Any], stage: str) -> dict[str, Callable[..., None]]:
    """Return the arguments by which ``export_library`` links for another architecture; none for this host's."""
    command = link_command(target, stage)
    if command is None:
        return {}

    def link(output: str, objects: str | Sequence[str], options: Sequence[str] | None = None) -> None:
        files = [objects] if isinstance(objects, str) else list(objects)
        arguments = [*command, "-shared", "-fPIC", "-o", output, *files, *(options or ())]
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode != 0:
            raise CompileError(f"linking {stage} with {command[0]} failed: {result.stderr.strip()}")

    return {"fcompile": link}


def _cross_linker(architecture: str) -> list[str] | None:
    """Return a command that links for Linux on another architecture: a cross gcc, or zig from the extra ``cross``."""
    compiler = shutil.which(f"{architecture}-linux-gnu-gcc")
    if compiler is not None:
        return [compiler]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu"]
    return None
