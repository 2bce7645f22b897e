"""Exact best sequence of stages, by dynamic programming over the machines used and the end of the last stage.

Linear partition over unequal machines: best[used, last group][j] = min over k of the cost of a stage k … j on the last
group, combined with the best of best[used − last, previous group][k] and the link between the two groups. Values are
combined by the maximum for the period and by the sum for latency and loads; loads have no link cost. Sets of machines
follow PipeEdge (Hu et al. 2022), with identical machines counted; stages on several machines follow PipeDream
(Narayanan et al. 2019).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tvm_split.planner.problem import TOLERANCE
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.machine_classes import Counts
from tvm_split.planner.search.stage_costs import StageCosts

CALL_STEPS = 45_000
"""Overhead of numpy's calls for one state of a table, in matrix elements."""

MOST_MATRIX_BYTES = 1.0e9
"""Most bytes that the matrices of all groups may take together."""

MOST_SECONDS = 1.0e300

Value = Literal["period", "latency", "load"]


@dataclass(frozen=True)
class TableCost:
    """Cost of dynamic programming over sets of machines: ``steps`` are matrix elements touched, ``bytes`` memory."""

    steps: float
    bytes: float


def table_cost(classes: tuple[tuple[int, ...], ...], positions: int, *, replicas: bool) -> TableCost:
    """Return the cost of one table over ``positions`` cuts, without building it."""
    sizes = [len(members) for members in classes]
    if replicas:  # pairs of a set and one of its subsets
        groups = math.prod(size + 1 for size in sizes) - 1
        pairs = math.prod((size + 1) * (size + 2) // 2 for size in sizes)
        triples = math.prod(math.comb(size + 3, 3) for size in sizes)
    else:
        groups = len(classes)
        pairs = math.prod(size + 1 for size in sizes) * groups
        triples = pairs * groups
    matrix = positions**2
    return TableCost(pairs * (matrix + CALL_STEPS) + triples * positions, groups * matrix * 16 + groups**2 * 16)


@dataclass(frozen=True)
class Sequence:
    """A sequence of stages: their groups, and the positions where they end."""

    groups: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """State of the table: for each of ``rows`` (possible last groups), the best value by position, (len(rows), P)."""

    rows: npt.NDArray[np.intp]
    values: Floats


class StageTable:
    """Table of best values by the machines used; `best` returns the values, `sequence` the stages of one value.

    Args:
        costs: costs of the stages.
        value: what is minimised.
        machine_limit: most machines of a plan.
        stage_count: exact number of stages, or None for any.
        period_limit: largest period of a stage or link, in seconds.
        value_limit: largest value of a plan.
        budget: limit for filling the table.

    Raises:
        OutOfBudgetError: the budget was used up.
    """

    def __init__(
        self,
        costs: StageCosts,
        value: Value,
        machine_limit: int,
        stage_count: int | None = None,
        period_limit: float = math.inf,
        value_limit: float = math.inf,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget or Budget()
        self._costs = costs
        self._value = value
        self._replicated = any(sum(counts) > 1 for counts in costs.groups.counts)
        self._stage_count = stage_count
        self._limit = period_limit * (1 + TOLERANCE)
        self._value_limit = min(value_limit * (1 + TOLERANCE), MOST_SECONDS)
        self._stages = [self._stage(number) for number in range(len(costs.groups.counts))]
        self._states: dict[tuple[int, Counts], _State] = {}
        self._machine_limit = machine_limit
        if stage_count is not None and not self._replicated:
            self._machine_limit = min(machine_limit, stage_count)
        self._fill()

    def best(self) -> dict[Counts, float]:
        """Return the least value by machines used, for at least two machines; impossible sets are left out."""
        found: dict[Counts, float] = {}
        for (stages, used), state in self._states.items():
            value = float(state.values[:, -1].min())
            if sum(used) < 2 or math.isinf(value) or not self._is_wanted(stages, used):
                continue
            found[used] = min(value, found.get(used, math.inf))
        return found

    def sequence(self, used: Counts) -> Sequence:
        """Return the stages of the least value on these machines; ties go to the fewest stages."""
        candidates = [
            (float(state.values[row, -1]), stages, row)
            for (stages, counts), state in self._states.items()
            if counts == used and self._is_wanted(stages, used)
            for row in range(len(state.rows))
        ]
        _, stages, row = min(candidates)
        group = int(self._states[stages, used].rows[row])
        end = len(self._costs.crossing_bytes) - 1
        groups, ends = [group], [end]
        while True:
            before = _minus(used, self._costs.groups.counts[group])
            if not any(before):
                return Sequence(tuple(reversed(groups)), tuple(reversed(ends)))
            stages = max(stages - 1, 0)
            state = self._states[stages, before]
            arriving = self._arriving(state, group)
            start = int(self._combine(arriving.min(axis=0), self._stages[group][end]).argmin())
            group = int(state.rows[int(arriving[:, start].argmin())])
            used, end = before, start
            groups.append(group)
            ends.append(end)

    def _is_wanted(self, stages: int, used: Counts) -> bool:
        if self._stage_count is None:
            return True
        return (stages if self._replicated else sum(used)) == self._stage_count

    def _fill(self) -> None:
        groups = self._costs.groups
        sizes = [range(len(members) + 1) for members in groups.classes]
        for used in itertools.product(*sizes):
            if not 0 < sum(used) <= self._machine_limit:
                continue
            self._budget.require()
            found: dict[int, list[tuple[int, Floats]]] = {}
            for number, counts in enumerate(groups.counts):
                before = _minus(used, counts)
                if min(before) < 0:
                    continue
                if not any(before):
                    found.setdefault(int(self._counts_stages), []).append((number, self._stages[number][:, 0]))
                for stages, state in self._states_with(before):
                    self._budget.spend(len(self._costs.crossing_bytes) ** 2 + CALL_STEPS)
                    values = self._extended(state, number)
                    if values is not None:
                        found.setdefault(stages + int(self._counts_stages), []).append((number, values))
            for stages, rows in found.items():
                self._states[stages, used] = _State(
                    np.array([number for number, _ in rows]), np.array([values for _, values in rows])
                )

    @property
    def _counts_stages(self) -> bool:
        return self._stage_count is not None and self._replicated

    def _states_with(self, used: Counts) -> list[tuple[int, _State]]:
        last = (self._stage_count or 1) - 1 if self._counts_stages else 0
        return [(stages, self._states[stages, used]) for stages in range(last + 1) if (stages, used) in self._states]

    def _extended(self, state: _State, group: int) -> Floats | None:
        """Return the best value by end position of a stage on ``group`` that follows ``state``; None if impossible."""
        best = self._arriving(state, group).min(axis=0)
        possible = np.flatnonzero(best <= self._value_limit)
        if not len(possible):
            return None
        # A stage begins where a previous stage can end, and ends later.
        first, last = int(possible[0]), int(possible[-1]) + 1
        found = np.full(len(best), math.inf)
        stages = self._stages[group][first:, first:last]
        found[first:] = self._combine(stages, best[first:last]).min(axis=1)
        return found

    def _arriving(self, state: _State, group: int) -> Floats:
        """Return (rows, P): the value up to a position, with the link from each row's group to ``group``."""
        groups, costs = self._costs.groups, self._costs
        slow, lag = groups.seconds_per_byte[state.rows, group], groups.latency[state.rows, group]
        stream = slow[:, None] * costs.crossing_bytes
        crosses = costs.crosses > 0
        unlinked = np.isinf(lag)
        blocked = unlinked[:, None] & crosses
        if self._limit < math.inf:
            blocked |= stream > self._limit
        if self._value == "latency":
            stream = stream + np.where(unlinked, 0.0, lag)[:, None] * crosses
        found = state.values.copy() if self._value == "load" else self._combine(state.values, stream)
        found[blocked] = math.inf
        return found

    def _stage(self, group: int) -> Floats:
        costs = self._costs
        matrix = {"period": costs.period, "latency": costs.latency, "load": costs.load}[self._value][group]
        return matrix if math.isinf(self._limit) else np.where(costs.period[group] <= self._limit, matrix, math.inf)

    def _combine(self, one: Floats, other: Floats) -> Floats:
        return np.maximum(one, other) if self._value == "period" else one + other


def lack_table(instance: Instance, costs: StageCosts) -> StageTable:
    """Return a table of the bytes of memory that stages lack in an instance, summed over machines.

    Args:
        costs: costs of the same stages without a memory limit.
    """
    groups = costs.groups
    lacks = [
        sum(
            count * np.maximum(costs.memory - instance.memory[members[0]], 0.0)
            for members, count in zip(groups.classes, counts, strict=True)
            if count
        )
        for counts in groups.counts
    ]
    load = tuple(
        np.where(np.isinf(possible), math.inf, lack) for possible, lack in zip(costs.latency, lacks, strict=True)
    )
    costs = dataclasses.replace(costs, load=load)
    return StageTable(costs, "load", instance.machine_limit, instance.problem.stages)


def _minus(used: Counts, counts: Counts) -> Counts:
    return tuple(one - other for one, other in zip(used, counts, strict=True))
