"""Probes of links, and the lines through them. Pure; in seconds and bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from tvm_split.planner.profile import StreamingCost

DISAGREEMENT = 2.0
"""Largest ratio between two undisturbed measurements of the same transfer."""
SMALLEST_BYTES = 64
SECOND_BYTES = 64 * 1024
"""Second probed size: small enough for a link of some 100 kB/s, large enough to estimate larger tensors."""
LEAST_LARGEST_BYTES = 1024 * 1024
"""Lower limit of the largest probed size; below it, the fixed cost per tensor hides the bandwidth."""
LARGEST_BYTES = 16 * 1024 * 1024
WORTHWHILE_SECONDS = 0.12
"""Longest transfer with which a slow link is probed, in seconds."""
MOST_OVER_ARRIVED = 4.0
"""Limit of a link's bandwidth, relative to the rate at which its largest tensors arrived."""
SHORTEST_SECONDS = 1e-9
"""Resolution of clocks, in seconds."""
ALIKE_SECONDS = 2e-4
"""Difference in seconds that is always noise between similar machines or links: the variation of thread wake-ups."""


@dataclass(frozen=True)
class LinkSample:
    """Times of tensors of one size on a link.

    ``single_seconds`` is the usual time of a single tensor, from the end of compute at the source to the start of
    compute at the destination. ``stream_seconds`` is the time per tensor in a stream, or None. On a link with the
    client, ``processor_seconds`` is the CPU time that the machine takes to receive a tensor and send one, and
    ``client_seconds`` that of the client.
    """

    size_bytes: int
    single_seconds: float
    stream_seconds: float | None
    processor_seconds: float = 0.0
    client_seconds: float = 0.0


@dataclass(frozen=True)
class ProbedLink:
    """Samples of a link in ascending order of size; ``measured_at`` is in seconds since 1970."""

    measured_at: float
    samples: tuple[LinkSample, ...]
    transport: str


def are_alike(first: float, second: float) -> bool:
    """Whether the times of two transfers are equal within noise."""
    return abs(first - second) <= ALIKE_SECONDS or max(first, second) <= DISAGREEMENT * min(first, second)


def probe_sizes(tensor_sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return the three sizes to probe for tensors of ``tensor_sizes``; powers of two, so that few differ."""
    largest = 2 ** math.ceil(math.log2(max(max(tensor_sizes, default=1), 1)))
    return SMALLEST_BYTES, SECOND_BYTES, min(max(largest, LEAST_LARGEST_BYTES), LARGEST_BYTES)


def worthwhile_size(size_bytes: int, samples: Sequence[LinkSample]) -> int | None:
    """Return ``size_bytes``, or a smaller size if that would take too long; None if it would add no information."""
    if len(samples) < 2:
        return size_bytes
    before, last = samples[-2:]
    seconds_per_byte = max(0.0, last.single_seconds - before.single_seconds) / (last.size_bytes - before.size_bytes)
    while last.single_seconds + (size_bytes - last.size_bytes) * seconds_per_byte > WORTHWHILE_SECONDS:
        size_bytes //= 2
        if size_bytes <= last.size_bytes:
            return None
    return size_bytes


def fitted_line(samples: Sequence[LinkSample]) -> tuple[float, float]:
    """Return latency (seconds) and bandwidth (bytes per second) of at least two samples in ascending order of size.

    The bandwidth is the lower of two: that of a single tensor, whose copies follow each other, and that of a stream,
    which a network may slow down after a while. The latency is that of the smallest tensor.
    """
    smallest, largest = samples[0], samples[-1]
    # The median of the slopes between all pairs (Theil–Sen estimator) is robust against one disturbed sample.
    slope = statistics.median(
        (larger.single_seconds - smaller.single_seconds) / (larger.size_bytes - smaller.size_bytes)
        for smaller, larger in combinations(samples, 2)
    )
    seconds_per_byte = slope = max(slope, 0.0)
    streamed = [sample for sample in samples if sample.stream_seconds is not None]
    for smaller, larger in pairwise(streamed[-2:]):
        rise = (larger.stream_seconds or 0.0) - (smaller.stream_seconds or 0.0)
        seconds_per_byte = max(seconds_per_byte, rise / (larger.size_bytes - smaller.size_bytes))
    # If a small tensor was disturbed, the slope to a large one may be near 0. That is noise, not bandwidth: limit it.
    arrived = largest.single_seconds if largest.stream_seconds is None else largest.stream_seconds
    seconds_per_byte = max(seconds_per_byte, max(arrived / MOST_OVER_ARRIVED, SHORTEST_SECONDS) / largest.size_bytes)
    return max(smallest.single_seconds - smallest.size_bytes * slope, 0.0), 1 / seconds_per_byte


def transfer_cost(to_machine: ProbedLink, from_machine: ProbedLink) -> StreamingCost:
    """Return the CPU time that a transfer takes at both ends, from the probes of a machine's links with the client.

    In each of them both ends receive a tensor and send one; one of the two has the probed size, the other is small.
    """
    both = to_machine.samples, from_machine.samples
    machine_cost = _line([[(sample.size_bytes, sample.processor_seconds) for sample in samples] for samples in both])
    client_cost = _line([[(sample.size_bytes, sample.client_seconds) for sample in samples] for samples in both])
    return StreamingCost(*machine_cost, *client_cost)


def _line(series: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Return the seconds of a tensor and of a byte, from the seconds of a tensor of each size and of a small one."""
    per_byte = statistics.fmean(
        (most - least) / (largest - smallest) for (smallest, least), *_, (largest, most) in series
    )
    return statistics.fmean(samples[0][1] / 2 for samples in series), max(per_byte, 0.0)
