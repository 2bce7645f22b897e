"""What a device can do at most, measured there: multiply-adds a second, and bytes of its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tvm_split.profiling.peaks import measure_ceilings

SIDE = 8192
"""Of square matrices: a multiplication of 1.1e12 operations, of which a GPU's units cannot do more at once."""
COPIED_BYTES = 1 << 30
ROUNDS = 7


@dataclass(frozen=True)
class Limits:
    """Operations (a multiplication and an addition are two) by dtype, and bytes read and written."""

    operations_per_second: dict[str, float]
    bytes_per_second: float

    def share(self, operations: float, moved_bytes: float, seconds: float, dtype: str) -> float:
        """Of its roofline: the time that a kernel would take at the limits, of the time that it took."""
        peak = self.operations_per_second.get(dtype, self.operations_per_second["float32"])
        return max(operations / peak, moved_bytes / self.bytes_per_second) / seconds


def limits_of(device: str, threads: int) -> Limits:
    """A CPU's with this project's own kernels; a GPU's with torch's products of matrices and copies."""
    if device == "cpu":
        ceilings = measure_ceilings(threads)
        return Limits({"float32": ceilings.operations_per_second}, ceilings.bytes_per_second)
    torch.backends.cuda.matmul.allow_tf32 = False
    operations = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(SIDE, SIDE, device="cuda", dtype=dtype)
        operations[str(dtype).removeprefix("torch.")] = 2.0 * SIDE**3 / _seconds(lambda x=x: torch.mm(x, x))
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return Limits(operations, 2.0 * COPIED_BYTES / _seconds(lambda: target.copy_(source)))


def _seconds(run: Callable[[], object]) -> float:
    found = []
    for _ in range(2 + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])
