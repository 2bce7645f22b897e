"""Build one stage: from its pure function to a shared library and prepacked weights."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

import schedules
from relay_passes.communication import Computation
from relay_passes.lift_weights import lift_weights
from relay_passes.pipeline import Observer, Schedules, run_phases, stage_phases
from tvm_split.errors import CompileError
from tvm_split.planner.planning import tvm_target


@dataclass(frozen=True)
class BuiltStage:
    """A stage's library file, its weights in the order of the function's last parameters, and its kernels' names.

    ``tuned`` has the choices of those kernels that a tuning database decided.
    """

    library: Path
    weights: tuple[tvm.runtime.Tensor, ...]
    kernels: tuple[str, ...]
    tuned: Mapping[str, str]


def build_stage(
    computation: Computation,
    target: Mapping[str, Any],
    library: Path,
    observe: Observer | None = None,
    database: schedules.TunedKernels | None = None,
) -> BuiltStage:
    """Optimise, compile and link one stage for a target, with the kernels that ``database`` has tuned.

    Raises:
        CompileError: the target cannot be compiled for, or there is no linker for it.
    """
    built_for = tvm_target(target)
    with built_for:
        module = tvm.IRModule({"main": computation.function.with_attr("global_symbol", "main")})
        module = run_phases(module, stage_phases(_schedules(built_for, database)), observe)
        lifted = lift_weights(module)
        try:
            executable = relax.build(lifted.module, built_for)
            executable.export_library(str(library), **_linker(target, computation.name))
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(f"{computation.name} cannot be compiled for {dict(target)}: {error}") from error
    return BuiltStage(library, lifted.weights, _kernel_names(lifted.module), _tuned_choices(lifted.module))


def unscheduled_stage(computation: Computation, target: tvm.target.Target) -> tvm.IRModule:
    """One stage as far as the phase before scheduling: what tuning starts from."""
    with target:
        module = tvm.IRModule({"main": computation.function.with_attr("global_symbol", "main")})
        return run_phases(module, stage_phases(_schedules(target, None))[:-1])


def _schedules(target: tvm.target.Target, database: schedules.TunedKernels | None) -> Schedules:
    return Schedules(
        convert_layouts=lambda module: schedules.convert_layouts(module, target),
        legalizations=schedules.legalizations(target),
        schedule=lambda module: schedules.apply(module, target, database),
    )


def _kernel_names(module: tvm.IRModule) -> tuple[str, ...]:
    return tuple(
        sorted(
            variable.name_hint
            for variable, function in module.functions_items()
            if isinstance(function, tvm.tirx.PrimFunc)
        )
    )


def _tuned_choices(module: tvm.IRModule) -> dict[str, str]:
    return {
        variable.name_hint: str(function.attrs[schedules.CHOICES_ATTRIBUTE])
        for variable, function in module.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
        and str(function.attrs.get(schedules.SCHEDULE_ATTRIBUTE, "")).endswith(schedules.TUNED)
    }


def link_command(target: Mapping[str, Any], purpose: str) -> list[str] | None:
    """The command that links for a target of another architecture than this host's; None for this host's.

    Raises:
        CompileError: there is none here.
    """
    host = target.get("host") if target["kind"] != "llvm" else target
    triple = str(host.get("mtriple", "")) if isinstance(host, Mapping) else ""
    architecture = triple.partition("-")[0]
    if not architecture or architecture == _own_architecture():
        return None
    command = _cross_linker(architecture)
    if command is None:
        raise CompileError(
            f"{purpose} is for {architecture}, and no linker for it is here; install the extra tvm-split[cross], or "
            f"a compiler named {architecture}-linux-gnu-gcc"
        )
    return command


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


def _own_architecture() -> str:
    return str(tvm.target.codegen.llvm_get_system_triple()).partition("-")[0]
