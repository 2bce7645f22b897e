"""Makes small programs of compiled Relax functions, with their libraries and weights as blobs."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec, WeightSpec

Body = Callable[..., Sequence[Any]]


class ProgramMaker:
    """Collects inputs and stages; its blobs are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.inputs: list[TensorSpec] = []
        self.stages: list[StageSpec] = []

    def input(self, name: str, shape: Sequence[int] = (2, 8), dtype: str = "float32") -> TensorSpec:
        spec = TensorSpec(name, tuple(shape), dtype)
        self.inputs.append(spec)
        return spec

    def stage(
        self,
        name: str,
        machine: str,
        inputs: Sequence[TensorSpec],
        body: Body,
        outputs: Sequence[str] = (),
        weights: Mapping[str, np.ndarray] | None = None,
        device: str = "cpu",
    ) -> Any:
        """Add a stage; return its only output, or a tuple of all. The default names are ``<stage>.0``, ``<stage>.1``,
        ….
        """
        arrays = dict(weights or {})
        weight_tensors = [TensorSpec(f"{name}.{key}", value.shape, value.dtype.name) for key, value in arrays.items()]
        library, types = self._compile([*inputs, *weight_tensors], body)
        names = outputs or [f"{name}.{index}" for index in range(len(types))]
        output_specs = tuple(TensorSpec(n, shape, dtype) for n, (shape, dtype) in zip(names, types, strict=True))
        weight_specs = tuple(
            WeightSpec(tensor, self.weight_blob(array))
            for tensor, array in zip(weight_tensors, arrays.values(), strict=True)
        )
        self.stages.append(
            StageSpec(
                len({stage.name for stage in self.stages}),
                name,
                machine,
                (name,),
                device,
                library,
                weight_specs,
                tuple(inputs),
                output_specs,
            )
        )
        return output_specs if len(output_specs) != 1 else output_specs[0]

    def replicate(self, machines: Sequence[str], schedule: Sequence[int]) -> None:
        """Replicate the last stage on all of these machines, with this round-robin schedule."""
        stage = self.stages.pop()
        self.stages += [
            replace(stage, machine=machine, replica=replica, replica_schedule=tuple(schedule))
            for replica, machine in enumerate(machines)
        ]

    def program(self, outputs: Sequence[TensorSpec]) -> Program:
        return Program(tuple(self.inputs), tuple(outputs), tuple(self.stages))

    def blob_path(self, sha256: str) -> Path:
        return self.folder / sha256

    def blob(self, content: bytes) -> BlobSpec:
        digest = hashlib.sha256(content).hexdigest()
        self.blob_path(digest).write_bytes(content)
        return BlobSpec(digest, len(content))

    def weight_blob(self, array: np.ndarray) -> BlobSpec:
        return self.blob(array.tobytes())

    def _compile(self, tensors: Sequence[TensorSpec], body: Body) -> tuple[BlobSpec, list[tuple[tuple[int, ...], str]]]:
        builder = relax.BlockBuilder()
        variables = [
            relax.Var(f"v{i}", relax.TensorType(tensor.shape, tensor.dtype)) for i, tensor in enumerate(tensors)
        ]
        with builder.function("main", variables):
            with builder.dataflow():
                results = [builder.emit(value) for value in body(*variables)]
                output = builder.emit_output(relax.Tuple(results))
            builder.emit_func_output(output)
        types = [(tuple(int(n) for n in r.ty.shape), str(r.ty.dtype)) for r in results]
        return self.blob(_library(tvm.ir.save_json(builder.get()))), types


@cache
def _library(module: str) -> bytes:
    """Return the shared library of a module; cached, because many tests use the same one."""
    target = tvm.target.Target("llvm")
    with target, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        relax.build(tvm.ir.load_json(module), target).export_library(str(path))
        return path.read_bytes()
