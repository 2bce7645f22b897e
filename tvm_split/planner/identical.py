"""Identical devices: average the times of machines and links that differ by no more than the noise of measurements.

Two measurements of one machine never give the same times. Without averaging, sixteen workers of one host would be
sixteen device classes instead of one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from tvm_split.planner.profile import ClusterProfile, LinkProfile, MachineProfile, PieceTime, StreamingCost

MOST_APART = 8
"""Up to this number of machines, each keeps its own measured times."""
NOISE = 0.05
"""Relative difference allowed between the total times of identical machines over all pieces."""
SCATTER = 0.15
"""Allowed sum of the differences of single pieces, which scatter more, as a share of that total."""
LINK_NOISE = 0.25
"""Relative difference allowed between the bandwidths, or the latencies, of identical links."""
LEAST_LATENCY = 2e-5
"""Seconds by which the latencies of identical links may always differ: the variation of waking a thread."""

Item = TypeVar("Item")


def with_identical_averaged(profile: ClusterProfile) -> ClusterProfile:
    """The profile with averaged times of identical machines and links, for many machines or oversubscribed cores.

    It is unchanged for at most `MOST_APART` machines of which none is oversubscribed. With averaged times it makes no
    difference which of the identical machines compute, and a chain is planned exactly. Identical machines have equal
    targets, threads and cores, and free memory and times that differ only by noise; identical links have equal
    transports. Machines get means, links medians.
    """
    oversubscribed = any(profile.oversubscription(each.machine) > 1 for each in profile.machines)
    if len(profile.machines) <= MOST_APART and not oversubscribed:
        return profile
    links = {
        (each.source, each.destination): each
        for group in _groups(profile.links, lambda link: link.bytes_per_second, _is_identical_link)
        for each in _averaged_links(group)
    }
    machines = {
        each.machine: each
        for group in _groups(profile.machines, _whole_seconds, _is_identical)
        for each in _averaged(group)
    }
    return replace(
        profile,
        machines=tuple(machines[each.machine] for each in profile.machines),
        links=tuple(links[each.source, each.destination] for each in profile.links),
    )


def _groups(
    items: Iterable[Item], size: Callable[[Item], float], is_identical: Callable[[Item, Item], bool]
) -> list[list[Item]]:
    """Groups of items in which every item is identical to the smallest one of its group."""
    groups: list[list[Item]] = []
    for item in sorted(items, key=size):
        group = next((group for group in groups if is_identical(group[0], item)), None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    return groups


def _whole_seconds(machine: MachineProfile) -> float:
    return sum(each.seconds for each in machine.pieces.values())


def _is_identical(one: MachineProfile, other: MachineProfile) -> bool:
    if (one.target, one.threads, one.cores) != (other.target, other.threads, other.cores):
        return False
    if not _near(one.memory_free_bytes, other.memory_free_bytes, 2 * NOISE):
        return False
    whole = _whole_seconds(one)
    apart = sum(abs(one.pieces[name].seconds - each.seconds) for name, each in other.pieces.items())
    return _near(whole, _whole_seconds(other), NOISE) and apart <= SCATTER * whole


def _is_identical_link(one: LinkProfile, other: LinkProfile) -> bool:
    return (
        (one.transport, one.origin == "given") == (other.transport, other.origin == "given")
        and _near(one.bytes_per_second, other.bytes_per_second, LINK_NOISE)
        and (
            abs(one.latency_seconds - other.latency_seconds) <= LEAST_LATENCY
            or _near(one.latency_seconds, other.latency_seconds, LINK_NOISE)
        )
    )


def _near(one: float, other: float, share: float) -> bool:
    return one == other or abs(one - other) <= share * min(abs(one), abs(other))


def _averaged(machines: Sequence[MachineProfile]) -> list[MachineProfile]:
    """The machines, each with the mean times of all and the least free memory of any."""
    pieces = {
        name: PieceTime(
            statistics.fmean(each.pieces[name].seconds for each in machines),
            statistics.fmean(each.pieces[name].contended_seconds for each in machines),
            first.origin,
        )
        for name, first in machines[0].pieces.items()
    }
    streaming = StreamingCost(
        *(statistics.fmean(getattr(each.streaming, field.name) for each in machines) for field in fields(StreamingCost))
    )
    memory = min(each.memory_free_bytes for each in machines)
    return [replace(each, pieces=pieces, streaming=streaming, memory_free_bytes=memory) for each in machines]


def _averaged_links(links: Sequence[LinkProfile]) -> list[LinkProfile]:
    bandwidth = statistics.median(each.bytes_per_second for each in links)
    latency = statistics.median(each.latency_seconds for each in links)
    return [replace(each, bytes_per_second=bandwidth, latency_seconds=latency) for each in links]
