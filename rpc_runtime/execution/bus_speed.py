"""Measures the transfer time between host memory and a GPU over the host's bus."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpc_runtime.execution.cuda_calls import CudaCalls

SMALL_BYTES, LARGE_BYTES = 4096, 32 << 20
ROUNDS = 5


@dataclass(frozen=True)
class BusSpeed:
    """``latency_seconds + b / bytes_per_second`` for b bytes, in the slower direction."""

    bytes_per_second: float
    latency_seconds: float


def bus_speed(calls: CudaCalls, address: Callable[[int], tuple[Any, int]]) -> BusSpeed:
    """Measure copies between page-locked host memory and device memory, one at a time; take the best of `ROUNDS`.

    Args:
        address: allocates device memory of a size in bytes; returns an object that keeps it alive, and its address.
    """
    mark = calls.mark()
    host = calls.host_memory(LARGE_BYTES)
    kept, device = address(LARGE_BYTES)

    def best(size_bytes: int) -> float:
        slower = 0.0
        for copy, ends in ((calls.upload, (host.ctypes.data, device)), (calls.download, (device, host.ctypes.data))):
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                copy(*ends, size_bytes, mark)
                calls.wait(mark)
                times.append(time.perf_counter() - start)
            slower = max(slower, min(times))
        return slower

    best(SMALL_BYTES)  # warm-up
    latency, whole = best(SMALL_BYTES), best(LARGE_BYTES)
    del kept
    return BusSpeed((LARGE_BYTES - SMALL_BYTES) / max(whole - latency, 1e-9), latency)
