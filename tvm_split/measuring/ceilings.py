"""What a processor can do at most, measured: multiply-adds a second and bytes read a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.placement import tvm_target
from tvm_split.compiler.targets import host_target
from tvm_split.errors import ProfileError
from tvm_split.measuring.kernel_calls import kernel_digest
from tvm_split.measuring.target_code import library_of, symbol
from tvm_split.rpc_runtime.execution.in_process_kernels import InProcessKernels
from tvm_split.rpc_runtime.program.kernel_times import KernelSet, KernelTime, TimedKernel, TimingEffort
from tvm_split.rpc_runtime.program.program import BlobSpec, TensorSpec
from tvm_split.schedules.ceilings import CeilingKernel, memory_read_kernel, multiply_add_kernel

EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.0)


@dataclass(frozen=True)
class Ceilings:
    """Of float32 operations (a multiplication and an addition are two) and of reading memory."""

    operations_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class CeilingCode:
    """The two kernels whose rates no other exceeds, by digest: first multiply-adds, then reading."""

    target: Mapping[str, Any]
    kernels: Mapping[str, CeilingKernel]

    def build(self, blobs: BlobFolder) -> BlobSpec:
        named = {symbol(digest): kernel.function for digest, kernel in self.kernels.items()}
        return library_of(named, self.target, blobs, "the library of the machine's ceilings")

    def kernel_set(self, machine: str, library: BlobSpec) -> KernelSet:
        return KernelSet(machine, "cpu", library, tuple(map(_timed, self.kernels, self.kernels.values())), 0)

    def ceilings(self, best_seconds: Mapping[str, float]) -> Ceilings:
        """From the best time of each kernel, by digest: whatever disturbs a run makes it slower."""
        return Ceilings(*(kernel.amount / best_seconds[digest] for digest, kernel in self.kernels.items()))


def ceiling_code(target: Mapping[str, Any], threads: int) -> CeilingCode:
    """The kernels for a CPU's target; for GPUs there are none."""
    built_for = tvm_target(target)
    made = (multiply_add_kernel(built_for, threads), memory_read_kernel(built_for, threads))
    return CeilingCode(target, {kernel_digest(kernel.function): kernel for kernel in made})


def measure_ceilings(threads: int) -> Ceilings:
    """Those of this machine, with ``threads`` threads.

    Raises:
        ProfileError: the kernels do not run here.
    """
    code, blobs = ceiling_code(host_target(threads), threads), BlobFolder.temporary()
    times = time_here(code.kernel_set("here", code.build(blobs)), blobs, threads, EFFORT)
    return code.ceilings(dict(zip(code.kernels, (each.best_seconds for each in times), strict=True)))


def time_here(kernels: KernelSet, blobs: BlobFolder, threads: int, effort: TimingEffort) -> tuple[KernelTime, ...]:
    """Times of kernels in this process; raises a ProfileError if one of them has none."""
    with InProcessKernels(threads) as session:
        session.load(kernels, blobs.path)
        times = session.measure(effort)
    for each in times:
        if each.error:
            raise ProfileError(f"{each.function} cannot be timed on this machine: {each.error}")
    return times


def _timed(digest: str, kernel: CeilingKernel) -> TimedKernel:
    arguments = tuple(TensorSpec("", shape, "float32") for shape in (kernel.input_shape, kernel.output_shape))
    return TimedKernel(symbol(digest), arguments, frozenset(), 1)
