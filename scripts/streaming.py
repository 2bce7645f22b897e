"""Stream one input again and again, and take the times of the results. Without torch, which raw links do not load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

FILL = 6
"""The number of first results of a stream that do not count."""


def arrivals(deployment: Any, inputs: Sequence[Any], seconds: float) -> list[float]:
    """Feed a stream for ``seconds``, with at least three times `FILL` inputs; return when its results arrived."""
    end = time.perf_counter() + seconds

    def fed() -> Iterator[Sequence[Any]]:
        count = 0
        while count < 3 * FILL or time.perf_counter() < end:
            yield inputs
            count += 1

    return [time.perf_counter() for _ in deployment.stream(fed())]


def rate(times: Sequence[float]) -> float:
    """Return the results per second after the first `FILL`."""
    return (len(times) - FILL) / (times[-1] - times[FILL - 1])
