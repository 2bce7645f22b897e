"""The times at which each step computes for one input alone: an event simulation. Numbers only.

A machine computes one step at a time: of the steps that could begin, the last in the plan's order, as in the runtime
(`rpc_runtime.execution.scheduler`). A link sends one tensor at a time, in the order in which they are produced; each
arrives after the link's latency. Links work in parallel with each other and with computing.

    conv1 ▸ conv2 by rows on two machines, with an exchange in between

    machine-a    conv1·a ──┐ conv2·a ──────▶ client
    links        in·a      ╳ halos       conv2·b
    machine-b    conv1·b ──┘ conv2·b ──┘
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

CLIENT_NUMBER = -1

MachineSet = tuple[int, ...]
"""Machines as numbers: all replicas of a step, or `CLIENT_NUMBER` alone for the client."""


class NumberedTransfer(NamedTuple):
    """A `Transfer` with steps as positions; the client is `CLIENT_NUMBER` as a source, and has no entry as a target."""

    source: int
    targets: tuple[int, ...]
    bytes: float


class Timetable(NamedTuple):
    """The seconds from the input to the start of each step (None if it never starts), and to the last result."""

    starts: list[float | None]
    latency_seconds: float


def timetable(
    placements: Sequence[MachineSet],
    seconds: Sequence[float],
    transfers: Sequence[NumberedTransfer],
    link: Callable[[MachineSet, MachineSet], tuple[float, float]],
) -> Timetable:
    """The timetable of one input.

    Args:
        placements, seconds: the machines of each step, and the seconds that it computes.
        link: returns latency in seconds and seconds per byte of the link between two placements.
    """
    placements = [*placements, (CLIENT_NUMBER,)]
    made_by: defaultdict[int, list[NumberedTransfer]] = defaultdict(list)
    lacking = [0] * len(seconds)
    for transfer in transfers:
        made_by[transfer.source].append(transfer)
        for target in transfer.targets:
            lacking[target] += 1
    ready: defaultdict[MachineSet, list[int]] = defaultdict(list)
    for step, count in enumerate(lacking):
        if not count:
            ready[placements[step]].append(step)
    starts: list[float | None] = [None] * len(seconds)
    busy: set[int] = set()
    link_free: dict[tuple[MachineSet, MachineSet], float] = {}
    # Time, a number that keeps the order of simultaneous events, and the step that ends or the tensor that arrives.
    events: list[tuple[float, int, int | NumberedTransfer]] = []
    numbers = itertools.count()

    def send(source: int) -> None:
        for transfer in made_by[source]:
            ends = placements[source], placements[transfer.targets[0] if transfer.targets else CLIENT_NUMBER]
            arrival = now
            if ends[0] != ends[1]:
                latency, seconds_per_byte = link(*ends)
                link_free[ends] = max(now, link_free.get(ends, 0.0)) + transfer.bytes * seconds_per_byte
                arrival = link_free[ends] + latency
            heapq.heappush(events, (arrival, next(numbers), transfer))

    def finish(event: int | NumberedTransfer) -> None:
        if isinstance(event, int):
            busy.difference_update(placements[event])
            send(event)
            return
        for target in event.targets:
            lacking[target] -= 1
            if not lacking[target]:
                ready[placements[target]].append(target)

    def begin() -> None:
        for placement, steps in list(ready.items()):
            if busy.isdisjoint(placement):
                step = max(steps)
                steps.remove(step)
                if not steps:
                    del ready[placement]
                busy.update(placement)
                starts[step] = now
                heapq.heappush(events, (now + seconds[step], next(numbers), step))

    now = 0.0
    send(CLIENT_NUMBER)
    begin()
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            finish(heapq.heappop(events)[2])
        begin()
    return Timetable(starts, now)
