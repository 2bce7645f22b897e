"""Exact search of chains: least period, least latency, and either one under a limit on the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from tvm_split.planner.problem import TOLERANCE
from tvm_split.planner.search.budget import EVALUATION_WORK, Budget
from tvm_split.planner.search.candidate import (
    Candidate,
    best_of,
    candidate,
    fits,
    lack_of,
    one_machine_candidates,
    within_limits,
)
from tvm_split.planner.search.ideals import ideals_of
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.machine_classes import Counts, groups_of, machine_classes
from tvm_split.planner.search.placement import Placement
from tvm_split.planner.search.stage_costs import StageCosts, stage_costs
from tvm_split.planner.search.stage_table import (
    MOST_MATRIX_BYTES,
    Sequence,
    StageTable,
    Value,
    lack_table,
    table_cost,
)

MOST_STAGES = 16
"""On shared cores, the search also returns the best plan for each number of stages up to this."""
MOST_OVERSUBSCRIBED = 2**24
"""Limit of machines times pairs of cuts for `solve_oversubscribed`; at this size it takes some seconds."""
MOST_STEPS = 2.0e9
"""Limit of matrix elements that one table may touch; at this size it takes some seconds."""


class ChainSearch:
    """Answers several questions about one chain; computes the costs of its stages once.

    A single machine has no contention, so plans on one machine are evaluated outside the tables.
    Methods raise `OutOfBudgetError` if the budget does not suffice.
    """

    def __init__(self, instance: Instance, budget: Budget | None = None) -> None:
        self.instance = instance
        self.budget = budget or Budget()
        groups = groups_of(instance, machine_classes(instance), replicas=instance.problem.replicas)
        self.costs: StageCosts = stage_costs(instance, groups, ideals_of(instance))
        self._alone = one_machine_candidates(instance)

    def table(self, value: Value, period_limit: float = math.inf, value_limit: float = math.inf) -> StageTable:
        problem, machines = self.instance.problem, self.instance.machine_limit
        return StageTable(self.costs, value, machines, problem.stages, period_limit, value_limit, self.budget)

    def least_period(self) -> float:
        """Return the least period of any plan in seconds, at any latency; infinite if there is no plan."""
        alone = [each.flow.period_seconds for each in self._alone]
        return min([*alone, *self.table("period").best().values()], default=math.inf)

    def fastest(self, period_limit: float = math.inf, latency_limit: float = math.inf) -> Candidate | None:
        """Return the plan of least latency within both limits, or None; ties go to the fewest machines."""
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
        """Return the least period of a plan within a latency limit, by binary search.

        A plan with the period ``known`` keeps to the limit. The period of a plan is that of a stage or a link, so there
        are finitely many values to search.
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
        machines = self.costs.groups.machines(list(sequence.groups))
        return candidate(
            self.instance,
            [
                Placement(group, tuple(range(start, end)))
                for group, start, end in zip(machines, starts, sequence.ends, strict=True)
            ],
        )

    def others(self, chosen: Candidate) -> list[Candidate]:
        """Return the best plan of every number of machines, and the best that use what ``chosen`` leaves idle.

        With replicas, return the best plan of every set of machines: for any of them, the round-robin schedule may lose
        least.
        """
        value: Value = "period" if self.instance.problem.objective == "throughput" else "latency"
        limit = math.inf if value == "period" else self.instance.problem.maximum_period_seconds
        table = self.table(value, limit)
        best = table.best()
        wanted: dict[Counts, None] = dict.fromkeys(best) if self.instance.problem.replicas else {}
        for total in range(2, len(self.instance.machines) + 1):
            _keep_best(wanted, {used: each for used, each in best.items() if sum(used) == total})
        for kind, members in enumerate(self.costs.groups.classes):
            count = len(set(members) & set(chosen.machines))
            if count < len(members):
                _keep_best(wanted, {used: each for used, each in best.items() if used[kind] > count})
        found = [*self._alone]
        for used in wanted:
            self.budget.require()
            self.budget.spend(EVALUATION_WORK)
            found.append(self.candidate(table.sequence(used)))
        return found

    def nearest_to_memory(self) -> Candidate | None:
        """Return the plan that lacks the fewest bytes of memory in total; None if no plan fits links and pins."""
        unlimited = dataclasses.replace(self.instance, memory=np.full(len(self.instance.machines), math.inf))
        table = lack_table(self.instance, stage_costs(unlimited, self.costs.groups, ideals_of(unlimited)))
        best = table.best()
        found = one_machine_candidates(unlimited)
        if best:
            found.append(self.candidate(table.sequence(min(best, key=lambda used: (best[used], sum(used))))))
        return min(found, key=lambda each: (lack_of(self.instance, each), len(each.machines)), default=None)

    def _possible_periods(self, lowest: float, highest: float) -> Floats:
        """Return all distinct periods of stages and links between two values, ascending."""
        groups, costs = self.costs.groups, self.costs
        links = np.unique(groups.seconds_per_byte[:-1, :-1])[:, None] * costs.crossing_bytes
        alone = np.array([each.flow.period_seconds for each in self._alone])
        found = [
            values[(values > lowest) & (values < highest * (1 - 4 * TOLERANCE))]
            for values in (*costs.period, links, alone)
        ]
        return np.unique(np.concatenate(found))


def solve_chain(search: ChainSearch) -> Candidate | None:
    """Return the best plan of a chain; None if none fits memory, links, pins and the problem's limits."""
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


def is_oversubscribed(instance: Instance) -> bool:
    """Whether `solve_oversubscribed` can solve a problem.

    It needs a chain, identical machines that all share the same cores, and throughput as the objective, without
    replicas and without a latency limit.
    """
    problem = instance.problem
    if problem.objective != "throughput" or problem.replicas or problem.maximum_latency_seconds < math.inf:
        return False
    if not instance.is_chain or len(instance.core_sets) != 1 or len(machine_classes(instance)) != 1:
        return False
    everywhere = set(range(len(instance.machines))) <= set(instance.core_sets[0][0])
    size = instance.machine_limit * (len(instance.pieces) + 1) ** 2
    return everywhere and problem.machines[0].cores > 0 and size <= MOST_OVERSUBSCRIBED


def solve_oversubscribed(instance: Instance) -> tuple[Candidate | None, list[Candidate]]:
    """Return the best plan on shared cores, and the best of each number of stages; None if none keeps to the limits.

    The core time of the stages adds up. For a given period limit, one table gives the least sum over all plans; the
    sum falls as the limit grows. The least period is where the two are equal.
    """
    search = _OversubscribedSearch(instance)
    numbers = range(2, min(instance.machine_limit, MOST_STAGES) + 1)
    plans = [*one_machine_candidates(instance), *(search.best(number) for number in (None, *numbers))]
    kept = [
        each
        for each in plans
        if each is not None and fits(instance, each) and within_limits(instance.problem, each.flow)
    ]
    return best_of(instance.problem, kept), kept


class _OversubscribedSearch:
    def __init__(self, instance: Instance) -> None:
        search = ChainSearch(instance)
        members, cores = instance.core_sets[0]
        own = instance.problem.machines[0].cores
        costs = search.costs
        self._search = search
        self._costs = dataclasses.replace(costs, load=(costs.computed[0] * own / cores,))
        flow = candidate(instance, [Placement((0,), tuple(range(len(instance.pieces))))]).flow
        problem = instance.problem
        taken = flow.counts[-1] * problem.client_transfer_seconds
        taken += flow.sizes[-1] * problem.client_transfer_seconds_per_byte
        self._client = taken / cores if instance.client in members else 0.0
        links = costs.crossing_bytes * costs.groups.seconds_per_byte[0, 0]
        self._periods = np.unique(np.concatenate([costs.period[0][np.isfinite(costs.period[0])], links]))
        self._table = lru_cache(maxsize=None)(self._table_of)

    def _table_of(self, period: float) -> StageTable:
        return StageTable(self._costs, "load", self._search.instance.machine_limit, period_limit=period)

    def best(self, stages: int | None) -> Candidate | None:
        """Return the plan of least period with ``stages`` stages; None means any number from two."""
        low, high = 0, len(self._periods)  # search the first period that the cores also allow
        while low < high:
            middle = (low + high) // 2
            if self._least(middle, stages)[0] <= self._periods[middle]:
                high = middle
            else:
                low = middle + 1
        near = range(max(low - 1, 0), min(low + 1, len(self._periods)))
        found = {at: max(float(self._periods[at]), self._least(at, stages)[0]) for at in near}
        at = min(found, key=lambda each: found[each], default=None)
        if at is None or math.isinf(found[at]):
            return None
        table = self._table(float(self._periods[at]))
        return self._search.candidate(table.sequence(self._least(at, stages)[1]))

    def _least(self, at: int, stages: int | None) -> tuple[float, Counts]:
        """Return the least core-limited period of plans within period number ``at``, and that plan's machine count."""
        loads = self._table(float(self._periods[at])).best()
        loads = {used: load for used, load in loads.items() if stages in (None, used[0])}
        used = min(loads, key=lambda each: loads[each], default=(0,))
        return self._client + loads.get(used, math.inf), used


def is_small_enough(instance: Instance, work: float = math.inf) -> bool:
    """Whether the tables of a chain fit the limits of work and memory; if not, it is searched as a graph."""
    most = min(MOST_STEPS, work)
    cost = table_cost(machine_classes(instance), len(instance.pieces) + 1, replicas=instance.problem.replicas)
    return cost.steps <= most and cost.bytes <= MOST_MATRIX_BYTES


def _keep_best(wanted: dict[Counts, None], values: dict[Counts, float]) -> None:
    if values:
        wanted[min(values, key=lambda used: (values[used], sum(used)))] = None


def _least(values: Floats, reached: Callable[[float], float | None], known: float) -> float:
    """Return the least reachable value by binary search over ascending values; ``known`` if none can be reached.

    ``known`` is above all values. ``reached`` returns a value not above its argument, which narrows the interval.
    """
    # Probe the last value first: most often the known plan is the best, and one probe shows it.
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
