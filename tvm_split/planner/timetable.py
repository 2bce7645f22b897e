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
    return _Simulation(placements, seconds, transfers, link).run()


class _Simulation:
    def __init__(
        self,
        placements: Sequence[MachineSet],
        seconds: Sequence[float],
        transfers: Sequence[NumberedTransfer],
        link: Callable[[MachineSet, MachineSet], tuple[float, float]],
    ) -> None:
        self._placements = [*placements, (CLIENT_NUMBER,)]
        self._seconds = seconds
        self._link = link
        self._made_by: defaultdict[int, list[NumberedTransfer]] = defaultdict(list)
        self._lacking = [0] * len(seconds)
        for transfer in transfers:
            self._made_by[transfer.source].append(transfer)
            for target in transfer.targets:
                self._lacking[target] += 1
        self._ready: defaultdict[MachineSet, list[int]] = defaultdict(list)
        self._busy: set[int] = set()
        self._link_free: dict[tuple[MachineSet, MachineSet], float] = {}
        self._numbers = itertools.count()
        # Time, a number that keeps the order of simultaneous events, and the step that ends or the tensor that arrives.
        self._events: list[tuple[float, int, int | NumberedTransfer]] = []
        self._starts: list[float | None] = [None] * len(seconds)

    def run(self) -> Timetable:
        now = 0.0
        for step, lacking in enumerate(self._lacking):
            if not lacking:
                self._ready[self._placements[step]].append(step)
        self._send(CLIENT_NUMBER, now)
        self._begin(now)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._finish(heapq.heappop(self._events)[2], now)
            self._begin(now)
        return Timetable(self._starts, now)

    def _finish(self, event: int | NumberedTransfer, now: float) -> None:
        if isinstance(event, int):
            self._busy.difference_update(self._placements[event])
            self._send(event, now)
            return
        for target in event.targets:
            self._lacking[target] -= 1
            if not self._lacking[target]:
                self._ready[self._placements[target]].append(target)

    def _send(self, source: int, now: float) -> None:
        for transfer in self._made_by[source]:
            ends = (
                self._placements[source],
                self._placements[transfer.targets[0] if transfer.targets else CLIENT_NUMBER],
            )
            arrival = now
            if ends[0] != ends[1]:
                latency, seconds_per_byte = self._link(*ends)
                free = max(now, self._link_free.get(ends, 0.0)) + transfer.bytes * seconds_per_byte
                self._link_free[ends] = free
                arrival = free + latency
            heapq.heappush(self._events, (arrival, next(self._numbers), transfer))

    def _begin(self, now: float) -> None:
        for placement, ready in list(self._ready.items()):
            if self._busy.isdisjoint(placement):
                step = max(ready)
                ready.remove(step)
                if not ready:
                    del self._ready[placement]
                self._busy.update(placement)
                self._starts[step] = now
                heapq.heappush(self._events, (now + self._seconds[step], next(self._numbers), step))
