"""Programs that do nothing but pass tensors of given sizes: what links are measured with, over the real runtime."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm import relax

from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.build import build_module

BUSY_INPUT = (1, 256)
"""A kilobyte, which travels as fast as a tensor can, and makes a matrix that lies in a core's second-level cache."""


class ProbePrograms:
    """Compiles pass-through stages, each once per architecture and pair of sizes, for any processor of it."""

    def __init__(
        self, architectures: Mapping[str, str], gpus: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    ) -> None:
        """``architectures`` by machine, as the workers say: ``x86_64``; ``gpus`` are targets of those that have one."""
        self._architectures = architectures
        self._gpus = gpus
        self._blobs = BlobFolder.temporary()
        self._libraries: dict[tuple[str | int, ...], BlobSpec] = {}

    def blob_path(self, sha256: str) -> Path:
        return self._blobs.path(sha256)

    def chain(self, machines: Sequence[str], sizes_bytes: Sequence[int], *, on_gpus: bool = False) -> Program:
        """From the client over the machines and back, with tensors of ``sizes_bytes`` before, between and after them.

        Raises:
            CompileError: there is no linker here for a machine's architecture, or no code can be made for its GPU.
        """
        tensors = [TensorSpec(f"tensor {place}", (size,), "uint8") for place, size in enumerate(sizes_bytes)]
        libraries = [
            self._library(self._compile, machine, *sizes_bytes[place : place + 2], on_gpu=on_gpus)
            for place, machine in enumerate(machines)
        ]
        return _chained("pass", machines, tensors, libraries, "cuda" if on_gpus else "cpu")

    def busy(self, machine: str, products: int) -> Program:
        """A small tensor in and out, and in between so many matrix products one after the other."""
        rows = [TensorSpec(f"row {place}", BUSY_INPUT, "float32") for place in range(2)]
        return _chained("compute", [machine], rows, [self._library(self._compile_busy, machine, products)], "cpu")

    def reading(self, machines: Sequence[str], edge: int) -> Program:
        """One stage after the other that multiplies a row with weights of its own, square matrices with that ``edge``.

        Where a machine is named several times it has several of the stages.
        """
        rows = [TensorSpec(f"row {place}", (1, edge), "float32") for place in range(len(machines) + 1)]
        libraries = [self._library(self._compile_reading, machine, edge) for machine in machines]
        program = _chained("read", machines, rows, libraries, "cpu")
        weights = [np.full((edge, edge), place + 1, np.float32) for place in range(len(machines))]
        stages = [
            replace(stage, weights=(self._blobs.add_weight("weight", tvm.runtime.tensor(weight)),))
            for stage, weight in zip(program.stages, weights, strict=True)
        ]
        return replace(program, stages=tuple(stages))

    def _library(
        self, compile_stage: Callable[..., BlobSpec], machine: str, *amounts: int, on_gpu: bool = False
    ) -> BlobSpec:
        target = dict(self._gpus[machine]) if on_gpu else _cpu_target(self._architectures[machine])
        key: tuple[str | int, ...] = (compile_stage.__name__, repr(sorted(target.items())), *amounts)
        if key not in self._libraries:
            self._libraries[key] = compile_stage(target, *amounts)
        return self._libraries[key]

    def _compile_busy(self, target: Mapping[str, Any], products: int) -> BlobSpec:
        """A row made into a matrix, which is multiplied again and again, and of the last the first row."""
        builder = relax.BlockBuilder()
        row = relax.Var("row", relax.TensorType(BUSY_INPUT, "float32"))
        with builder.function("main", [row]):
            with builder.dataflow():
                matrix = builder.emit(relax.op.broadcast_to(row, (BUSY_INPUT[1], BUSY_INPUT[1])))
                value = matrix
                for _ in range(products):
                    value = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(value, matrix))))
                first = builder.emit(relax.op.strided_slice(value, [0], [0], [1]))
                result = builder.emit_output(relax.Tuple([first]))
            builder.emit_func_output(result)
        return self._build(builder, target)

    def _compile_reading(self, target: Mapping[str, Any], edge: int) -> BlobSpec:
        builder = relax.BlockBuilder()
        row, weight = (
            relax.Var(name, relax.TensorType(shape, "float32"))
            for name, shape in (("row", (1, edge)), ("weight", (edge, edge)))
        )
        with builder.function("main", [row, weight]):
            with builder.dataflow():
                result = builder.emit_output(relax.Tuple([builder.emit(relax.op.matmul(row, weight))]))
            builder.emit_func_output(result)
        return self._build(builder, target)

    def _compile(self, target: Mapping[str, Any], taken: int, made: int) -> BlobSpec:
        """The first bytes of what comes in, or its first byte again and again: no more work than writing the result.

        Each inverted, or as many bytes would be a view, which the runtime copies, as it does nothing that is computed.
        """
        builder = relax.BlockBuilder()
        tensor = relax.Var("tensor", relax.TensorType((taken,), "uint8"))
        with builder.function("main", [tensor]):
            with builder.dataflow():
                first = builder.emit(relax.op.strided_slice(tensor, [0], [0], [made if taken >= made else 1]))
                value = first if taken >= made else builder.emit(relax.op.broadcast_to(first, (made,)))
                result = builder.emit_output(relax.Tuple([builder.emit(relax.op.bitwise_not(value))]))
            builder.emit_func_output(result)
        return self._build(builder, target)

    def _build(self, builder: relax.BlockBuilder, target: Mapping[str, Any]) -> BlobSpec:
        with ScratchFolder("build") as folder:
            built = build_module(builder.get(), target, folder.path / "pass.so", "probing a link")
            return self._blobs.add_file(built.library)


def _cpu_target(architecture: str) -> dict[str, Any]:
    target: dict[str, Any] = {"kind": "llvm", "num-cores": 1}
    if architecture != platform.machine():
        target["mtriple"] = f"{architecture}-linux-gnu"
    return target


def _chained(
    name: str, machines: Sequence[str], tensors: Sequence[TensorSpec], libraries: Sequence[BlobSpec], device: str
) -> Program:
    """A stage on each machine, of its library, between a tensor and the next."""
    stages = tuple(
        StageSpec(place, f"{name} {place}", machine, (), device, library, (), (tensors[place],), (tensors[place + 1],))
        for place, (machine, library) in enumerate(zip(machines, libraries, strict=True))
    )
    return Program((tensors[0],), (tensors[-1],), stages)
