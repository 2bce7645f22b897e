"""Simple plans that a person would make by hand, in a fraction of a second; the search must not return a worse one."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from tvm_split.errors import NoPlanError
from tvm_split.placement.problem import TOLERANCE, Problem
from tvm_split.placement.search.candidate import Candidate, Placement, best_of, one_machine_candidates, tried
from tvm_split.placement.search.instance import Floats, Instance, instance_of
from tvm_split.placement.search.order_costs import ROUNDING, ComputeRuns, OrderCosts
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.placement.strategy import Strategy

FINE = 1e-10
"""Relative width at which the binary search of periods ends."""
PERIODS = 6
"""Number of steps between the least and the longest period, under which machines are filled if latency counts."""
CLIENT_LIMITS = 9
"""Number of client link speeds below which machines are left out of a plan of whole-network replicas."""


class FirstFit(Strategy):
    """First fit: fill the fastest machine with pieces up to a period, then the next. Takes milliseconds; has no bound.

    Pieces are placed in topological order, under the least period that works. Replicas and a number of stages are not
    considered.
    """

    name: ClassVar[str] = "first-fit"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        instance = instance_of(problem)
        plans = [*one_machine_candidates(instance), *(tried(instance, stages) for stages in _first_fit(instance))]
        best = best_of([plan for plan in plans if plan is not None and plan.is_within_limits])
        if best is None:
            raise NoPlanError("first fit finds no plan that keeps to all demands; the strategy 'best' looks further")
        return solution_of(problem, best.named(instance), method="first fit, without a bound")


def simple_plans(instance: Instance) -> list[Candidate]:
    """Return the simple plans that fit: first fit, pieces where they are fastest, and the network on all machines."""
    plans = [*_first_fit(instance), _fastest_for_pieces(instance)]
    if instance.problem.replicas:
        everything = tuple(range(len(instance.pieces)))
        plans += [[Placement(whole_set, everything)] for whole_set in _whole_sets(instance)]
    return [plan for stages in plans if (plan := tried(instance, stages)) is not None]


def _first_fit(instance: Instance) -> Iterator[list[Placement]]:
    """Yield the plans of first fit, with and without the time of links; if latency counts, also on fewer machines."""
    problem = instance.problem
    has_latency = problem.objective == "latency" or math.isfinite(problem.maximum_latency_seconds)
    for order, uses_links in itertools.product(_fastest_first(instance), (True, False)):
        filling = _Filling(instance, order, uses_links=uses_links)
        yield from filling.plans(has_latency=has_latency)


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

    Pieces are taken in their order; if ``uses_links``, tensors cross the link from the previous machine in time.
    """

    def __init__(self, instance: Instance, machines: Sequence[int], *, uses_links: bool) -> None:
        self._instance, self._machines = instance, machines
        seconds = instance.seconds * instance.contention
        self._runs = ComputeRuns(seconds)
        self._longest = 2 * float(np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1).sum())
        self._cut = _cut_bytes(instance) if uses_links else np.zeros(len(instance.pieces) + 1)
        limited = bool(np.isfinite(instance.memory_bytes).any())
        self._costs = OrderCosts(instance) if limited else None

    def plans(self, *, has_latency: bool) -> Iterator[list[Placement]]:
        """Yield the plans under the periods of a bisection; with latency, also under the longest period and some less.

        Under longer periods there are fewer stages.
        """
        low, high = 0.0, self._longest
        best: list[Placement] = []
        while high > low * (1 + FINE) and high > 0:
            period = (low + high) / 2
            stages = self._under(period)
            if stages is None and not best and period > high * (1 - 1e-3):
                return
            low, high = (low, period) if stages else (period, high)
            if stages and stages != best:
                yield stages
            best = stages or best
        if has_latency and best:
            seconds = self._instance.seconds
            low = max(float(seconds[list(stage.pieces), stage.machines[0]].sum()) for stage in best)
            ratio = self._longest / max(low, FINE * self._longest)
            longer = [low * ratio ** (number / PERIODS) * (1 + FINE) for number in range(1, PERIODS)]
            yield from filter(None, map(self._under, [self._instance.problem.maximum_period_seconds, *longer]))

    def _under(self, period: float) -> list[Placement] | None:
        """Return the stages under a period; None if pieces are left over."""
        instance, cut = self._instance, self._cut
        length, client = len(instance.pieces), instance.client
        stages: list[Placement] = []
        start, before = 0, client
        for machine in self._machines:
            if not instance.linked[before, machine] and cut[start] > 0:
                continue
            if cut[start] * instance.seconds_per_byte[before, machine] > period:
                continue
            end = self._runs.end(machine, start, period)
            end = self._held(start, end, float(instance.memory_bytes[machine]))
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
        possible = np.flatnonzero(costs.memory_bytes(start, end) <= memory * (1 + ROUNDING))
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


def _fastest_for_pieces(instance: Instance) -> list[Placement]:
    """Return the stages if each piece goes to its fastest machine, or to that of the piece before if that is over."""
    held: dict[int, list[int]] = {}
    last = -1
    for piece, machine in enumerate(instance.seconds.argmin(axis=1).tolist()):
        last = machine if machine == last or machine not in held else last
        held.setdefault(last, []).append(piece)
    return [Placement((machine,), tuple(pieces)) for machine, pieces in held.items()]


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
    needed = math.fsum(instance.weight_bytes) + instance.activation_bytes.max() + instance.problem.buffers * sizes
    for limit in np.unique(np.quantile(slow, np.linspace(0, 1, CLIENT_LIMITS))) if len(able) else ():
        chosen = able[(slow <= limit * (1 + TOLERANCE)) & (instance.memory_bytes[able] >= needed)]
        if len(chosen):
            yield tuple(sorted(chosen.tolist()))
