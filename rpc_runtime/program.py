"""What is deployed: tensors, stages and how tensors flow between them, without a word about how it was compiled.

A *program* is a directed acyclic graph of stages. Tensors have names that are unique in the program; a stage lists
the tensors it takes and the tensors it makes, and every route follows from these lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

CLIENT = "client"
"""The name that stands for the client wherever a machine's name could stand; no machine may take it."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (elements per axis) and dtype (numpy's name) of a dense, row-major tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class BlobSpec:
    """A file of ``size_bytes`` bytes, known by the SHA-256 of its content (lowercase hexadecimal)."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class WeightSpec:
    """One weight of a stage: a blob in safetensors format that holds exactly one tensor, named ``weight``."""

    tensor: TensorSpec
    blob: BlobSpec


@dataclass(frozen=True)
class StageSpec:
    """One stage as it is deployed.

    ``library`` is a shared library whose function ``main(*inputs, *weights)`` returns a tuple with one tensor per
    entry of ``outputs``, in order, whatever their number. ``device`` is ``"cpu"`` or ``"cuda"``.
    """

    index: int
    name: str
    machine: str
    layers: tuple[str, ...]
    device: str
    library: BlobSpec
    weights: tuple[WeightSpec, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def blobs(self) -> tuple[BlobSpec, ...]:
        """The library and every weight, each digest once."""
        return tuple({blob.sha256: blob for blob in (self.library, *(w.blob for w in self.weights))}.values())


@dataclass(frozen=True)
class Route:
    """A tensor that goes from one machine (or the client) to another (or the client), once per micro-batch."""

    tensor: TensorSpec
    source: str
    destination: str


@dataclass(frozen=True)
class Program:
    """Stages in topological order, and the model's own inputs and outputs.

    ``outputs`` may name a model input (it never leaves the client) or any stage's output, also several times.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    stages: tuple[StageSpec, ...]

    @property
    def machines(self) -> tuple[str, ...]:
        """Machines that hold a stage, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.machine for stage in self.stages))

    def stages_on(self, machine: str) -> tuple[StageSpec, ...]:
        return tuple(stage for stage in self.stages if stage.machine == machine)

    @cached_property
    def producers(self) -> dict[str, StageSpec | None]:
        """Tensor name to the stage that makes it; None for the model's inputs."""
        made: dict[str, StageSpec | None] = {tensor.name: None for tensor in self.inputs}
        for stage in self.stages:
            for tensor in stage.outputs:
                if tensor.name in made:
                    raise ValueError(f"tensor {tensor.name!r} is made twice; the second time by stage {stage.name!r}")
                made[tensor.name] = stage
        return made

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Every transfer of one micro-batch: each tensor once per machine that needs it and does not make it."""
        found: dict[tuple[str, str], Route] = {}
        for tensor, destination in self._uses():
            producer = self.producers[tensor.name]
            source = CLIENT if producer is None else producer.machine
            if source != destination:
                found.setdefault((tensor.name, destination), Route(tensor, source, destination))
        return tuple(found.values())

    def _uses(self) -> Iterator[tuple[TensorSpec, str]]:
        for stage in self.stages:
            for tensor in stage.inputs:
                yield tensor, stage.machine
        for tensor in self.outputs:
            yield tensor, CLIENT

    @cached_property
    def depths(self) -> dict[str, int]:
        """Stage name to its depth: 1 if it needs only model inputs, else one more than its deepest producer."""
        depths: dict[str, int] = {}
        for stage in self.stages:
            before = [self.producers[tensor.name] for tensor in stage.inputs]
            depths[stage.name] = 1 + max((depths[p.name] for p in before if p is not None), default=0)
        return depths
