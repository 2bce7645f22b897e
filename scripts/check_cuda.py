"""Compile well-known networks for CUDA without a GPU, and show which rule schedules each part of them.

For every model: its kernels, those outside of threads, and per rule the number of kernels, their operations, and their
share of an estimated time (the longer of arithmetic and memory traffic on an H100; nothing is measured). Where nvcc is
found, it makes machine code of the kernels' source, and says what they take of registers and shared memory. Exits with
1 if a kernel is not bound to threads, asks for more threads, shared memory or registers than a block may have, or
spills registers, or if the fallback schedule's kernels take more than 1 % of the estimated time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import tvm
from rich.console import Console
from rich.table import Table
from tvm import tirx

import tvm_split
from tests.helpers.schedules.gpu_kernels import (
    MOST_STATIC_SHARED_BYTES,
    MOST_THREADS,
    Assembled,
    Kernel as GpuKernel,
    compile_with_nvcc,
    cuda_source,
    kernels_of,
    module_of_kernels,
    nvcc,
    plan_for_a_gpu,
    unbound_blocks,
)
from tests.models import torch_models
from tvm_split.compiler.build import build_stage
from tvm_split.compiler.kernels import Kernel
from tvm_split.compiler.placement import tvm_target
from tvm_split.compiling import cut_model
from tvm_split.planner.problem import Precision

MODELS = torch_models.published_models()
LARGEST_SLOW_SHARE = 0.01
REGISTERS = 65536
"""Of one multiprocessor, of all kinds from sm_80 on."""
# An H100 SXM: float32 outside of tensor cores (a multiply-add is two operations), and device memory.
OPERATIONS_PER_SECOND = 67e12
BYTES_PER_SECOND = 3.35e12


def estimated_seconds(kernels: Sequence[Kernel]) -> float:
    return sum(max(each.operations / OPERATIONS_PER_SECOND, each.moved_bytes / BYTES_PER_SECOND) for each in kernels)


@dataclass(frozen=True)
class Checked:
    """One model, compiled."""

    model: str
    kernels: Sequence[Kernel]
    unbound: tuple[str, ...]
    too_large: tuple[str, ...]
    most_threads: int
    most_shared_bytes: int
    assembled: Sequence[Assembled] | None
    compile_seconds: float

    @property
    def slow_share(self) -> float:
        return estimated_seconds([each for each in self.kernels if each.is_slow]) / estimated_seconds(self.kernels)

    @property
    def passes(self) -> bool:
        return not self.unbound and not self.too_large and self.slow_share <= LARGEST_SLOW_SHARE


def check(name: str, arch: str, half: bool, precision: Precision, folder: Path) -> Checked:
    build, inputs = MODELS[name]
    network = build()
    if half:
        network = network.half()
        inputs = tuple(each.half() if each.is_floating_point() else each for each in inputs)
    model = tvm_split.load_model(network, inputs, name=name)
    plan = plan_for_a_gpu(model, arch, folder, precision)
    (part,) = cut_model(model, plan).computations
    phases: dict[str, tvm.IRModule] = {}
    start = time.perf_counter()
    # Without a GPU the compiled stage cannot run, and thus not be compared with its source.
    built = build_stage(
        part, plan.machine("gpu").target, folder / f"{name}.so", model.layers, observe=phases.__setitem__
    )
    seconds = time.perf_counter() - start
    scheduled = phases["schedule"]
    unbound = tuple(
        f"{variable.name_hint}: {', '.join(blocks)}"
        for variable, function in scheduled.functions_items()
        if isinstance(function, tirx.PrimFunc) and (blocks := unbound_blocks(function))
    )
    target = tvm_target(plan.machine("gpu").target)
    with target:
        source = cuda_source(tvm.compile(module_of_kernels(scheduled), target=target))
    kernels = kernels_of(source)
    assembled = compile_with_nvcc(source, arch, folder) if nvcc() is not None else None
    return Checked(
        model=name,
        kernels=built.kernels,
        unbound=unbound,
        too_large=tuple(wrong for kernel in kernels for wrong in excesses(kernel, assembled or ())),
        most_threads=max(kernel.threads for kernel in kernels),
        most_shared_bytes=max(kernel.shared_bytes for kernel in kernels),
        assembled=assembled,
        compile_seconds=seconds,
    )


def excesses(kernel: GpuKernel, assembled: Sequence[Assembled]) -> Iterator[str]:
    """What a kernel takes that a block may not have, and what of its values left the registers."""
    if kernel.threads > MOST_THREADS:
        yield f"{kernel.name}: {kernel.threads} threads, a block has at most {MOST_THREADS}"
    if kernel.shared_bytes > MOST_STATIC_SHARED_BYTES:
        yield f"{kernel.name}: {kernel.shared_bytes} bytes of shared memory, at most {MOST_STATIC_SHARED_BYTES}"
    for each in assembled:
        if each.name != kernel.name:
            continue
        if each.spilled_bytes:
            yield f"{kernel.name}: {each.spilled_bytes} bytes of a thread's registers spilled"
        if each.registers * kernel.threads > REGISTERS:
            yield f"{kernel.name}: {kernel.threads} threads of {each.registers} registers, there are {REGISTERS}"


def show(checked: Checked, console: Console) -> None:
    by_rule: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in checked.kernels:
        by_rule[kernel.rule].append(kernel)
    table = Table("rule", "calls", "mega-operations", "share of estimated time")
    for rule, kernels in sorted(by_rule.items(), key=lambda item: -estimated_seconds(item[1])):
        operations = sum(each.operations for each in kernels)
        share = estimated_seconds(kernels) / estimated_seconds(checked.kernels)
        table.add_row(rule, str(len(kernels)), f"{operations / 1e6:.1f}", f"{share:.2%}")
    console.print(
        f"{checked.model}: {len(checked.kernels)} kernel calls, unbound = {len(checked.unbound)}, "
        f"fallback {checked.slow_share:.2%}, "
        f"at most {checked.most_threads} threads and {checked.most_shared_bytes} bytes of static shared memory, "
        f"{_of_assembler(checked)}, "
        f"compiled in {checked.compile_seconds:.1f} s"
    )
    console.print(table)
    for problem in (*checked.unbound, *checked.too_large):
        console.print(f"  wrong: {problem}")


def _of_assembler(checked: Checked) -> str:
    if not checked.assembled:
        return "nvcc: not here"
    registers, shared, spilled = (
        max(getattr(each, number) for each in checked.assembled)
        for number in ("registers", "shared_bytes", "spilled_bytes")
    )
    return f"machine code with at most {registers} registers, {shared} bytes of shared memory, {spilled} bytes spilled"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--arch", default="sm_90", help="sm_90 by default")
    parser.add_argument("--half", action="store_true", help="networks in float16")
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="float32", help="of operands: see docs/gpu.md"
    )
    arguments = parser.parse_args()
    console = Console()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models or MODELS:
            results.append(check(name, arguments.arch, arguments.half, arguments.precision, Path(folder)))
            show(results[-1], console)
    failed = [result.model for result in results if not result.passes]
    console.print(f"{len(results)} models for {arguments.arch}: {f'failed: {failed}' if failed else 'all pass'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
