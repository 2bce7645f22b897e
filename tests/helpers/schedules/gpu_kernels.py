"""Checks of CUDA kernels that need no GPU, on the scheduled functions and on their source."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tvm
from hypothesis import strategies as st
from tvm import tirx
from tvm.target import Target

import tvm_split
from rpc_runtime.execution.cuda_code import find_nvcc
from tvm_split.placement.problem import Precision

MOST_THREADS = 1024
MOST_STATIC_SHARED_BYTES = 48 * 1024


def cuda_source(executable: Any) -> str:
    """The CUDA source of everything in a built module; empty where it has no kernel."""
    return "".join(_sources(executable.mod))


def _sources(module: Any) -> Iterator[str]:
    for imported in module.imports:
        if imported.kind == "cuda":
            yield imported.inspect_source("cuda")
        yield from _sources(imported)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a source: threads a block, and bytes of shared memory a block that are declared in it."""

    name: str
    threads: int
    shared_bytes: int


BYTES = {"float": 4, "half": 2, "__half": 2, "double": 8, "int": 4, "int64_t": 8, "uint": 4, "bool": 1, "int8_t": 1}
BYTES |= {"signed char": 1, "nv_bfloat16": 2, "uchar": 1}


def kernels_of(source: str) -> list[Kernel]:
    """Every kernel that is defined in a CUDA source; raises where it has none."""
    heads = list(re.finditer(r"__global__ void __launch_bounds__\((\d+)\) (\w+)\([^)]*\) \{", source))
    if not heads:
        raise ValueError("the source defines no kernel")
    ends = [head.start() for head in heads[1:]] + [len(source)]
    return [
        Kernel(head.group(2), int(head.group(1)), _shared_bytes(source[head.end() : end]))
        for head, end in zip(heads, ends, strict=True)
    ]


def _shared_bytes(body: str) -> int:
    total = 0
    declared = body.count("__shared__")
    for kind, lanes, count in re.findall(rf"__shared__ alignas\(\d+\) ({'|'.join(BYTES)})(\d?) \w+\[(\d+)\]", body):
        total += BYTES[kind] * int(lanes or 1) * int(count)
        declared -= 1
    if declared:
        raise ValueError(f"{declared} declarations of shared memory have types that are not known here")
    return total


def nvcc() -> str | None:
    path = find_nvcc()
    return None if path is None else str(path)


@dataclass(frozen=True)
class Assembled:
    """The assembler's report on one kernel: registers per thread, shared memory per block, spills per thread."""

    name: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def compile_with_nvcc(source: str, arch: str, folder: Path) -> list[Assembled]:
    """The kernels of a source as machine code for ``arch``; raises where nvcc does not take it."""
    path = folder / "kernels.cu"
    path.write_text(source)
    command = [
        str(nvcc()),
        "-O3",
        f"-arch={arch}",
        "--ptxas-options=-v",
        "-cubin",
        "-o",
        str(path) + ".cubin",
        str(path),
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [_assembled(*fields) for fields in _ENTRY.findall(report)]


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '\w+'\n(.*?Used \d+ registers[^\n]*)", re.DOTALL)


def _assembled(name: str, report: str) -> Assembled:
    def number(pattern: str) -> int:
        return sum(int(count) for count in re.findall(pattern, report))

    # Loads may be more than stores: what is spilled once is read in a loop.
    return Assembled(
        name, number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), number(r"(\d+) bytes spill stores")
    )


def plan_for_a_gpu(model: tvm_split.Model, arch: str, folder: Path, precision: Precision = "float32") -> tvm_split.Plan:
    """The whole model as one stage on a machine with a GPU, which is never contacted."""
    path = folder / "cluster.yaml"
    target = {"kind": "cuda", "arch": arch}
    path.write_text(json.dumps({"machines": [{"name": "gpu", "address": "192.0.2.1:7001", "target": target}]}))
    return tvm_split.plan(model, tvm_split.Cluster.from_yaml(path), stages=1, precision=precision)


def module_of_kernels(lowered: tvm.IRModule) -> tvm.IRModule:
    """Only the PrimFuncs, under their own names."""
    return tvm.IRModule(
        {
            variable: function.with_attr("global_symbol", variable.name_hint)
            for variable, function in lowered.functions_items()
            if isinstance(function, tirx.PrimFunc)
        }
    )


def cuda(arch: str) -> Target:
    return Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        },
        host={"kind": "llvm"},
    )


HALVES = {"float16": 1e-3, "bfloat16": 8e-3}
"""Tolerances where operands are rounded, and sums are not."""
halves = st.sampled_from(sorted(HALVES))
needs_headers = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA")


def slow(*cases):
    """Parameters that only `make test-more` runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
