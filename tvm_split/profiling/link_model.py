"""Probes of links, the lines through them, and the link profiles that plans use. Pure; in seconds and bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from rpc_runtime.program.routes import CLIENT
from tvm_split.cluster.cluster import Cluster
from tvm_split.planner.profile import LinkProfile
from tvm_split.profiling.rounds import SpotChecked

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
SLOWEST_STREAM = 1.1
"""Largest ratio of a stream's period to a single run's time; the client works at the same time as the stream."""


@dataclass(frozen=True)
class LinkSample:
    """Times of tensors of one size on a link.

    ``single_seconds`` is the median time of a single tensor, from the end of compute at the source to the start of
    compute at the destination. ``stream_seconds`` is the time per tensor in a stream, or None.
    """

    size_bytes: int
    single_seconds: float
    stream_seconds: float | None


@dataclass(frozen=True)
class StreamSample:
    """Times of a stage that computes for ``compute_seconds`` when it is alone.

    ``single_seconds`` is the time of a single micro-batch to the stage, through it and back. ``period_seconds`` is the
    time from one result to the next in a stream through it.
    """

    compute_seconds: float
    single_seconds: float
    period_seconds: float


@dataclass(frozen=True)
class StreamCost:
    """Cost of a stream: compute of ``c`` seconds per micro-batch takes ``seconds + ratio * c`` of its period."""

    seconds: float
    ratio: float


@dataclass(frozen=True)
class ChainSample:
    """Times of a chain of stages that forward tensors of ``size_bytes``, on machines that use all cores of a host.

    ``single_seconds`` is the total time of a single micro-batch. In a stream, ``period_seconds`` is the time from one
    result to the next, and ``busy_seconds`` the core time per micro-batch, summed over all cores.
    """

    size_bytes: int
    single_seconds: float
    period_seconds: float
    busy_seconds: float


@dataclass(frozen=True)
class MachineProbe:
    """Probe of the link between a machine and the client, in both directions.

    ``seconds_per_byte`` is the machine's processor time per byte of a tensor. ``transports`` names the transport by
    destination (the machine or the client). ``measured_at`` is in seconds since 1970.
    """

    measured_at: float
    round_trip_seconds: float
    to_machine: tuple[LinkSample, ...]
    from_machine: tuple[LinkSample, ...]
    seconds_per_byte: float
    transports: Mapping[str, str]


@dataclass(frozen=True)
class PairProbe:
    """Probe of the link from one machine to another."""

    measured_at: float
    samples: tuple[LinkSample, ...]
    transport: str


@dataclass(frozen=True)
class StreamProbe:
    """Probe of streams through a machine: one sample per compute duration."""

    measured_at: float
    samples: tuple[StreamSample, ...]


@dataclass(frozen=True)
class ChainProbe:
    """Probe of a chain over machines that keep all cores of a host busy: one sample per size."""

    measured_at: float
    samples: tuple[ChainSample, ...]


@dataclass(frozen=True)
class ChainCost:
    """Cost of transfers on a host whose cores are all busy, as a fixed part and a part per byte.

    ``transfer_seconds`` is the core time at each end of a transfer in a stream. ``hop_seconds`` is the time of one hop
    of a single micro-batch.
    """

    transfer_seconds: float
    transfer_seconds_per_byte: float
    hop_seconds: float
    hop_seconds_per_byte: float


@dataclass(frozen=True)
class LinkLine:
    """Time of a link as a line: a tensor of ``b`` bytes takes ``latency_seconds + b / bytes_per_second``."""

    latency_seconds: float
    bytes_per_second: float


def in_chain(line: LinkLine, along: Sequence[LinkLine], chain: ChainCost) -> LinkLine:
    """Return a link's line under contention, from a chain over the links ``along``, which were measured one by one.

    If the chain takes longer than these links together, every hop gets the same extra time; if it takes less, each link
    is shortened in proportion. Similar links get equal latencies; otherwise a plan would select the fastest by noise. A
    byte takes at least as long as in the chain.
    """
    apart = statistics.fmean(hop.latency_seconds for hop in along)
    alike = [hop.latency_seconds for hop in along if are_alike(hop.latency_seconds, line.latency_seconds)]
    typical = statistics.fmean(alike or [line.latency_seconds])
    latency = typical + chain.hop_seconds - apart if chain.hop_seconds > apart else typical * chain.hop_seconds / apart
    return LinkLine(latency, 1 / max(1 / line.bytes_per_second, chain.hop_seconds_per_byte))


def are_alike(first: float, second: float) -> bool:
    """Whether the times of two machines or links are equal within noise."""
    return abs(first - second) <= ALIKE_SECONDS or max(first, second) <= DISAGREEMENT * min(first, second)


def handed_on_bytes(tensor_sizes: Sequence[int]) -> int:
    """Return the size of tensors that a probed chain forwards: the median of ``tensor_sizes``, as a power of two.

    0 if all sizes are so small that bytes do not count.
    """
    if max(tensor_sizes, default=0) < SECOND_BYTES // 4:
        return 0
    middle: int = 2 ** math.ceil(math.log2(statistics.median(tensor_sizes)))
    return min(max(middle, SECOND_BYTES), LARGEST_BYTES)


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


def fitted_line(samples: Sequence[LinkSample]) -> LinkLine:
    """Fit a line through at least two samples in ascending order of size.

    The bandwidth is the lower of two: that of a single tensor, whose copies follow each other, and that of a stream,
    which a network may slow down after a while. The latency is the median of the remaining times of single tensors.
    """
    largest = samples[-1]
    # The median of the slopes between all pairs (Theil–Sen estimator) is robust against one disturbed sample.
    seconds_per_byte = statistics.median(
        (larger.single_seconds - smaller.single_seconds) / (larger.size_bytes - smaller.size_bytes)
        for smaller, larger in combinations(samples, 2)
    )
    streamed = [sample for sample in samples if sample.stream_seconds is not None]
    for smaller, larger in pairwise(streamed[-2:]):
        rise = (larger.stream_seconds or 0.0) - (smaller.stream_seconds or 0.0)
        seconds_per_byte = max(seconds_per_byte, rise / (larger.size_bytes - smaller.size_bytes))
    # If a small tensor was disturbed, the slope to a large one may be near 0. That is noise, not bandwidth: limit it.
    arrived = largest.single_seconds if largest.stream_seconds is None else largest.stream_seconds
    seconds_per_byte = max(seconds_per_byte, max(arrived / MOST_OVER_ARRIVED, SHORTEST_SECONDS) / largest.size_bytes)
    latency_seconds = statistics.median(
        sample.single_seconds - sample.size_bytes * seconds_per_byte for sample in samples
    )
    return LinkLine(max(latency_seconds, 0.0), 1 / seconds_per_byte)


def stream_cost(samples: Sequence[StreamSample]) -> StreamCost:
    """Fit a line through the samples with the shortest and the longest compute time; the ratio is at least 1.

    Streaming does not make results much slower than single runs either. A sample that says so was disturbed; then the
    single run limits its period.
    """
    short, long = (
        replace(sample, period_seconds=min(sample.period_seconds, SLOWEST_STREAM * sample.single_seconds))
        for sample in (min(samples, key=_compute), max(samples, key=_compute))
    )
    difference = long.compute_seconds - short.compute_seconds
    ratio = (long.period_seconds - short.period_seconds) / difference if difference > 0 else 1.0
    ratio = max(1.0, ratio)
    return StreamCost(max(0.0, short.period_seconds - ratio * short.compute_seconds), ratio)


def chain_cost(samples: Sequence[ChainSample], machines: int) -> ChainCost:
    """Return the cost of transfers from samples of a chain over ``machines`` machines, which has one hop more.

    Its stages only forward tensors, so the hops take all its core time. The cost per byte is the difference of small
    and large tensors: copies, and inputs that are not in a cache of the stage's core.
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
    """Return the median of each time over repeated samples of the same compute."""
    return StreamSample(
        statistics.median(sample.compute_seconds for sample in samples),
        statistics.median(sample.single_seconds for sample in samples),
        statistics.median(sample.period_seconds for sample in samples),
    )


def waking_seconds(samples: Sequence[StreamSample], round_trip_seconds: float) -> float:
    """Return the extra seconds of a hop after compute, during which idle cores and threads go to sleep."""
    longest = max(samples, key=_compute)
    return max(0.0, longest.single_seconds - longest.compute_seconds - round_trip_seconds) / 2


def _compute(sample: StreamSample) -> float:
    return sample.compute_seconds


@dataclass(frozen=True)
class Chain:
    """A probed chain over machines of a host, and its cost."""

    machines: tuple[str, ...]
    cost: ChainCost


def link_profiles(
    cluster: Cluster,
    machines: SpotChecked[str, MachineProbe],
    pairs: SpotChecked[tuple[str, str], PairProbe],
    waking: Mapping[str, float],
    chains: Mapping[str, Chain],
) -> Iterator[LinkProfile]:
    """Yield the profile of every link that is not closed.

    Args:
        waking: extra seconds of a hop to a machine whose threads sleep.
        chains: the probed chain of each machine on a host without spare cores. Links between such machines, and to the
            client, use its cost instead of ``waking``.
    """
    ends = (CLIENT, *cluster.machine_names)
    for source, destination in ((a, b) for a in ends for b in ends if a != b):
        link = cluster.link(source, destination)
        if link is not None and link.is_closed:
            continue
        if link is not None and link.bytes_per_second is not None:
            speed = (link.bytes_per_second, link.latency_seconds)
            transport = cluster.transport_between_gpus(source, destination)
            yield LinkProfile(source, destination, *speed, "given", time.time(), transport)
            continue
        probe: MachineProbe | PairProbe
        if CLIENT in (source, destination):
            probe = machines.values[source if destination == CLIENT else destination]
            # The probe may come from a similar machine, and then names that machine.
            (transport,) = (how for end, how in probe.transports.items() if (end == CLIENT) == (destination == CLIENT))
            is_assumed = not machines.assumed.isdisjoint((source, destination))
        else:
            probe = pairs.values[source, destination]
            transport = probe.transport
            is_assumed = (source, destination) in pairs.assumed
        line = _line(cluster, (source, destination), machines.values, pairs.values)
        through = {chains.get(end) for end in (source, destination) if end != CLIENT}
        chain = through.pop() if len(through) == 1 else None
        if chain is not None:
            hops = pairwise((CLIENT, *chain.machines, CLIENT))
            along = [_line(cluster, hop, machines.values, pairs.values) for hop in hops]
            line = in_chain(line, along, chain.cost)
        else:
            slept = statistics.fmean(waking[end] for end in (source, destination) if end in waking)
            line = replace(line, latency_seconds=line.latency_seconds + slept)
        yield LinkProfile(
            source,
            destination,
            line.bytes_per_second,
            line.latency_seconds,
            "estimated" if is_assumed else "measured",
            probe.measured_at,
            transport,
        )


def _line(
    cluster: Cluster,
    ends: tuple[str, str],
    machines: Mapping[str, MachineProbe],
    pairs: Mapping[tuple[str, str], PairProbe],
) -> LinkLine:
    """Return a link's line as given in the cluster, or as measured without other traffic."""
    source, destination = ends
    link = cluster.link(source, destination)
    if link is not None and link.bytes_per_second is not None:
        return LinkLine(link.latency_seconds, link.bytes_per_second)
    if source == CLIENT:
        return fitted_line(machines[destination].to_machine)
    return fitted_line(machines[source].from_machine if destination == CLIENT else pairs[ends].samples)
