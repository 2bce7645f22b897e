"""Chains on alike machines that all share the same, too few cores: exactly, whatever the cores allow.

What the machines keep busy of the cores adds up over stages, so under a period that no stage may exceed, the least sum
is found by one dynamic programming; the more a period allows, the less that is. The least period is where the two meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.candidate import (
    Candidate,
    best_of,
    candidate,
    fits,
    one_machine_candidates,
    within_limits,
)
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.machine_classes import groups_of, machine_classes
from tvm_split.planner.search.placement import Placed
from tvm_split.planner.search.stage_costs import chain_costs, crossings_of_chain

Counts = npt.NDArray[np.intp]
MOST_STAGES = 16
"""Best plans are given for each number of stages up to this, besides the best of all."""
MOST_TABLE = 2**24
"""Machines times pairs of cuts: some seconds."""


def is_crowded_chain(instance: Instance) -> bool:
    """Whether this search is for such a chain: a throughput, without replicas and limits to the latency."""
    problem = instance.problem
    if problem.objective != "throughput" or problem.replicas or problem.maximum_latency_seconds < math.inf:
        return False
    if not instance.is_chain or len(instance.core_sets) != 1 or len(machine_classes(instance)) != 1:
        return False
    members, _ = instance.core_sets[0]
    everywhere = set(range(len(instance.machines))) <= set(members)
    return (
        everywhere
        and problem.machines[0].cores > 0
        and instance.machine_limit * (len(instance.pieces) + 1) ** 2 <= MOST_TABLE
    )


def solve_crowded_chain(instance: Instance) -> tuple[Candidate | None, list[Candidate]]:
    """The best plan, and the best of each number of stages; none if there is none that keeps to the limits."""
    found = [*one_machine_candidates(instance), *_CrowdedChain(instance).plans()]
    kept = [each for each in found if fits(instance, each) and within_limits(instance.problem, each.flow)]
    return best_of(instance.problem, kept), kept


class _CrowdedChain:
    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        groups = groups_of(instance, machine_classes(instance), replicas=False)
        costs = chain_costs(instance, groups)
        sizes, counts = crossings_of_chain(instance)
        members, cores = instance.core_sets[0]
        own = instance.problem.machines[0].cores
        self._most = instance.machine_limit
        self._busy = costs.computed[0] * own / cores
        self._period = costs.period[0]
        self._wire = costs.crossing_bytes * groups.seconds_per_byte[0, 0]
        self._wire[[0, -1]] = 0.0
        self._is_linked = math.isfinite(groups.latency[0, 0])
        ends = (0, len(sizes) - 1)
        client = instance.client in members
        problem = instance.problem
        self._client = (
            math.fsum(
                counts[end] * problem.client_transfer_seconds + sizes[end] * problem.client_transfer_seconds_per_byte
                for end in ends
            )
            / cores
            if client
            else 0.0
        )
        self._sums = lru_cache(maxsize=None)(self._sums_under)

    def plans(self) -> Iterator[Candidate]:
        """The best plan of any number of stages, and of each."""
        if not self._is_linked or self._most < 2:
            return
        wanted = self._instance.problem.stages
        numbers = range(2, min(self._most, MOST_STAGES) + 1) if wanted is None else [wanted]
        anything = [None] if wanted is None else []
        for number in (*anything, *(each for each in numbers if each > 1)):
            period = self._least_period(number)
            if period is not None:
                yield candidate(self._instance, self._stages(period, number))

    def _least_period(self, number: int | None) -> float | None:
        """Under which the cores are busy for the least time beyond it, if anything fits."""
        values = np.unique(np.concatenate([self._period[np.isfinite(self._period)], self._wire]))
        low, high = 0, len(values)  # the first period that the cores allow, too
        while low < high:
            middle = (low + high) // 2
            if self._cores(float(values[middle]), number) <= values[middle]:
                high = middle
            else:
                low = middle + 1
        near = [float(each) for each in values[max(low - 1, 0) : low + 1]]
        found = {each: max(each, self._cores(each, number)) for each in near}
        best = min(found, key=lambda each: found[each], default=None)
        return best if best is not None and math.isfinite(found[best]) else None

    def _cores(self, period: float, number: int | None) -> float:
        """The least period that the cores allow, of plans whose stages and links keep to one."""
        ends = self._sums(period)[0][:, -1]
        return self._client + float(ends[2:].min(initial=math.inf) if number is None else ends[number])

    def _sums_under(self, period: float) -> tuple[Floats, Counts]:
        """(K + 1, P) the least that so many stages up to a cut keep busy, and where the last of them begins."""
        possible = np.where(self._period <= period, self._busy, math.inf)
        possible[:, self._wire > period] = math.inf
        length = len(self._wire)
        sums = np.full((self._most + 1, length), math.inf)
        begins = np.zeros((self._most + 1, length), dtype=np.intp)
        sums[0, 0] = 0.0
        for stages in range(1, self._most + 1):
            reached = sums[stages - 1][None, :] + possible
            begins[stages] = reached.argmin(axis=1)
            sums[stages] = reached[np.arange(length), begins[stages]]
        return sums, begins

    def _stages(self, period: float, number: int | None) -> list[Placed]:
        sums, begins = self._sums(period)
        stages = 2 + int(np.argmin(sums[2:, -1])) if number is None else number
        cuts = [sums.shape[1] - 1]
        for left in range(stages, 0, -1):
            cuts.append(int(begins[left, cuts[-1]]))
        cuts.reverse()
        return [
            Placed((machine,), tuple(range(start, end)))
            for machine, (start, end) in enumerate(itertools.pairwise(cuts))
        ]
