"""Simple plans that a person would make by hand, in a fraction of a second; the search must not return a worse one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.search.candidate import Candidate, Placement, candidate, fits
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.order_costs import OrderCosts, Stretches
from tvm_split.planner.strategy import first_fit_plans

FINE = 1e-10
"""Relative width at which the binary search of periods ends."""
PERIODS = 6
"""Number of steps between the least and the longest period, under which machines are filled if latency counts."""
CLIENT_LIMITS = 9
"""Number of client link speeds below which machines are left out of a plan of whole-network replicas."""


def simple_plans(instance: Instance) -> list[Candidate]:
    """Return the simple plans that fit.

    First fit under the least period that works, with and without the time of links; if latency counts, also under
    longer periods, on fewer machines; with replicas, also the whole network on all machines.
    """
    problem = instance.problem
    plans: list[list[Placement] | None] = []
    place_of = {piece: place for place, piece in enumerate(instance.pieces)}
    machine_of = {machine: number for number, machine in enumerate(instance.machines)}
    for order in _fastest_first(instance):
        filling = _Filling(instance, order)
        plans.append(filling.least())
        if problem.objective == "latency" or math.isfinite(problem.maximum_latency_seconds):
            plans += [filling.under(problem.maximum_period_seconds), *filling.under_longer()]
    for stages in first_fit_plans(problem):
        plans.append(
            [
                Placement((machine_of[stage.machines[0]],), tuple(sorted(place_of[piece] for piece in stage.layers)))
                for stage in stages
            ]
        )
    if problem.replicas:
        everything = tuple(range(len(instance.pieces)))
        plans += [[Placement(whole_set, everything)] for whole_set in _whole_sets(instance)]
    candidates = []
    for placements in filter(None, plans):
        with contextlib.suppress(PlanError):  # a link is missing between stages that are not adjacent
            candidates.append(candidate(instance, placements))
    return [plan for plan in candidates if fits(instance, plan)]


def _fastest_first(instance: Instance) -> list[tuple[int, ...]]:
    """Return up to two orders of machines by total time.

    The first puts machines that cannot run every piece last; the second assumes the slowest time for such a piece.
    """
    seconds = instance.seconds
    longest = np.where(np.isfinite(seconds), seconds, -np.inf).max(axis=1, keepdims=True)
    orders = (seconds, np.where(np.isfinite(seconds), seconds, longest))
    return list(dict.fromkeys(tuple(np.argsort(order.sum(axis=0), kind="stable").tolist()) for order in orders))


class _Filling:
    """First fit: each machine, in a given order, takes as many pieces as fit under a period and into its memory.

    Pieces are taken in their order; tensors cross the link from the previous machine.
    """

    def __init__(self, instance: Instance, machines: Sequence[int]) -> None:
        self._instance, self._machines = instance, machines
        seconds = instance.seconds
        self._stretches = Stretches(seconds)
        self._longest = 2 * float(np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1).sum())
        self._cut = _cut_bytes(instance)
        limited = bool(np.isfinite(instance.memory).any())
        self._costs = OrderCosts(instance, range(len(instance.pieces)), together=True) if limited else None

    def under_longer(self) -> list[list[Placement] | None]:
        """Return plans under longer and longer periods, with fewer and fewer stages."""
        stages = self.least()
        if not stages:
            return []
        low = max(float(self._instance.seconds[list(stage.pieces), stage.machines[0]].sum()) for stage in stages)
        ratio = self._longest / max(low, FINE * self._longest)
        return [self.under(low * ratio ** (number / PERIODS) * (1 + FINE)) for number in range(1, PERIODS)]

    def least(self) -> list[Placement] | None:
        """Return the plan under the least period that works; None if there is none."""
        low, high = 0.0, self._longest
        best = None
        while high > low * (1 + FINE) and high > 0:
            period = (low + high) / 2
            stages = self.under(period)
            if stages is None and best is None and period > high * (1 - 1e-3):
                return None
            low, high = (low, period) if stages else (period, high)
            best = stages or best
        return best

    def under(self, period: float) -> list[Placement] | None:
        instance, cut = self._instance, self._cut
        length, client = len(instance.pieces), instance.client
        stages: list[Placement] = []
        start, before = 0, client
        for machine in self._machines:
            if not instance.linked[before, machine] and cut[start] > 0:
                continue
            if cut[start] * instance.seconds_per_byte[before, machine] > period:
                continue
            end = self._stretches.end(machine, start, period)
            end = self._held(start, end, float(instance.memory[machine]))
            while end > start and cut[end] * instance.seconds_per_byte[machine, client] > period:
                end -= 1
            if end > start:
                stages.append(Placement((machine,), tuple(range(start, end))))
                start, before = end, machine
            if start == length:
                return stages
        return None

    def _held(self, start: int, end: int, memory: float) -> int:
        """Return the last cut up to ``end`` for which memory holds all pieces from ``start``; else ``start``."""
        costs = self._costs
        if costs is None or end == start:
            return end
        columns = slice(start + 1, end + 1)
        held = costs.weights[columns] - costs.weights[start] + np.maximum.accumulate(costs.activations[start:end])
        held = held + self._instance.problem.buffers * costs.bytes[start, columns]
        possible = np.flatnonzero(held <= memory * (1 + 1e-12))
        return start + 1 + int(possible[-1]) if len(possible) else start


def _cut_bytes(instance: Instance) -> Floats:
    """Return the bytes of all tensors that cross each cut, including before the first and after the last piece."""
    length, client = len(instance.pieces), instance.client
    steps = np.zeros(length + 2)
    for tensor in instance.tensors:
        last = length if client in tensor.destinations else max(tensor.destinations)
        steps[tensor.source + 1] += tensor.bytes
        steps[last + 1] -= tensor.bytes
    return np.maximum(np.cumsum(steps)[: length + 1], 0.0)


def _whole_sets(instance: Instance) -> Iterator[tuple[int, ...]]:
    """Yield sets of machines that can run and hold the whole network in time, with slower and slower client links."""
    able = np.flatnonzero(np.isfinite(instance.seconds).all(axis=0))
    able = able[instance.times[:, able].sum(axis=0) <= instance.problem.maximum_latency_seconds]
    seconds = instance.seconds[:, able].sum(axis=0)
    able = able[np.argsort(seconds, kind="stable")][: instance.machine_limit]
    slow = np.maximum(instance.seconds_per_byte[-1, able], instance.seconds_per_byte[able, -1])
    sizes = math.fsum(
        tensor.bytes for tensor in instance.tensors if instance.client in (tensor.source, *tensor.destinations)
    )
    needed = math.fsum(instance.weights) + float(instance.activations.max()) + instance.problem.buffers * sizes
    for limit in np.unique(np.quantile(slow, np.linspace(0, 1, CLIENT_LIMITS))) if len(able) else ():
        chosen = able[(slow <= limit * (1 + 1e-9)) & (instance.memory[able] >= needed)]
        if len(chosen):
            yield tuple(sorted(chosen.tolist()))
