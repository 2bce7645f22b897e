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
    oversubscribed = any(profile.oversubscription(machine.machine) > 1 for machine in profile.machines)
    if len(profile.machines) <= MOST_APART and not oversubscribed:
        return profile
    links = {
        (link.source, link.destination): link
        for group in _groups(profile.links, lambda link: link.bytes_per_second, _is_identical_link)
        for link in _averaged_links(group)
    }
    machines = {
        machine.machine: machine
        for group in _groups(profile.machines, _whole_seconds, _is_identical)
        for machine in _averaged(group)
    }
    return replace(
        profile,
        machines=tuple(machines[machine.machine] for machine in profile.machines),
        links=tuple(links[link.source, link.destination] for link in profile.links),
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
    return sum(piece.seconds for piece in machine.pieces.values())


def _is_identical(first: MachineProfile, second: MachineProfile) -> bool:
    if (first.target, first.threads, first.cores) != (second.target, second.threads, second.cores):
        return False
    if not _near(first.memory_free_bytes, second.memory_free_bytes, 2 * NOISE):
        return False
    whole = _whole_seconds(first)
    apart = sum(abs(first.pieces[name].seconds - time.seconds) for name, time in second.pieces.items())
    return _near(whole, _whole_seconds(second), NOISE) and apart <= SCATTER * whole


def _is_identical_link(first: LinkProfile, second: LinkProfile) -> bool:
    return (
        (first.transport, first.origin == "given") == (second.transport, second.origin == "given")
        and _near(first.bytes_per_second, second.bytes_per_second, LINK_NOISE)
        and (
            abs(first.latency_seconds - second.latency_seconds) <= LEAST_LATENCY
            or _near(first.latency_seconds, second.latency_seconds, LINK_NOISE)
        )
    )


def _near(first: float, second: float, share: float) -> bool:
    return first == second or abs(first - second) <= share * min(abs(first), abs(second))


def _averaged(machines: Sequence[MachineProfile]) -> list[MachineProfile]:
    """The machines, each with the mean times of all and the least free memory of any."""
    pieces = {
        name: PieceTime(
            statistics.fmean(machine.pieces[name].seconds for machine in machines),
            statistics.fmean(machine.pieces[name].contended_seconds for machine in machines),
            first.origin,
        )
        for name, first in machines[0].pieces.items()
    }
    streaming = StreamingCost(
        *(
            statistics.fmean(getattr(machine.streaming, field.name) for machine in machines)
            for field in fields(StreamingCost)
        )
    )
    memory = min(machine.memory_free_bytes for machine in machines)
    return [replace(machine, pieces=pieces, streaming=streaming, memory_free_bytes=memory) for machine in machines]


def _averaged_links(links: Sequence[LinkProfile]) -> list[LinkProfile]:
    bandwidth = statistics.median(link.bytes_per_second for link in links)
    latency = statistics.median(link.latency_seconds for link in links)
    return [replace(link, bytes_per_second=bandwidth, latency_seconds=latency) for link in links]
