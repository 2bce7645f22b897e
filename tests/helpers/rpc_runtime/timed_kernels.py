"""Kernels for a worker to time."""

from rpc_runtime.program.measurements import TimedKernel
from rpc_runtime.program.specs import TensorSpec


def f32(*shape: int) -> TensorSpec:
    return TensorSpec("", shape, "float32")


KERNELS = (
    TimedKernel("product", (f32(4, 16), f32(16, 8), f32(4, 8)), frozenset({1}), 1),
    TimedKernel("lookup", (f32(5, 8), TensorSpec("", (3,), "int64"), f32(3, 8)), frozenset({0}), 1),
)
