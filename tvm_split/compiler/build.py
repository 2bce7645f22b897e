"""Build one stage: from its pure function to a shared library and prepacked weights."""

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
    """A stage's library file, its weights in the order of the function's last parameters, and its kernels.

    ``cuda`` is what a stage for a GPU needs there, and None for others.
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
    """Optimise, compile and link one stage for a target, with the kernels that ``database`` has tuned.

    ``layers`` gives the source's name for each variable.

    Raises:
        CompileError: the stage has what TVM cannot compile, or the target cannot be compiled for, or has no linker.
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
    """The same for a module whose ``main`` may call functions of the module; errors call it ``name``."""
    with _compiling(name, target) as built_for:
        module, phases = _scheduled(module, built_for, database, observe)
        lifted = lift_weights(module)
        _export(code_of(lifted.module, built_for), target, library, name)
    return BuiltStage(library, lifted.weights, kernels_of(phases, layers or {}), needs_of(target))


def code_of(module: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Machine code for a module of which ``main`` is called: it alone checks what it is given.

    Kernels would check again what ``main`` hands on to them, in half of all code and a quarter of the time to make it.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        return relax.build(module, target)


def _scheduled(
    module: tvm.IRModule,
    target: tvm.target.Target,
    database: schedules.TunedKernels | None,
    observe: Observer | None,
) -> tuple[tvm.IRModule, dict[str, tvm.IRModule]]:
    """The module with scheduled kernels, and what it was after each phase."""
    phases: dict[str, tvm.IRModule] = {}

    def remember(name: str, after: tvm.IRModule) -> None:
        phases[name] = after
        if observe is not None:
            observe(name, after)

    return run_phases(module, stage_phases(_schedules(target, database)), remember), phases


@dataclass(frozen=True)
class ScheduledStage:
    """A stage with scheduled kernels, before any code is made: ``main`` still has its weights."""

    module: tvm.IRModule
    kernels: tuple[Kernel, ...]


def schedule_stage(
    module: tvm.IRModule,
    target: Mapping[str, Any],
    layers: Mapping[str, str],
    database: schedules.TunedKernels | None = None,
) -> ScheduledStage:
    """``main`` of a module as `build_module` would compile it, as far as its kernels are decided."""
    built_for = tvm_target(target)
    with built_for:
        scheduled, phases = _scheduled(module, built_for, database, None)
    return ScheduledStage(scheduled, kernels_of(phases, layers))


def build_kernels(functions: Mapping[str, tirx.PrimFunc], target: Mapping[str, Any], library: Path, name: str) -> None:
    """Compile scheduled kernels into a library that has each under its key; errors call it ``name``.

    Raises:
        CompileError: the target cannot be compiled for, or there is no linker for it.
    """
    named = {symbol: function.with_attr("global_symbol", symbol) for symbol, function in functions.items()}
    with _compiling(name, target) as built_for:
        _export(tvm.tirx.build(tvm.IRModule(named), built_for), target, library, name)


def build_scheduled(module: tvm.IRModule, target: Mapping[str, Any], library: Path, name: str) -> None:
    """The same of a module of which ``main`` is a network of its kernels."""
    with _compiling(name, target) as built_for:
        _export(code_of(module, built_for), target, library, name)


@contextmanager
def _compiling(name: str, target: Mapping[str, Any]) -> Iterator[tvm.target.Target]:
    """Inside, a target is TVM's current one, and what fails is a `CompileError` that calls it ``name``."""
    built_for = tvm_target(target)
    try:
        with built_for, machine_code(target):
            yield built_for
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"{name} cannot be compiled for {dict(target)}: {last_line(error)}") from error


def laid_out_stage(computation: Computation, target: tvm.target.Target) -> tvm.IRModule:
    """One stage as far as its layouts are chosen."""
    with target:
        return run_phases(_module_of(computation), up_to_layouts(_schedules(target, None)))


def unscheduled_stage(computation: Computation, target: tvm.target.Target) -> tvm.IRModule:
    """One stage as far as the phase before scheduling: what tuning starts from."""
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
    """The command that links for a target of another architecture than this host's; None for this host's.

    Raises:
        CompileError: there is none here.
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
    """Link a library. What TVM writes on the way lies beside it, so that it goes with the folder whatever happens."""
    with tempfile.TemporaryDirectory(dir=library.parent) as objects:
        module.export_library(str(library), workspace_dir=objects, **_linker(target, name))


def _linker(target: Mapping[str, Any], stage: str) -> dict[str, Callable[..., None]]:
    """What ``export_library`` needs to link for another architecture; nothing for this host's."""
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
    """A command that links for another architecture's Linux: a cross gcc, or zig from the extra ``cross``."""
    compiler = shutil.which(f"{architecture}-linux-gnu-gcc")
    if compiler is not None:
        return [compiler]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu"]
    return None
