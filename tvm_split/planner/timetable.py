"""When each part of a plan computes, for one input alone: an event simulation. Numbers only.

A machine computes one part after the other, of those that could begin the last in the plan's order, as the runtime
does (`rpc_runtime.execution.stage_order`). A link takes one tensor after the other, in the order in which they are
made; each arrives its latency later. Links do not wait for each other, nor computing for sending.

    conv1 ▸ conv2 by rows on two machines, with an exchange in between

    machine-a    conv1·a ──┐ conv2·a ──────▶ client
    links        in·a      ╳ halos       conv2·b
    machine-b    conv1·b ──┘ conv2·b ──┘
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpc_runtime.program.program import CLIENT
from tvm_split.errors import PlanError
from tvm_split.planner.parts import Delivery, Part, PlanParts
from tvm_split.planner.problem import ProblemLink


@dataclass(frozen=True)
class Timetable:
    """Seconds after the input: when each part begins, and when the last result is with the client."""

    starts: Mapping[str, float]
    latency_seconds: float


def timetable(plan: PlanParts, links: Mapping[tuple[str, str], ProblemLink]) -> Timetable:
    """The timetable of one input; ``links`` are by source and destination.

    Raises:
        PlanError: a tensor has no link, or parts wait for each other in a circle.
    """
    return _Simulation(plan, links).run()


def ends_of(delivery: Delivery, machine_of: Mapping[str, str]) -> tuple[str, str]:
    """The machines, or the client, between which something passes; ``machine_of`` has every part."""
    source = CLIENT if delivery.source == CLIENT else machine_of[delivery.source]
    return source, machine_of[delivery.takers[0]] if delivery.takers else CLIENT


class _Simulation:
    def __init__(self, plan: PlanParts, links: Mapping[tuple[str, str], ProblemLink]) -> None:
        self._parts: Sequence[Part] = plan.parts
        self._links = links
        self._place = {part.name: place for place, part in enumerate(plan.parts)}
        machine_of = {part.name: part.machine for part in plan.parts}
        self._ends = {id(each): ends_of(each, machine_of) for each in plan.deliveries}
        self._made_by: defaultdict[str, list[Delivery]] = defaultdict(list)
        self._lacking = [0] * len(plan.parts)
        for delivery in plan.deliveries:
            self._made_by[delivery.source].append(delivery)
            for taker in delivery.takers:
                self._lacking[self._place[taker]] += 1
        self._ready: defaultdict[str, list[int]] = defaultdict(list)
        self._busy: set[str] = set()
        self._link_free: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._numbers = itertools.count()
        # Moment, a number that keeps the order of equal ones, and the part that is done or the tensor that arrives.
        self._events: list[tuple[float, int, int | Delivery]] = []
        self._starts: dict[str, float] = {}

    def run(self) -> Timetable:
        now = 0.0
        for place, lacking in enumerate(self._lacking):
            if not lacking:
                self._ready[self._parts[place].machine].append(place)
        self._deliver(CLIENT, now)
        self._begin(now)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._happen(heapq.heappop(self._events)[2], now)
            self._begin(now)
        waiting = [part.name for part in self._parts if part.name not in self._starts]
        if waiting:
            raise PlanError(f"{waiting[0]} waits for itself: what it needs is made from its own results")
        return Timetable(self._starts, now)

    def _happen(self, event: int | Delivery, now: float) -> None:
        if isinstance(event, int):
            part = self._parts[event]
            self._busy.discard(part.machine)
            self._deliver(part.name, now)
            return
        for taker in event.takers:
            place = self._place[taker]
            self._lacking[place] -= 1
            if not self._lacking[place]:
                self._ready[self._parts[place].machine].append(place)

    def _deliver(self, source: str, now: float) -> None:
        for delivery in self._made_by[source]:
            ends = self._ends[id(delivery)]
            arrival = now
            if ends[0] != ends[1]:
                link = self._links.get(ends)
                if link is None:
                    raise PlanError(
                        f"there is no link from {ends[0]} to {ends[1]}, over which this plan sends "
                        f"{delivery.bytes:g} bytes; add the link, or place the stages otherwise"
                    )
                free = max(now, self._link_free[ends]) + delivery.bytes / link.bytes_per_second
                self._link_free[ends] = free
                arrival = free + link.latency_seconds
            heapq.heappush(self._events, (arrival, next(self._numbers), delivery))

    def _begin(self, now: float) -> None:
        for machine, ready in self._ready.items():
            if ready and machine not in self._busy:
                place = max(ready)
                ready.remove(place)
                self._busy.add(machine)
                self._starts[self._parts[place].name] = now
                done = now + self._parts[place].together_seconds
                heapq.heappush(self._events, (done, next(self._numbers), place))
