"""Specifications of tensors, blobs, weights and stages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

from rpc_runtime.program.round_robin import Recurrence, micro_batches_of

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape (elements per axis) and dtype (numpy's name) of a dense, row-major tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class BlobSpec:
    """A file of ``size_bytes`` bytes, identified by the SHA-256 of its content (lowercase hexadecimal)."""

    sha256: str
    size_bytes: int


NO_BLOB = BlobSpec("0" * 64, 0)
"""Placeholder for a library that a machine does not need (`Program.for_worker`)."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight of a stage: its blob holds the bytes of the tensor in C order."""

    tensor: TensorSpec
    blob: BlobSpec

    @property
    def content(self) -> tuple[str, tuple[int, ...], str]:
        """A key that is equal for all weights with equal values, shape and dtype."""
        return self.blob.sha256, self.tensor.shape, self.tensor.dtype


@dataclass(frozen=True)
class StageSpec:
    """One deployed stage, or one replica of it.

    ``library`` is a shared library whose function ``main(*inputs, *weights)`` always returns a tuple with one tensor
    per entry of ``outputs``, in order. ``device`` is ``"cpu"`` or ``"cuda"``. ``target`` is the library's target, for
    messages.

    Micro-batch ``s`` is computed by the replica whose ``replica`` is ``replica_schedule[s % len(replica_schedule)]``.
    Replicas of a stage agree in ``index``, ``name``, ``layers``, ``inputs``, ``outputs`` and ``replica_schedule``; each
    is on another machine.
    """

    index: int
    name: str
    machine: str
    layers: tuple[str, ...]
    device: str
    library: BlobSpec = field(repr=False)
    weights: tuple[WeightSpec, ...] = field(repr=False)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    replica: int = 0
    replica_schedule: tuple[int, ...] = (0,)
    target: str = ""

    @cached_property
    def micro_batches(self) -> Recurrence:
        """The micro-batches that this replica computes: all if the stage has one replica."""
        return micro_batches_of(self.replica, self.replica_schedule)

    @property
    def blobs(self) -> tuple[BlobSpec, ...]:
        """The blobs of the library and of all weights, each digest once."""
        return tuple({blob.sha256: blob for blob in (self.library, *(w.blob for w in self.weights))}.values())


def weight_bytes(stages: Iterable[StageSpec]) -> int:
    """Return the bytes of the weights of these stages on one machine; weights with equal content count once."""
    return sum({weight.content: weight.tensor.size_bytes for stage in stages for weight in stage.weights}.values())
