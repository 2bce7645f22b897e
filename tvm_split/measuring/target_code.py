"""A whole model's kernels for one target: what is timed on the machines of that target."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
from tvm import tirx

from tvm_split import schedules
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.build import build_kernels, schedule_stage
from tvm_split.compiler.placement import tvm_target
from tvm_split.measuring.kernel_calls import (
    KernelCall,
    is_safe_to_time,
    kernel_calls,
    kernel_digest,
    shared_weight_bytes,
)
from tvm_split.model import Model
from tvm_split.relay_passes.contract import main_function
from tvm_split.rpc_runtime.program.kernel_times import TimedKernel
from tvm_split.rpc_runtime.program.program import BlobSpec, TensorSpec
from tvm_split.rpc_runtime.scratch import ScratchFolder
from tvm_split.schedules.ceilings import memory_read_kernel, multiply_add_kernel

SYMBOL_LETTERS = 24


@dataclass(frozen=True)
class TargetCode:
    """The calls of a model as a single stage, in their order, and one function for each distinct kernel, by digest."""

    target: Mapping[str, Any]
    calls: tuple[KernelCall, ...]
    functions: Mapping[str, tirx.PrimFunc]

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

    @cached_property
    def weight_bytes(self) -> int:
        return shared_weight_bytes(self.calls)

    @property
    def device(self) -> str:
        return "cuda" if self.target["kind"] == "cuda" else "cpu"

    def build(self, digests: Collection[str], blobs: BlobFolder) -> BlobSpec:
        """A library of some of the kernels."""
        wanted = {symbol(digest): self.functions[digest] for digest in self.distinct if digest in digests}
        return _library(wanted, self.target, blobs, f"the library of {len(wanted)} kernels to time")

    def timed(self, digest: str) -> TimedKernel:
        call = self.distinct[digest]
        return TimedKernel(symbol(digest), call.arguments, call.weight_positions, call.results)


def target_code(model: Model, target: Mapping[str, Any], database: schedules.TunedKernels | None) -> TargetCode:
    """Schedule a whole model for a target, as `tvm_split.compile` would as a single stage."""
    module = tvm.IRModule({"main": main_function(model.module).with_attr("global_symbol", "main")})
    scheduled = schedule_stage(module, target, model.layers, database)
    calls = kernel_calls(scheduled.module, scheduled.kernels)
    return TargetCode(target, calls, {call.digest: scheduled.module[call.kernel.function] for call in calls})


def symbol(digest: str) -> str:
    """The name of a kernel in a library that is made to time it."""
    return f"kernel_{digest[:SYMBOL_LETTERS]}"


@dataclass(frozen=True)
class CeilingCode:
    """The two kernels whose rates no other exceeds; ``amounts`` by digest: operations, or bytes read, of one call."""

    target: Mapping[str, Any]
    functions: Mapping[str, tirx.PrimFunc]
    kernels: Mapping[str, TimedKernel]
    amounts: Mapping[str, float]

    @property
    def operations(self) -> str:
        """The digest of the kernel that multiplies and adds."""
        return next(iter(self.functions))

    @property
    def bytes(self) -> str:
        """The digest of the kernel that reads memory."""
        return list(self.functions)[1]

    def build(self, blobs: BlobFolder) -> BlobSpec:
        named = {symbol(digest): function for digest, function in self.functions.items()}
        return _library(named, self.target, blobs, "the library of the machine's ceilings")


def ceiling_code(target: Mapping[str, Any], threads: int) -> CeilingCode | None:
    """The kernels for a CPU's target; None for a GPU, for which there are none."""
    if target["kind"] == "cuda":
        return None
    built_for = tvm_target(target)
    made = (multiply_add_kernel(built_for, threads), memory_read_kernel(built_for, threads))
    digests = [kernel_digest(kernel.function) for kernel in made]
    return CeilingCode(
        target,
        {digest: kernel.function for digest, kernel in zip(digests, made, strict=True)},
        {
            digest: TimedKernel(
                symbol(digest),
                (TensorSpec("", kernel.input_shape, "float32"), TensorSpec("", kernel.output_shape, "float32")),
                frozenset(),
                1,
            )
            for digest, kernel in zip(digests, made, strict=True)
        },
        {digest: kernel.amount for digest, kernel in zip(digests, made, strict=True)},
    )


def _library(
    functions: Mapping[str, tirx.PrimFunc], target: Mapping[str, Any], blobs: BlobFolder, name: str
) -> BlobSpec:
    with ScratchFolder("build") as folder:
        path = folder.path / "kernels.so"
        build_kernels(functions, target, path, name)
        return blobs.add_file(path)
