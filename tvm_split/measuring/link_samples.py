"""What probing a link gives, and the line through it: latency and bandwidth. Pure; seconds and bytes of one tensor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

SMALLEST_BYTES = 64
SECOND_BYTES = 64 * 1024
"""Little enough for a link of some hundred kilobytes a second, enough to estimate what larger tensors would take."""
LEAST_LARGEST_BYTES = 1024 * 1024
"""Below, bandwidth would drown in what every tensor costs anyway."""
LARGEST_BYTES = 16 * 1024 * 1024
WORTHWHILE_SECONDS = 0.12
"""A slow link is probed with tensors that take no longer."""
MOST_OVER_ARRIVED = 4.0
"""A link is not believed to be faster than so many times the rate at which its largest tensors came."""
SHORTEST_SECONDS = 1e-9
"""What clocks can tell apart."""
SLOWEST_STREAM = 1.1
"""A stream's results follow each other this much slower than one by one at most: the client works at the same time."""


@dataclass(frozen=True)
class LinkSample:
    """Tensors of one size on a link.

    ``single_seconds`` is the median time from the end of computing at the source to the start of computing at the
    destination, for a tensor alone; ``stream_seconds`` the time per tensor when one follows the other, or None.
    """

    size_bytes: int
    single_seconds: float
    stream_seconds: float | None


@dataclass(frozen=True)
class StreamSample:
    """A stage that computes for ``compute_seconds`` when it is alone.

    ``single_seconds`` is what a single micro-batch takes to it, through it and back, ``period_seconds`` the time from
    one result to the next in a stream through it.
    """

    compute_seconds: float
    single_seconds: float
    period_seconds: float

    @property
    def is_contradictory(self) -> bool:
        """Whether results would come sooner if nothing were streamed."""
        return self.period_seconds > SLOWEST_STREAM * self.single_seconds


@dataclass(frozen=True)
class StreamCost:
    """Computing for ``c`` seconds per micro-batch takes ``seconds + ratio * c`` of a stream's period."""

    seconds: float
    ratio: float


@dataclass(frozen=True)
class CrowdSample:
    """A chain of stages on machines that share too few cores, each of which computes the same number of ``products``.

    ``compute_seconds`` is what all of them compute for a single micro-batch, ``single_seconds`` what it takes in all,
    ``period_seconds`` the time from one result to the next in a stream; None where none was measured.
    """

    products: int
    compute_seconds: float
    single_seconds: float
    period_seconds: float | None = None


@dataclass(frozen=True)
class CrowdCost:
    """Where cores are too few: what a stream takes of them at each end of each tensor, and what a hop of a single
    micro-batch takes, until its stage computes as if it always did."""

    transfer_seconds: float
    hop_seconds: float


@dataclass(frozen=True)
class LinkLine:
    """A tensor of ``b`` bytes takes ``latency_seconds + b / bytes_per_second``."""

    latency_seconds: float
    bytes_per_second: float


def probe_sizes(wanted: Sequence[int]) -> tuple[int, int, int]:
    """The sizes to probe for tensors of the ``wanted`` sizes, powers of two so that few differ."""
    largest = 2 ** math.ceil(math.log2(max(max(wanted, default=1), 1)))
    return SMALLEST_BYTES, SECOND_BYTES, min(max(largest, LEAST_LARGEST_BYTES), LARGEST_BYTES)


def worthwhile_size(size_bytes: int, samples: Sequence[LinkSample]) -> int | None:
    """``size_bytes``, or less where a tensor of that size would take long; None where it would tell nothing new."""
    if len(samples) < 2:
        return size_bytes
    before, last = samples[-2:]
    seconds_per_byte = max(0.0, last.single_seconds - before.single_seconds) / (last.size_bytes - before.size_bytes)
    while last.single_seconds + (size_bytes - last.size_bytes) * seconds_per_byte > WORTHWHILE_SECONDS:
        size_bytes //= 2
        if size_bytes <= last.size_bytes:
            return None
    return size_bytes


def fitted_line(samples: Sequence[LinkSample]) -> LinkLine:
    """The line through at least two samples in rising order of size.

    The bandwidth is the lesser of two: what one more byte costs a tensor alone, whose copies and hand-overs follow each
    other, and what it costs in a stream, which a network may slow down after a while. The latency is the median of what
    is left of single tensors' times.
    """
    largest = samples[-1]
    # The median of the slopes between any two samples (Theil and Sen's estimator): one disturbed sample does no harm.
    seconds_per_byte = statistics.median(
        (two.single_seconds - one.single_seconds) / (two.size_bytes - one.size_bytes)
        for one, two in combinations(samples, 2)
    )
    streamed = [each for each in samples if each.stream_seconds is not None]
    for one, two in pairwise(streamed[-2:]):
        rise = (two.stream_seconds or 0.0) - (one.stream_seconds or 0.0)
        seconds_per_byte = max(seconds_per_byte, rise / (two.size_bytes - one.size_bytes))
    # Where the way of a small tensor was disturbed, nothing is left of a large one's: that is noise and no bandwidth.
    arrived = largest.single_seconds if largest.stream_seconds is None else largest.stream_seconds
    seconds_per_byte = max(seconds_per_byte, max(arrived / MOST_OVER_ARRIVED, SHORTEST_SECONDS) / largest.size_bytes)
    latency_seconds = statistics.median(each.single_seconds - each.size_bytes * seconds_per_byte for each in samples)
    return LinkLine(max(latency_seconds, 0.0), 1 / seconds_per_byte)


def stream_cost(samples: Sequence[StreamSample]) -> StreamCost:
    """The line through a short and a long duration of computing; streaming never makes computing faster.

    Nor does it make results come much slower than one by one: what says so was disturbed, and the single run counts.
    """
    short, long = (
        replace(each, period_seconds=min(each.period_seconds, SLOWEST_STREAM * each.single_seconds))
        for each in (min(samples, key=_compute), max(samples, key=_compute))
    )
    difference = long.compute_seconds - short.compute_seconds
    ratio = (long.period_seconds - short.period_seconds) / difference if difference > 0 else 1.0
    ratio = max(1.0, ratio)
    return StreamCost(max(0.0, short.period_seconds - ratio * short.compute_seconds), ratio)


def crowd_cost(period_seconds: float, samples: Sequence[CrowdSample], machines: int, cores: int) -> CrowdCost:
    """Of a chain over so many machines on so many cores, there being one hop more than machines.

    A stream whose stages compute nothing, with one result every ``period_seconds``, keeps all cores busy with nothing
    but hops. Where stages compute, they find their core and caches as others have left them, and so does the runtime.
    That costs the same however long they compute then: what a product takes is the difference of short and long
    ``samples``, and the rest of the short one's period and single run is the hops'.
    """
    short, long = sorted(samples, key=lambda each: each.products)
    product = max(long.compute_seconds - short.compute_seconds, 0.0) / (long.products - short.products)
    hops, computed = machines + 1, product * short.products
    taken = cores * period_seconds
    if short.period_seconds is not None:
        taken = max(taken, cores * short.period_seconds - computed)
    return CrowdCost(taken / (2 * hops), max(0.0, short.single_seconds - computed) / hops)


def median_sample(samples: Sequence[StreamSample]) -> StreamSample:
    """Of the same computing again and again: the median of each of its times."""
    return StreamSample(
        statistics.median(each.compute_seconds for each in samples),
        statistics.median(each.single_seconds for each in samples),
        statistics.median(each.period_seconds for each in samples),
    )


def waking_seconds(samples: Sequence[StreamSample], round_trip_seconds: float) -> float:
    """What a hop takes longer than without computing in between: cores and threads have gone to sleep meanwhile."""
    longest = max(samples, key=_compute)
    return max(0.0, longest.single_seconds - longest.compute_seconds - round_trip_seconds) / 2


def _compute(sample: StreamSample) -> float:
    return sample.compute_seconds
