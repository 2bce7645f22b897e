"""Programs that pass tensors of given sizes, to measure links over the real runtime."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvm import relax

from relay_passes.ir import new_function
from relay_passes.one_at_a_time import one_at_a_time
from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.stage import StageCompiler

BUSY_INPUT = (1, 256)
"""Shape of a tensor of 1 kB: fast to transfer, and expanded to a matrix that fits a core's second-level cache."""


class ProbePrograms:
    """Compiles pass-through stages for any processor of an architecture, once per architecture and pair of sizes."""

    def __init__(
        self, architectures: Mapping[str, str], gpus: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    ) -> None:
        """``architectures`` by machine, as reported (``x86_64``); ``gpus`` are targets of machines with GPUs."""
        self._architectures = architectures
        self._gpus = gpus
        self._blobs = BlobFolder.temporary()
        self._libraries: dict[tuple[str | int, ...], BlobSpec] = {}

    def blob_path(self, sha256: str) -> Path:
        return self._blobs.path(sha256)

    def chain(self, machines: Sequence[str], sizes_bytes: Sequence[int], *, on_gpus: bool = False) -> Program:
        """Return a program from the client over the machines and back.

        ``sizes_bytes`` are the sizes of the tensors before, between and after the machines.

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
        """Return a program that computes ``products`` matrix products in sequence, with a small tensor in and out."""
        rows = [TensorSpec(f"row {place}", BUSY_INPUT, "float32") for place in range(2)]
        return _chained("compute", [machine], rows, [self._library(self._compile_busy, machine, products)], "cpu")

    @one_at_a_time  # links are probed in several threads
    def _library(
        self, compile_stage: Callable[..., BlobSpec], machine: str, *amounts: int, on_gpu: bool = False
    ) -> BlobSpec:
        target = dict(self._gpus[machine]) if on_gpu else _cpu_target(self._architectures[machine])
        key: tuple[str | int, ...] = (compile_stage.__name__, repr(sorted(target.items())), *amounts)
        if key not in self._libraries:
            self._libraries[key] = compile_stage(target, *amounts)
        return self._libraries[key]

    def _compile_busy(self, target: Mapping[str, Any], products: int) -> BlobSpec:
        """Compile a stage that expands a row to a matrix, multiplies it repeatedly, and returns its first row."""

        def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
            matrix = value = builder.emit(relax.op.broadcast_to(row, (BUSY_INPUT[1], BUSY_INPUT[1])))
            for _ in range(products):
                value = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(value, matrix))))
            return [builder.emit(relax.op.strided_slice(value, [0], [0], [1]))]

        row = relax.Var("row", relax.TensorType(BUSY_INPUT, "float32"))
        return self._build([row], emit, target)

    def _compile(self, target: Mapping[str, Any], input_bytes: int, output_bytes: int) -> BlobSpec:
        """Compile a stage that returns the first bytes of its input, or its first byte repeated: minimal compute.

        The bytes are inverted, because otherwise a result of equal size would be a view, which the runtime copies.
        """
        tensor = relax.Var("tensor", relax.TensorType((input_bytes,), "uint8"))

        def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
            first = builder.emit(
                relax.op.strided_slice(tensor, [0], [0], [output_bytes if input_bytes >= output_bytes else 1])
            )
            value = (
                first if input_bytes >= output_bytes else builder.emit(relax.op.broadcast_to(first, (output_bytes,)))
            )
            return [builder.emit(relax.op.bitwise_not(value))]

        return self._build([tensor], emit, target)

    def _build(
        self,
        parameters: Sequence[relax.Var],
        emit: Callable[[relax.BlockBuilder], list[relax.Expr]],
        target: Mapping[str, Any],
    ) -> BlobSpec:
        with ScratchFolder("build") as folder:
            library, compiler = folder.path / "pass.so", StageCompiler(target)
            scheduled = compiler.lower(new_function("probe", parameters, emit))["schedule"]
            compiler.build(scheduled, library, "the stage of a probe")
            return self._blobs.add_file(library)


def _cpu_target(architecture: str) -> dict[str, Any]:
    target: dict[str, Any] = {"kind": "llvm", "num-cores": 1}
    if architecture != platform.machine():
        target["mtriple"] = f"{architecture}-linux-gnu"
    return target


def _chained(
    name: str, machines: Sequence[str], tensors: Sequence[TensorSpec], libraries: Sequence[BlobSpec], device: str
) -> Program:
    """Return a program with one stage per machine, from its library, between each tensor and the next."""
    stages = tuple(
        StageSpec(place, f"{name} {place}", machine, (), device, library, (), (tensors[place],), (tensors[place + 1],))
        for place, (machine, library) in enumerate(zip(machines, libraries, strict=True))
    )
    return Program((tensors[0],), (tensors[-1],), stages)
