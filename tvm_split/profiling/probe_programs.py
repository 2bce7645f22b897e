"""Programs that pass tensors of given sizes, to measure links over the real runtime."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvm import relax

from relay_passes.ir import new_function
from relay_passes.one_at_a_time import one_at_a_time
from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.build_cache import BlobFolder
from tvm_split.compiler.stage import StageCompiler


class ProbePrograms:
    """Compiles pass-through stages for any processor of an architecture, once per architecture and pair of sizes."""

    def __init__(
        self, architectures: Mapping[str, str], gpus: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    ) -> None:
        """``architectures`` by machine, as reported (``x86_64``); ``gpus`` are targets of machines with GPUs."""
        self._architectures = architectures
        self._gpus = gpus
        self._blobs = BlobFolder.temporary()
        self._libraries: dict[tuple[str, int, int], BlobSpec] = {}

    def blob_path(self, sha256: str) -> Path:
        return self._blobs.path(sha256)

    def chain(self, machines: Sequence[str], sizes_bytes: Sequence[int], *, on_gpus: bool = False) -> Program:
        """Return a program from the client over the machines and back.

        ``sizes_bytes`` are the sizes of the tensors before, between and after the machines.

        Raises:
            CompileError: there is no linker here for a machine's architecture, or no code can be made for its GPU.
        """
        tensors = [TensorSpec(f"tensor {place}", (size,), "uint8") for place, size in enumerate(sizes_bytes)]
        stages = tuple(
            StageSpec(
                place,
                f"pass {place}",
                machine,
                (),
                "cuda" if on_gpus else "cpu",
                self._library(machine, *sizes_bytes[place : place + 2], on_gpu=on_gpus),
                (),
                (tensors[place],),
                (tensors[place + 1],),
            )
            for place, machine in enumerate(machines)
        )
        return Program((tensors[0],), (tensors[-1],), stages)

    @one_at_a_time  # links are probed in several threads
    def _library(self, machine: str, input_bytes: int, output_bytes: int, *, on_gpu: bool) -> BlobSpec:
        target = dict(self._gpus[machine]) if on_gpu else _cpu_target(self._architectures[machine])
        key = (repr(sorted(target.items())), input_bytes, output_bytes)
        if key not in self._libraries:
            with ScratchFolder("build") as folder:
                library, compiler = folder.path / "pass.so", StageCompiler(target)
                scheduled = compiler.lower(_passing(input_bytes, output_bytes))["schedule"]
                compiler.build(scheduled, library, "the stage of a probe")
                self._libraries[key] = self._blobs.add_file(library)
        return self._libraries[key]


def _passing(input_bytes: int, output_bytes: int) -> relax.Function:
    """Return a function that returns the first bytes of its input, or its first byte repeated, all inverted.

    The bytes are inverted, because otherwise a result of equal size would be a view, which the runtime copies.
    """
    tensor = relax.Var("tensor", relax.TensorType((input_bytes,), "uint8"))

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        count = output_bytes if input_bytes >= output_bytes else 1
        passed = builder.emit(relax.op.strided_slice(tensor, [0], [0], [count]))
        if count < output_bytes:
            passed = builder.emit(relax.op.broadcast_to(passed, (output_bytes,)))
        return [builder.emit(relax.op.bitwise_not(passed))]

    return new_function("probe", [tensor], emit)


def _cpu_target(architecture: str) -> dict[str, Any]:
    target: dict[str, Any] = {"kind": "llvm", "num-cores": 1}
    if architecture != platform.machine():
        target["mtriple"] = f"{architecture}-linux-gnu"
    return target
