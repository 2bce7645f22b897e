"""Kernels for a worker to time, as they are asked for, and times that it may find."""

from __future__ import annotations

from rpc_runtime.program.kernel_times import KernelTime, TimedKernel
from rpc_runtime.program.program import TensorSpec


def f32(*shape: int) -> TensorSpec:
    return TensorSpec("", shape, "float32")


KERNELS = (
    TimedKernel("product", (f32(4, 16), f32(16, 8), f32(4, 8)), frozenset({1}), 1),
    TimedKernel("lookup", (f32(5, 8), TensorSpec("", (3,), "int64"), f32(3, 8)), frozenset({0}), 1),
)


def timed(function: str, seconds: float, best_seconds: float, rounds: int = 2) -> KernelTime:
    return KernelTime(function, seconds, best_seconds, rounds)


def turns_of(*seconds: float) -> list[tuple[KernelTime, ...]]:
    """A convolution in so many seconds, and a ReLU in a tenth of it."""
    return [(timed("convolution", each, each), timed("relu", each / 10, each / 10)) for each in seconds]
