"""A whole model's kernels for one target: what is timed on the machines of that target."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
from tvm import relax, tirx

import schedules
from relay_passes.contract import main_function
from rpc_runtime.program.kernel_times import TimedKernel
from rpc_runtime.program.program import BlobSpec
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.build import build_kernels, schedule_stage
from tvm_split.measuring.kernel_calls import (
    KernelCall,
    is_safe_to_time,
    kernel_calls,
    shared_weight_bytes,
)
from tvm_split.model import Model

SYMBOL_LETTERS = 24


@dataclass(frozen=True)
class TargetCode:
    """The calls of some stages, in their order, and one function for each distinct kernel, by digest.

    ``weight_bytes`` are those that a machine holds which computes them.
    """

    target: Mapping[str, Any]
    calls: tuple[KernelCall, ...]
    functions: Mapping[str, tirx.PrimFunc]
    weight_bytes: int

    @cached_property
    def distinct(self) -> dict[str, KernelCall]:
        """The first call of every kernel, by digest, in the order of the model."""
        found: dict[str, KernelCall] = {}
        for call in self.calls:
            found.setdefault(call.digest, call)
        return found

    @cached_property
    def untimeable(self) -> frozenset[str]:
        """Digests of the kernels that may not be run on made-up values."""
        return frozenset(digest for digest, function in self.functions.items() if not is_safe_to_time(function))

    @property
    def device(self) -> str:
        return "cuda" if self.target["kind"] == "cuda" else "cpu"

    def build(self, digests: Collection[str], blobs: BlobFolder) -> BlobSpec:
        """A library of some of the kernels."""
        wanted = {symbol(digest): self.functions[digest] for digest in self.distinct if digest in digests}
        return library_of(wanted, self.target, blobs, f"the library of {len(wanted)} kernels to time")

    def timed(self, digest: str) -> TimedKernel:
        call = self.distinct[digest]
        return TimedKernel(symbol(digest), call.arguments, call.weight_positions, call.results)


def target_code(model: Model, target: Mapping[str, Any], database: schedules.TunedKernels | None) -> TargetCode:
    """Schedule a whole model for a target, as `tvm_split.compile` would as a single stage."""
    calls, functions = scheduled_calls(main_function(model.module), target, model.layers, database)
    return TargetCode(target, calls, functions, shared_weight_bytes(calls))


def scheduled_calls(
    function: relax.Function,
    target: Mapping[str, Any],
    layers: Mapping[str, str],
    database: schedules.TunedKernels | None,
) -> tuple[tuple[KernelCall, ...], dict[str, tirx.PrimFunc]]:
    """What a stage's function calls once it is scheduled for a target, and the distinct kernels by digest."""
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    scheduled = schedule_stage(module, target, layers, database)
    calls = kernel_calls(scheduled.module, scheduled.kernels)
    return calls, {call.digest: scheduled.module[call.kernel.function] for call in calls}


def symbol(digest: str) -> str:
    """The name of a kernel in a library that is made to time it."""
    return f"kernel_{digest[:SYMBOL_LETTERS]}"


def library_of(
    functions: Mapping[str, tirx.PrimFunc], target: Mapping[str, Any], blobs: BlobFolder, name: str
) -> BlobSpec:
    """The functions compiled and linked under their names; ``name`` is for errors."""
    with ScratchFolder("build") as folder:
        path = folder.path / "kernels.so"
        build_kernels(functions, target, path, name)
        return blobs.add_file(path)
