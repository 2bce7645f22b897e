"""Kernels that are to be timed one by one, and what was found. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from rpc_runtime.program.program import BlobSpec, TensorSpec

MAXIMUM_LIMIT_SECONDS = 600.0
NETWORK = "main"
"""A function of this name is a network: it calls kernels of its library, and returns its results."""


@dataclass(frozen=True)
class TimedKernel:
    """A function of a library, which takes tensors and writes the last ``results`` of them.

    ``weights`` are the positions of the arguments that are weights: they are other memory on every call, as they are in
    a network, where the rest of the weights is read before a kernel meets its own again.
    """

    function: str
    arguments: tuple[TensorSpec, ...]
    weights: frozenset[int]
    results: int

    @property
    def size_bytes(self) -> int:
        return sum(argument.size_bytes for argument in self.arguments)


@dataclass(frozen=True)
class KernelSet:
    """Kernels of one library for ``device`` (``"cpu"`` or ``"cuda"``), timed in turns in this order.

    ``weight_bytes`` is how much weight memory is gone through before the same weights are used again: that of the whole
    model, so that they are as cold, or as warm, as when it runs. ``target`` says, for messages, what the library was
    compiled for.
    """

    machine: str
    device: str
    library: BlobSpec
    kernels: tuple[TimedKernel, ...]
    weight_bytes: int
    target: str = ""


@dataclass(frozen=True)
class TimingEffort:
    """At least so many rounds over all kernels and at least so long, but no more than ``limit_seconds``."""

    minimum_rounds: int = 7
    minimum_seconds: float = 0.5
    limit_seconds: float = 60.0


@dataclass(frozen=True)
class KernelTime:
    """Seconds of one call while nothing else runs, from ``rounds`` calls; after an ``error`` both numbers are 0."""

    function: str
    seconds: float
    rounds: int
    error: str = ""
