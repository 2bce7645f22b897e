"""Graphs with branches and skips: exactly where that is possible in the time given, else the best found and a bound."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.search.candidate import (
    Candidate,
    Deliveries,
    best_of,
    candidate,
    fits,
    lack_of,
    one_machine_candidates,
    within_limits,
)
from tvm_split.planner.search.exhaustive import ExhaustiveSearch, is_small
from tvm_split.planner.search.ideals import Ideals, ideal_costs, ideals_of
from tvm_split.planner.search.instance import Instance
from tvm_split.planner.search.latency_bound import LatencyBound
from tvm_split.planner.search.latency_search import search_latencies
from tvm_split.planner.search.link_bound import client_bound
from tvm_split.planner.search.local_search import improved
from tvm_split.planner.search.machine_classes import Groups, groups_of, machine_classes
from tvm_split.planner.search.machine_sets import count_of_sets
from tvm_split.planner.search.many_machines import ManyMachines
from tvm_split.planner.search.milp import SOLVER_TOLERANCE, PlacementProgram, period_bound
from tvm_split.planner.search.placement import Placed
from tvm_split.planner.search.simple_plans import simple_plans
from tvm_split.planner.search.stage_costs import StageCosts
from tvm_split.planner.search.stage_dp import MOST_MATRIX_BYTES, StageTable, Value, lack_table, table_cost

CLOSED = 2 * SOLVER_TOLERANCE
"""A gap below this counts as closed, since no solver of linear programs proves more."""

ROUNDING = 1e-8
"""A bound by dynamic programming that is this near is the value itself, summed in another order."""

LARGE_PIECES = 40
LARGE_GAP = 1e-3
"""Above so many pieces the mixed-integer program stops at this gap; below, only where nothing is left to prove."""

MOST_PROGRAM_COLUMNS = 40_000
COLUMNS_A_SECOND = 4_000
"""Of the time limit: more would be put together longer than they are solved."""
MOST_TABLE_STEPS = 1.2e8
"""Matrix elements that a table, and what it is made of, may touch for each second of the time limit."""

COSTS_AT_ONCE = 2
"""Views of what crossing costs that are in memory together."""

MOST_SETS = 1023
"""Sets of machines, of ten unlike ones all; where there would be more, plans with replicas are not tried one by one."""

MOST_TRIED_MACHINES = 16
MOST_TRIED_PIECES = 200
"""With more, each partial plan takes much memory, and there are too many."""

MOST_RELAXED = 20_000
"""Pieces times machines, of which the linear relaxation takes about a second."""

MOST_SEQUENCES = 24
MOST_STARTS = 8

TRIED = "exact: every plan tried, but for those that cannot win"
REACHED = "exact: a plan reaches the lower bound"
PROGRAM = "exact to 1e-6: mixed-integer program (HiGHS)"


@dataclass(frozen=True)
class GraphResult:
    """The best plan found, None if none was; all that keep to the limits; and what was proven.

    ``exact`` if there is no better plan, and surely none at all where none was found.
    """

    chosen: Candidate | None
    others: tuple[Candidate, ...]
    lower_bound_seconds: float
    method: str
    exact: bool


def nearest_to_memory(instance: Instance, time_limit_seconds: float) -> Candidate | None:
    """The plan found that lacks the fewest bytes of memory, summed over machines."""
    unlimited = dataclasses.replace(instance, memory=np.full(len(instance.machines), math.inf))
    return GraphSearch(unlimited, time_limit_seconds).nearest_to(instance)


class GraphSearch:
    """One instance, for so long from ``start`` (monotonic, by default now); ``known`` are plans to begin with.

    No plan is better than ``loose_bound`` seconds: what is best where shared cores do not count.
    """

    def __init__(
        self,
        instance: Instance,
        time_limit_seconds: float,
        start: float | None = None,
        *,
        known: Iterable[Candidate] = (),
        loose_bound: float = 0.0,
        deliveries: Deliveries | None = None,
    ) -> None:
        problem = instance.problem
        self._single = dataclasses.replace(instance, problem=dataclasses.replace(problem, replicas=False))
        # A micro-batch takes one replica, the slowest at worst: a stage is at least as fast without the others.
        only_latency = problem.objective == "latency" and math.isinf(problem.maximum_period_seconds)
        self._single_suffice = not problem.replicas or only_latency
        if self._single_suffice and not is_small(instance):  # only there is the best period of equal latencies found
            instance = self._single
        self._instance = instance
        self._start = time.monotonic() if start is None else start
        self._limit = time_limit_seconds
        self._alone = one_machine_candidates(instance)
        self._deliveries = Deliveries(instance) if deliveries is None else deliveries
        self._found: list[Candidate] = []  # that keep to all demands
        self._keep([*self._alone, *known])
        self._spread_bound = 0.0
        self._latency_bound: LatencyBound | None = None
        self._sources: list[str] = []
        self._raise_bound(loose_bound, "the best plan without shared cores")

    def solve(self) -> GraphResult:
        self._keep(simple_plans(self._instance))
        self._bound_simply()
        self._search_orders()
        # Trying every plan of a few pieces also finds the best of equal ones.
        enough = not is_small(self._instance)
        if enough and self._is_proven():
            return self._result(REACHED)
        self._improve(0.25 if self._instance.problem.objective == "throughput" else 0.5)
        if enough and self._is_proven():
            return self._result(REACHED)
        if self._try_everything():
            return self._result(TRIED)
        if self._is_proven():
            return self._result(REACHED)
        if self._solve_program():
            return self._result(PROGRAM if self._single_suffice else REACHED)
        return self._result(f"the best found in {self._limit:g} s")

    def nearest_to(self, limited: Instance) -> Candidate | None:
        """The plan found that lacks the fewest bytes of the memory of ``limited``."""
        ideals = ideals_of(self._instance)
        groups, _ = self._groups(len(ideals.members))
        costs = ideal_costs(self._instance, groups, ideals, optimistic=False)
        table = lack_table(limited, costs)
        self._measure_sequences(table, groups, ideals)
        return min(self._found, key=lambda each: (lack_of(limited, each), len(each.machines)), default=None)

    def _deadline(self, share: float) -> float:
        return self._start + share * self._limit

    def _best(self) -> Candidate | None:
        return best_of(self._instance.problem, self._found)

    def _keep(self, plans: Iterable[Candidate]) -> None:
        instance = self._instance
        self._found += (each for each in plans if fits(instance, each) and within_limits(instance.problem, each.flow))

    def _bound(self) -> float:
        """In seconds, of plans of one machine, which are all known, and of several."""
        problem = self._instance.problem
        alone = [each.value(problem) for each in self._alone if within_limits(problem, each.flow)]
        return min([self._spread_bound, *alone])

    def _raise_bound(self, value: float, source: str) -> None:
        if value > self._spread_bound:
            self._spread_bound = value
            self._sources.append(source)

    def _is_proven(self) -> bool:
        best = self._best()
        return best is not None and best.value(self._instance.problem) <= self._bound() * (1 + CLOSED)

    def _bound_simply(self) -> None:
        problem = self._instance.problem
        if problem.objective == "latency" or problem.maximum_latency_seconds < math.inf:
            self._latency_bound = LatencyBound(self._instance, self._deadline(0.3))
        if problem.objective == "latency" and self._latency_bound is not None:
            self._raise_bound(self._latency_bound.whole, "the blocks of the graph")
        else:
            if self._instance.seconds.size <= MOST_RELAXED:
                bound = period_bound(self._instance, self._deadline(0.2) - time.monotonic())
                self._raise_bound(bound, "linear relaxation")
            self._raise_bound(client_bound(self._instance) * (1 - 1e-9), "the client's links")

    def _search_orders(self) -> None:
        """Plans whose stages follow each other: by tables where these have all machines, else one stage at a time."""
        ideals = ideals_of(self._instance)
        groups, all_groups = self._groups(len(ideals.members))
        if self._instance.problem.objective == "latency" and not is_small(self._instance):
            self._search_latencies()
            if self._is_proven():
                return
        if all_groups or self._instance.problem.objective == "latency":
            if all_groups or not self._found or self._is_affordable(groups.classes, len(ideals.members), False):
                self._search_ideals(ideals, groups, all_groups)
            return
        deadline = self._deadline(0.35 if self._has_program else 0.85)
        search = ManyMachines(self._instance, deadline, known=self._found, deliveries=self._deliveries)
        search.search()
        self._raise_bound(search.bound, "what the machines' time is worth")
        self._found = []
        self._keep(search.found)
        best = self._deliveries.best_of(self._found, deadline)
        kept = {machine for members in groups.classes for machine in members}
        replicated = any(sum(counts) > 1 for counts in groups.counts)
        affordable = self._is_affordable(groups.classes, len(ideals.members), replicated)
        if affordable and best is not None and not search.surpasses(kept, best.flow.period_seconds):
            self._search_ideals(ideals, groups, all_groups)

    def _search_latencies(self) -> None:
        """Plans whose stages run side by side where the graph has branches, on any of the machines."""
        bound = self._latency_bound
        if bound is None or self._is_proven():
            return
        problem = self._instance.problem
        best = self._best()
        least = math.inf if best is None else best.value(problem)

        def keep(stages: list[Placed]) -> float:
            nonlocal least
            with contextlib.suppress(PlanError):  # a link is missing between stages that are no neighbours
                self._keep([candidate(self._instance, stages)])
                least = min([least, *(each.value(problem) for each in self._found[-1:])])
            return least

        deadline = self._deadline(0.4 if self._has_program else 0.6)
        search_latencies(self._instance, bound, keep, deadline, least=least)

    def _search_ideals(self, ideals: Ideals, groups: Groups, all_groups: bool) -> None:
        """Plans that are sequences of ideals, by three views of what crossing costs; the first gives the bound."""
        problem = self._instance.problem
        bounding = ideal_costs(self._instance, groups, ideals, optimistic=True)
        nothing = np.zeros(len(ideals.members))
        loose = dataclasses.replace(bounding, crossing_bytes=nothing)
        careful = ideal_costs(self._instance, groups, ideals, optimistic=False)
        table = self._table(bounding, "period")
        self._measure_sequences(table, groups, ideals)
        if ideals.complete and all_groups and problem.objective == "throughput":
            bound = min(table.best().values(), default=math.inf) * (1 - 1e-9)
            self._raise_bound(bound, "dynamic programming over the ideals of the graph")
        for costs in (loose, careful):
            if problem.objective == "throughput" and self._is_proven():
                break
            self._measure_sequences(self._table(costs, "period"), groups, ideals)
        if problem.objective == "latency" or problem.maximum_latency_seconds < math.inf:
            for costs in (loose, dataclasses.replace(careful, crossing_bytes=nothing)):  # the stages' own cost has it
                self._measure_sequences(self._table(costs, "latency"), groups, ideals)

    def _table(self, costs: StageCosts, value: Value) -> StageTable:
        problem = self._instance.problem
        limit = problem.maximum_period_seconds if value == "latency" else math.inf
        return StageTable(costs, value, self._instance.machine_limit, problem.stages, limit)

    def _groups(self, positions: int) -> tuple[Groups, bool]:
        """What may hold a stage, and whether that is all there is.

        Where the tables would be too large, single machines only; if these still are too many, the fastest of them.
        """
        classes = machine_classes(self._instance)
        replicas = self._instance.problem.replicas
        total = np.where(np.isfinite(self._instance.seconds), self._instance.seconds, 0.0).sum(axis=0)
        kept = sorted(classes, key=lambda members: float(total[members[0]]))
        while not self._is_affordable(tuple(kept), positions, replicas):
            if replicas:
                replicas = False
            elif len(kept) > 1:
                kept.pop()
            else:
                break
        affordable = self._is_affordable(tuple(kept), positions, replicas)
        complete = affordable and len(kept) == len(classes) and replicas == self._instance.problem.replicas
        return groups_of(self._instance, tuple(sorted(kept)), replicas=replicas), complete

    def _is_affordable(self, classes: tuple[tuple[int, ...], ...], positions: int, replicas: bool) -> bool:
        cost = table_cost(classes, positions, replicas=replicas)
        steps = cost.steps + positions**2 * len(self._instance.tensors)
        return steps <= MOST_TABLE_STEPS * self._limit and COSTS_AT_ONCE * cost.bytes <= MOST_MATRIX_BYTES

    def _measure_sequences(self, table: StageTable, groups: Groups, ideals: Ideals) -> None:
        best = table.best()
        for used in sorted(best, key=lambda each: (best[each], sum(each)))[:MOST_SEQUENCES]:
            sequence = table.sequence(used)
            members = [
                np.zeros(len(self._instance.pieces), dtype=bool),
                *(ideals.members[end] for end in sequence.ends),
            ]
            pieces = [np.flatnonzero(later & ~earlier) for earlier, later in itertools.pairwise(members)]
            machines = groups.machines(list(sequence.groups))
            stages = [
                Placed(group, tuple(int(piece) for piece in each)) for group, each in zip(machines, pieces, strict=True)
            ]
            try:
                self._keep([candidate(self._instance, stages)])
            except PlanError:  # a link is missing between stages that are no neighbours
                continue

    def _improve(self, share: float) -> None:
        """Move pieces in the best few plans, each of other machines."""
        problem = self._instance.problem
        ranked = sorted(self._found, key=lambda each: each.rank(problem))
        different = {frozenset(each.machines): each for each in reversed(ranked)}
        starts = sorted(different.values(), key=lambda each: self._deliveries.of(each).value(problem))[:MOST_STARTS]
        for number, plan in enumerate(starts):
            now = time.monotonic()
            deadline = now + (self._deadline(share) - now) / (len(starts) - number)
            self._keep([improved(self._instance, plan, deadline)])
            if self._is_proven():
                return

    def _try_everything(self) -> bool:
        """Whether that came to its end; where there is too much to try, plans without replicas at least are."""
        problem = self._instance.problem
        for instance in [self._instance, self._single] if problem.replicas else [self._instance]:
            pieces, machines = instance.seconds.shape
            if count_of_sets(instance) > MOST_SETS or machines > MOST_TRIED_MACHINES or pieces > MOST_TRIED_PIECES:
                continue
            deadline = max(self._deadline(0.4), time.monotonic() + 0.15 * self._limit)
            search = ExhaustiveSearch(instance, self._best(), self._latency_bound)
            done, found = search.best(math.inf if is_small(instance) else deadline)
            if found is not None:
                self._keep([found])
            if done and (instance is self._instance or self._single_suffice):
                self._raise_bound(math.inf if found is None else found.value(problem), "trying every plan")
                return True
        return False

    @property
    def _has_program(self) -> bool:
        machines = len(self._instance.machines)
        columns = len(self._instance.pieces) * machines + len(self._instance.tensors) * machines**2
        return machines <= MOST_TRIED_MACHINES and columns <= min(MOST_PROGRAM_COLUMNS, COLUMNS_A_SECOND * self._limit)

    def _solve_program(self) -> bool:
        instance = self._instance
        if not self._has_program or time.monotonic() > self._deadline(1.0):
            self._improve(1.0)
            return self._is_proven()
        large = len(instance.pieces) > LARGE_PIECES
        program = PlacementProgram(instance, self._best(), self._spread_bound)
        bound, plan = program.solve(self._deadline(0.9) - time.monotonic(), LARGE_GAP if large else 1e-7)
        if plan is not None:
            self._keep([plan])
        if self._single_suffice:
            self._raise_bound(bound, "mixed-integer program (HiGHS)")
        self._improve(1.0)
        return self._is_proven() or (bound == math.inf and self._single_suffice)

    def _result(self, method: str) -> GraphResult:
        chosen = self._best()
        problem = self._instance.problem
        exact = method in (TRIED, REACHED, PROGRAM)
        bound = self._bound()
        if chosen is not None:
            value = chosen.value(problem)
            if value <= bound * (1 + ROUNDING):
                bound = value
            bound = min(bound, value)
        if method != TRIED and self._sources:
            method += f"; bound: {self._sources[-1]}"
        return GraphResult(chosen, tuple(self._found), bound, method, exact)
