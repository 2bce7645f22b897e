"""Chains, exactly: the least period, the least latency, and either one under a limit to the other."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np

from tvm_split.planner.problem import TOLERANCE
from tvm_split.planner.search.candidate import Candidate, candidate, lack_of, one_machine_candidates
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.machine_classes import Counts, groups_of, machine_classes
from tvm_split.planner.search.placement import Placed
from tvm_split.planner.search.stage_costs import StageCosts, chain_costs
from tvm_split.planner.search.stage_dp import (
    MOST_MATRIX_BYTES,
    OutOfTimeError,
    Sequence,
    StageTable,
    Value,
    lack_table,
    table_cost,
)

MOST_STEPS = 2.0e9
"""Matrix elements that one table may touch: some seconds."""
STEPS_A_SECOND = 2.0e8
"""Of the time limit; with fewer, a table would hardly come to its end."""


class ChainSearch:
    """All questions to one chain; the costs of its stages are computed once.

    One machine by itself has no contention, so such plans are measured apart from the tables.
    What has no answer by the deadline (monotonic) raises an `OutOfTimeError`.
    """

    def __init__(self, instance: Instance, deadline: float = math.inf) -> None:
        self.instance = instance
        self.deadline = deadline
        groups = groups_of(instance, machine_classes(instance), replicas=instance.problem.replicas)
        self._costs: StageCosts = chain_costs(instance, groups)
        self._alone = one_machine_candidates(instance)

    def table(self, value: Value, period_limit: float = math.inf, value_limit: float = math.inf) -> StageTable:
        problem, machines = self.instance.problem, self.instance.machine_limit
        return StageTable(self._costs, value, machines, problem.stages, period_limit, value_limit, self.deadline)

    def least_period(self) -> float:
        """Of any plan, whatever its latency; infinite if there is none."""
        alone = [each.flow.period_seconds for each in self._alone]
        return min([*alone, *self.table("period").best().values()], default=math.inf)

    def fastest(self, period_limit: float = math.inf, latency_limit: float = math.inf) -> Candidate | None:
        """The plan of the least latency that keeps to both limits; of equal ones the one of fewest machines."""
        limit = period_limit * (1 + TOLERANCE)
        candidates = [each for each in self._alone if each.flow.period_seconds <= limit]
        table = self.table("latency", period_limit, latency_limit)
        best = table.best()
        if best:
            least = min(best.values()) * (1 + TOLERANCE)
            fewest = min((used for used, value in best.items() if value <= least), key=sum)
            candidates.append(self.candidate(table.sequence(fewest)))
        least = min((each.flow.latency_seconds for each in candidates), default=math.inf) * (1 + TOLERANCE)
        least = min(least, latency_limit * (1 + TOLERANCE))
        equal = [each for each in candidates if each.flow.latency_seconds <= least]
        return min(equal, key=lambda each: len(each.machines), default=None)

    def least_period_within(self, latency_limit: float, known: float) -> float:
        """The least period of a plan that keeps to a latency, given one that does so with the period ``known``.

        A period is that of one of the stages or links, so the least is among finitely many, and found by halving.
        """

        def reached(period: float) -> float | None:
            found = self.fastest(period, latency_limit)
            return None if found is None else found.flow.period_seconds

        lowest = self.least_period()
        if reached(lowest) is not None:
            return lowest
        return _least(self._possible_periods(lowest, known), reached, known)

    def candidate(self, sequence: Sequence) -> Candidate:
        starts = (0, *sequence.ends[:-1])
        machines = self._costs.groups.machines(list(sequence.groups))
        return candidate(
            self.instance,
            [
                Placed(group, tuple(range(start, end)))
                for group, start, end in zip(machines, starts, sequence.ends, strict=True)
            ],
        )

    def others(self, chosen: Candidate) -> list[Candidate]:
        """The best plans of every number of machines, and those that use what ``chosen`` leaves idle.

        With replicas of all sets of machines: any of them may be the one that loses least by whole turns.
        """
        value: Value = "period" if self.instance.problem.objective == "throughput" else "latency"
        limit = math.inf if value == "period" else self.instance.problem.maximum_period_seconds
        table = self.table(value, limit)
        best = table.best()
        wanted: dict[Counts, None] = dict.fromkeys(best) if self.instance.problem.replicas else {}
        for total in range(2, len(self.instance.machines) + 1):
            _keep_best(wanted, {used: each for used, each in best.items() if sum(used) == total})
        for kind, members in enumerate(self._costs.groups.classes):
            count = len(set(members) & set(chosen.machines))
            if count < len(members):
                _keep_best(wanted, {used: each for used, each in best.items() if used[kind] > count})
        found = [*self._alone]
        for used in wanted:
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            found.append(self.candidate(table.sequence(used)))
        return found

    def nearest_to_memory(self) -> Candidate | None:
        """The plan that lacks the fewest bytes of memory, summed over machines; None if none fits links and pins."""
        unlimited = dataclasses.replace(self.instance, memory=np.full(len(self.instance.machines), math.inf))
        table = lack_table(self.instance, chain_costs(unlimited, self._costs.groups))
        best = table.best()
        found = one_machine_candidates(unlimited)
        if best:
            found.append(self.candidate(table.sequence(min(best, key=lambda used: (best[used], sum(used))))))
        return min(found, key=lambda each: (lack_of(self.instance, each), len(each.machines)), default=None)

    def _possible_periods(self, lowest: float, highest: float) -> Floats:
        """All periods of stages and links between two, ascending; equal ones once."""
        groups, costs = self._costs.groups, self._costs
        links = np.unique(groups.seconds_per_byte[:-1, :-1])[:, None] * costs.crossing_bytes
        alone = np.array([each.flow.period_seconds for each in self._alone])
        found = [
            values[(values > lowest) & (values < highest * (1 - 4 * TOLERANCE))]
            for values in (*costs.period, links, alone)
        ]
        return np.unique(np.concatenate(found))


def solve_chain(search: ChainSearch) -> Candidate | None:
    """The best plan of a chain; None if none fits the memory, links, pins, or keeps to the limits of the problem."""
    problem = search.instance.problem
    if problem.objective == "latency" or problem.maximum_latency_seconds < math.inf:
        fastest = search.fastest(problem.maximum_period_seconds)
        if fastest is None or fastest.flow.latency_seconds > problem.maximum_latency_seconds * (1 + TOLERANCE):
            return None
        latency = fastest.flow.latency_seconds
        limit = latency if problem.objective == "latency" else problem.maximum_latency_seconds
        period = search.least_period_within(limit, fastest.flow.period_seconds)
        if period > problem.maximum_period_seconds * (1 + TOLERANCE):
            return None
    else:
        period = search.least_period()
        if period > problem.maximum_period_seconds * (1 + TOLERANCE):
            return None
    return search.fastest(period)


def is_small_enough(instance: Instance, time_limit_seconds: float = math.inf) -> bool:
    """Whether the tables of this chain take seconds, and no more than there are; else it is searched as any graph."""
    most = min(MOST_STEPS, STEPS_A_SECOND * time_limit_seconds)
    cost = table_cost(machine_classes(instance), len(instance.pieces) + 1, replicas=instance.problem.replicas)
    return cost.steps <= most and cost.bytes <= MOST_MATRIX_BYTES


def _keep_best(wanted: dict[Counts, None], values: dict[Counts, float]) -> None:
    if values:
        wanted[min(values, key=lambda used: (values[used], sum(used)))] = None


def _least(values: Floats, reached: Callable[[float], float | None], known: float) -> float:
    """The first of ascending values under which something is ``reached``, or ``known``, which is above all of them.

    What is reached under a value is not above it, and shortens the way down.
    """
    # The last first: most often the known plan is the best, and one question shows it.
    low, high, probe = 0, len(values), len(values) - 1
    best = known
    while low < high:
        found = reached(float(values[probe]))
        if found is None:
            low = probe + 1
        else:
            best = found
            high = min(probe, int(np.searchsorted(values, found * (1 - TOLERANCE))))
        probe = (low + high) // 2
    return best
