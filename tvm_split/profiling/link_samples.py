"""What probing a link gives, and the line through it: latency and bandwidth. Pure; seconds and bytes of one tensor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

DISAGREEMENT = 2.0
"""How many times longer the same transfer takes at most a moment later, unless something disturbs it."""
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
EDGE_STEP, LARGEST_EDGE = 32, 1024
"""Edges of matrices are multiples of the first, so that whole vectors are computed, and no larger than the second:
that is more than a core's own caches hold."""
ALIKE_SECONDS = 2e-4
"""By which times of alike machines and links may part however short they are: what waking threads varies by."""
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
class ChainSample:
    """A chain of stages on machines that keep all cores of a host busy, which hand on tensors of ``size_bytes``.

    A single micro-batch takes ``single_seconds`` in all; ``period_seconds`` is the time from one result to the next in
    a stream, and ``busy_seconds`` what each takes of all cores.
    """

    size_bytes: int
    single_seconds: float
    period_seconds: float
    busy_seconds: float


@dataclass(frozen=True)
class ChainCost:
    """Where all cores are busy: what a stream takes of them at each end of each tensor, and what a hop of a single
    micro-batch takes, both also for one more byte."""

    transfer_seconds: float
    transfer_seconds_per_byte: float
    hop_seconds: float
    hop_seconds_per_byte: float


@dataclass(frozen=True)
class LinkLine:
    """A tensor of ``b`` bytes takes ``latency_seconds + b / bytes_per_second``."""

    latency_seconds: float
    bytes_per_second: float


def in_chain(line: LinkLine, along: Sequence[LinkLine], chain: ChainCost) -> LinkLine:
    """A link where all cores are busy, by a chain over the links ``along``, which were measured one by one.

    What the chain takes longer than these together, every hop does; where it takes less, so does each in proportion.
    Links that are alike are equal: by what noise makes of them a plan would take the seemingly fastest. A byte takes no
    less than in the chain.
    """
    apart = statistics.fmean(each.latency_seconds for each in along)
    alike = [each.latency_seconds for each in along if are_alike(each.latency_seconds, line.latency_seconds)]
    own = statistics.fmean(alike or [line.latency_seconds])
    latency = own + chain.hop_seconds - apart if chain.hop_seconds > apart else own * chain.hop_seconds / apart
    return LinkLine(latency, 1 / max(1 / line.bytes_per_second, chain.hop_seconds_per_byte))


def are_alike(one: float, other: float) -> bool:
    """Whether times of two machines or links may be equal, but for noise."""
    return abs(one - other) <= ALIKE_SECONDS or max(one, other) <= DISAGREEMENT * min(one, other)


def matrix_edge(size_bytes: float) -> int:
    """Of a square matrix of float32 of about so many bytes."""
    return min(max(round(math.sqrt(size_bytes / 4) / EDGE_STEP), 1) * EDGE_STEP, LARGEST_EDGE)


def handed_on_bytes(wanted: Sequence[int]) -> int:
    """Of tensors that are handed on through a chain: the middle one of the ``wanted`` sizes, as a power of two; 0 where
    all are so small that bytes do not count."""
    if max(wanted, default=0) < SECOND_BYTES // 4:
        return 0
    middle: int = 2 ** math.ceil(math.log2(statistics.median(wanted)))
    return min(max(middle, SECOND_BYTES), LARGEST_BYTES)


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


def chain_cost(samples: Sequence[ChainSample], machines: int) -> ChainCost:
    """Of a chain over so many machines, there being one hop more than machines.

    Its stages only hand on what they get, so that all that it takes of cores its hops do. What a byte takes is the
    difference of small and large tensors: copies, and that a stage finds its input in no cache of its core.
    """
    small, large = min(samples, key=_size), max(samples, key=_size)
    hops = machines + 1
    bytes_more = max(large.size_bytes - small.size_bytes, 1) * hops
    return ChainCost(
        transfer_seconds=small.busy_seconds / (2 * hops),
        transfer_seconds_per_byte=max(0.0, large.busy_seconds - small.busy_seconds) / (2 * bytes_more),
        hop_seconds=small.single_seconds / hops,
        hop_seconds_per_byte=max(0.0, large.single_seconds - small.single_seconds) / bytes_more,
    )


def _size(sample: ChainSample) -> int:
    return sample.size_bytes


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
