"""Exact best sequence of stages, by dynamic programming over the machines used and the end of the last stage.

Linear partition over unequal machines: best[used, last group][j] = min over k of the cost of a stage k … j on the last
group, combined with the best of best[used − last, previous group][k] and the link between the two groups. Values are
combined by the maximum or by the sum, as the `TableObjective` says. Sets of machines follow PipeEdge (Hu et al. 2022),
with identical machines counted; stages on several machines follow PipeDream (Narayanan et al. 2019).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.placement.problem import TOLERANCE
from tvm_split.placement.search.budget import Budget
from tvm_split.placement.search.candidate import Placement
from tvm_split.placement.search.instance import Floats, Instance
from tvm_split.placement.search.stage_costs import Counts, StageCosts

CALL_STEPS = 45_000
"""Overhead of numpy's calls for one state of a table, in matrix elements."""
MOST_MATRIX_BYTES = 1.0e9
"""Most bytes that the matrices of all groups may take together."""
MOST_STEPS = 2.0e9
"""Most matrix elements that one table may touch; at this size it takes some seconds."""


@dataclass(frozen=True)
class TableObjective:
    """What a table minimises: `PERIOD`, `LATENCY`, or the work of one set of shared cores (`core_work`).

    Attributes:
        matrices_of: function that returns the costs of stages for each group of machines.
        combine: how the costs of successive stages and of the links between them are combined.
        stream, lag: 1 if the cost of a link includes bytes / bandwidth, or its latency; else 0.
    """

    matrices_of: Callable[[StageCosts], tuple[Floats, ...]]
    combine: Callable[[Floats, Floats], Floats]
    stream: int
    lag: int


PERIOD = TableObjective(lambda costs: costs.period, np.maximum, stream=1, lag=0)
LATENCY = TableObjective(lambda costs: costs.latency, np.add, stream=1, lag=1)


def core_work(core_set: int) -> TableObjective:
    """Return the objective that minimises the seconds of one core that a plan needs of a set of shared cores."""
    return TableObjective(lambda costs: costs.work[core_set], np.add, stream=0, lag=0)


def is_affordable(instance: Instance, positions: int, work: float, *, replicas: bool) -> bool:
    """Whether a table over ``positions`` ideals fits the units of work and the memory."""
    sizes = [len(members) for members in instance.classes]
    if replicas:  # pairs of a set and one of its subsets
        groups = math.prod(size + 1 for size in sizes) - 1
        pairs = math.prod((size + 1) * (size + 2) // 2 for size in sizes)
        triples = math.prod(math.comb(size + 3, 3) for size in sizes)
    else:
        groups = len(sizes)
        pairs = math.prod(size + 1 for size in sizes) * groups
        triples = pairs * groups
    matrix = positions**2
    steps = pairs * (matrix + CALL_STEPS) + triples * positions + matrix * len(instance.tensors)
    return steps <= min(work, MOST_STEPS) and groups * (matrix + groups) * 16 <= MOST_MATRIX_BYTES


@dataclass(frozen=True)
class _State:
    """State of the table: for each of ``groups`` (possible last groups), the best value by position, (rows, P)."""

    groups: npt.NDArray[np.intp]
    values: Floats


class StageTable:
    """Table of best values by the machines used; `best` returns the values, `stages` the stages of one value.

    Args:
        costs: costs of the stages.
        objective: what is minimised.
        machine_limit: most machines of a plan.
        stage_count: exact number of stages, or None for any.
        budget: limit for filling the table.
        period_limit: largest period of a stage or link, in seconds.

    Raises:
        OutOfBudgetError: the budget was used up.
    """

    def __init__(
        self,
        costs: StageCosts,
        objective: TableObjective,
        machine_limit: int,
        stage_count: int | None,
        budget: Budget,
        period_limit: float = math.inf,
    ) -> None:
        self._costs = costs
        self._objective = objective
        self._stage_count = stage_count
        self._limit = period_limit * (1 + TOLERANCE)
        self._matrices = objective.matrices_of(costs)
        if self._limit < math.inf:
            pairs = zip(costs.period, self._matrices, strict=True)
            self._matrices = tuple(np.where(period <= self._limit, matrix, math.inf) for period, matrix in pairs)
        self._states: dict[Counts, dict[int, _State]] = {}  # by machines used and number of stages, 0 if that is free
        self._fill(machine_limit, budget)

    def best(self) -> dict[Counts, float]:
        """Return the least value by machines used, for at least two machines; impossible sets are left out."""
        count = self._stage_count or 0
        ends = {used: states[count].values[:, -1] for used, states in self._states.items() if count in states}
        best = {used: float(values.min()) for used, values in ends.items() if sum(used) >= 2}
        return {used: value for used, value in best.items() if math.isfinite(value)}

    def stages(self, used: Counts) -> list[Placement]:
        """Return the stages of the least value on these machines."""
        count, ideals = self._stage_count or 0, self._costs.ideals
        state, end = self._states[used][count], len(ideals) - 1
        group = int(state.groups[state.values[:, -1].argmin()])
        parts: list[tuple[Counts, tuple[int, ...]]] = []
        while any(used):
            held = self._costs.groups.counts[group]
            used, start = _minus(used, held), 0
            if any(used):
                count = max(count - 1, 0)
                state = self._states[used][count]
                arriving = self._arriving(state, group)
                start = int(self._objective.combine(arriving.min(axis=0), self._matrices[group][end]).argmin())
                group = int(state.groups[int(arriving[:, start].argmin())])
            parts.append((held, tuple(np.flatnonzero(ideals[end] & ~ideals[start]).tolist())))
            end = start
        unused = [iter(members) for members in self._costs.groups.classes]
        return [
            Placement(tuple(next(unused[index]) for index, number in enumerate(held) for _ in range(number)), pieces)
            for held, pieces in reversed(parts)
        ]

    def _fill(self, machine_limit: int, budget: Budget) -> None:
        groups = self._costs.groups
        for used in itertools.product(*(range(len(members) + 1) for members in groups.classes)):
            if not 0 < sum(used) <= machine_limit:
                continue
            budget.require()
            rows: dict[int, list[tuple[int, Floats]]] = {}
            for number, counts in enumerate(groups.counts):
                before = _minus(used, counts)
                if min(before) < 0:
                    continue
                if not any(before):
                    first = number, self._matrices[number][:, 0]
                    rows.setdefault(int(self._stage_count is not None), []).append(first)
                for stages, state in self._states.get(before, {}).items():
                    if stages == self._stage_count:
                        continue
                    budget.spend(len(self._costs.ideals) ** 2 + CALL_STEPS)
                    values = self._extended(state, number)
                    if values is not None:
                        rows.setdefault(stages + 1 if stages else 0, []).append((number, values))
            self._states[used] = {
                stages: _State(np.array([row[0] for row in entries]), np.array([row[1] for row in entries]))
                for stages, entries in rows.items()
            }

    def _extended(self, state: _State, group: int) -> Floats | None:
        """Return the best value by end position of a stage on ``group`` that follows ``state``; None if impossible."""
        best = self._arriving(state, group).min(axis=0)
        possible = np.flatnonzero(np.isfinite(best))
        if not len(possible):
            return None
        # A stage begins where a previous stage can end, and ends later.
        first, last = int(possible[0]), int(possible[-1]) + 1
        values = np.full(len(best), math.inf)
        extended = self._objective.combine(self._matrices[group][first:, first:last], best[first:last])
        values[first:] = extended.min(axis=1)
        return values

    def _arriving(self, state: _State, group: int) -> Floats:
        """Return (rows, P): the value up to a position, with the link from each row's group to ``group``."""
        groups, adjacent, objective = self._costs.groups, self._costs.adjacent, self._objective
        lag = groups.latency[state.groups, group, None]
        stream = groups.seconds_per_byte[state.groups, group, None] * adjacent.bytes
        is_sent = adjacent.tensors > 0
        transfer = objective.stream * stream + objective.lag * np.where(is_sent & np.isfinite(lag), lag, 0.0)
        arriving = objective.combine(state.values, transfer)
        arriving[(np.isinf(lag) & is_sent) | (stream > self._limit)] = math.inf
        return arriving


def _minus(used: Counts, counts: Counts) -> Counts:
    return tuple(first - second for first, second in zip(used, counts, strict=True))
