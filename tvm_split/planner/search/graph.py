"""Search of graphs with branches and skips, and of chains whose tables are too large; returns a plan and a bound."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.search.bounds import SecondsAhead, client_bound
from tvm_split.planner.search.budget import EVALUATION_WORK, Budget, OutOfBudgetError
from tvm_split.planner.search.candidate import (
    Candidate,
    best_of,
    candidate,
    fits,
    lack_of,
    one_machine_candidates,
    within_limits,
)
from tvm_split.planner.search.ideals import Ideals, ideals_of, topological_orders
from tvm_split.planner.search.instance import Instance
from tvm_split.planner.search.latency_beam import LatencyBeam, LatencyOrder
from tvm_split.planner.search.local_search import LocalSearch
from tvm_split.planner.search.machine_classes import Groups, groups_of, machine_classes
from tvm_split.planner.search.mixed_integer import SOLVER_TOLERANCE, PlacementProgram, period_bound
from tvm_split.planner.search.placement import Placement
from tvm_split.planner.search.priced_search import PricedSearch
from tvm_split.planner.search.simple_plans import simple_plans
from tvm_split.planner.search.stage_costs import StageCosts, stage_costs
from tvm_split.planner.search.stage_table import MOST_MATRIX_BYTES, StageTable, Value, lack_table, table_cost

CLOSED = 2 * SOLVER_TOLERANCE
"""Relative gap below which a plan counts as optimal: the solver of linear programs cannot prove a smaller one."""

ROUNDING = 1e-8
"""Relative difference of a bound and a value that is only rounding, because the sums have another order."""

LARGE_PIECES = 40
LARGE_GAP = 1e-3
"""Relative gap at which the mixed-integer program stops for more than `LARGE_PIECES` pieces; else it stops at 1e-7."""

MOST_PROGRAM_COLUMNS = 40_000
MOST_PROGRAM_MACHINES = 16
COLUMN_WORK = 5.0e4
"""Work budget needed per column of the program; with less, building it takes longer than solving it."""
TABLES_SHARE = 0.6
"""Share of the budget that one table, with its stage costs, may take."""

COSTS_AT_ONCE = 2
"""Number of `StageCosts` in memory together: one for the best links and one for the worst."""

MOST_RELAXED = 20_000
"""Most pieces times machines for the linear relaxation, which then takes about a second."""

BEAM_WIDTHS = (2, 8)
MOST_SEQUENCES = 24
MOST_STARTS = 6
"""Most plans from which a local search starts."""

REACHED = "exact: a plan reaches the lower bound"
PROGRAM = "exact to 1e-6: mixed-integer program (HiGHS)"
BEST_FOUND = "the best plan found"


@dataclass(frozen=True)
class Found:
    """Result of a search: the best plan with replica shares of any size, the other plans, and the lower bound.

    ``chosen`` is None if no plan was found. ``others`` are all plans found within the limits. ``exact`` if it is proven
    that no better plan exists, or none at all if ``chosen`` is None.
    """

    chosen: Candidate | None
    others: tuple[Candidate, ...]
    lower_bound_seconds: float
    method: str
    exact: bool


def nearest_to_memory(instance: Instance, budget: Budget) -> Candidate | None:
    """Return the plan found that lacks the fewest bytes of memory, summed over machines."""
    unlimited = dataclasses.replace(instance, memory=np.full(len(instance.machines), math.inf))
    return GraphSearch(unlimited, budget).nearest_to(instance)


class GraphSearch:
    """Search of one instance within a budget.

    Args:
        known: plans to start with.
        loose_bound: a lower bound in seconds: the value of the best plan without shared cores.
    """

    def __init__(
        self, instance: Instance, budget: Budget, *, known: Iterable[Candidate] = (), loose_bound: float = 0.0
    ) -> None:
        problem = instance.problem
        # One replica computes a micro-batch, at worst the slowest. So for latency, one machine per stage is as good.
        only_latency = problem.objective == "latency" and math.isinf(problem.maximum_period_seconds)
        self._single_suffice = not problem.replicas or only_latency
        if problem.replicas and only_latency:
            instance = dataclasses.replace(instance, problem=dataclasses.replace(problem, replicas=False))
        self._instance = instance
        self._budget = budget
        self._alone = one_machine_candidates(instance)
        self._local_search = LocalSearch(instance)
        self._found: list[Candidate] = []  # plans that keep to all limits
        self._keep([*self._alone, *known])
        self._spread_bound = 0.0
        self._sources: list[str] = []
        self._raise_bound(loose_bound, "the best plan without shared cores")

    def solve(self) -> Found:
        self._keep(simple_plans(self._instance))
        self._bound_simply()
        self._search_orders()
        if self._is_proven():
            return self._result(REACHED)
        self._improve(self._budget.until(0.7 if self._has_program else 1.0))
        if self._is_proven():
            return self._result(REACHED)
        if self._has_program and self._solve_program():
            return self._result(PROGRAM if self._single_suffice else REACHED)
        self._improve(self._budget)
        return self._result(REACHED if self._is_proven() else BEST_FOUND)

    def nearest_to(self, limited: Instance) -> Candidate | None:
        """Return the plan found that lacks the fewest bytes of the memory of ``limited``."""
        ideals = ideals_of(self._instance)
        groups, _ = self._groups(len(ideals.members))
        costs = stage_costs(self._instance, groups, ideals, optimistic=False)
        self._measure_sequences(lack_table(limited, costs), groups, ideals)
        return min(self._found, key=lambda each: (lack_of(limited, each), len(each.machines)), default=None)

    def _best(self) -> Candidate | None:
        return best_of(self._instance.problem, self._found)

    def _keep(self, plans: Iterable[Candidate]) -> None:
        instance = self._instance
        self._found += (each for each in plans if fits(instance, each) and within_limits(instance.problem, each.flow))

    def _bound(self) -> float:
        """Return the lower bound in seconds over plans on one machine, which are all known, and on several."""
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
        instance = self._instance
        if instance.problem.objective == "latency":
            least = SecondsAhead(instance, machine_classes(instance)).whole()
            self._raise_bound(least * (1 - 1e-9), "the longest path")
            return
        if instance.seconds.size <= MOST_RELAXED:
            self._budget.spend(1000 * instance.seconds.size)
            self._raise_bound(period_bound(instance, self._budget.until(0.2)), "linear relaxation")
        self._raise_bound(client_bound(instance) * (1 - 1e-9), "the client's links")

    def _search_orders(self) -> None:
        """Search plans whose stages follow each other: by tables if they can hold all machines, else stage by stage."""
        instance = self._instance
        ideals = ideals_of(instance)
        groups, all_groups = self._groups(len(ideals.members))
        budget = self._budget.until(0.4 if self._has_program else 0.6)
        if instance.problem.objective == "latency":
            self._search_latencies(budget)
            if not self._is_proven() and (all_groups or not self._found):
                self._search_ideals(ideals, groups, all_groups)
            return
        if all_groups:
            self._search_ideals(ideals, groups, all_groups)
            return
        search = PricedSearch(instance, budget, known=self._found)
        search.search()
        self._raise_bound(search.bound, "what the machines' time is worth")
        self._keep(search.found[len(self._found) :])
        best = self._best()
        kept = {machine for members in groups.classes for machine in members}
        replicated = any(sum(counts) > 1 for counts in groups.counts)
        affordable = self._is_affordable(groups.classes, len(ideals.members), replicated)
        if affordable and best is not None and not search.surpasses(kept, best.flow.period_seconds):
            self._search_ideals(ideals, groups, all_groups)

    def _search_latencies(self, budget: Budget) -> None:
        """Search plans for latency, on any of the machines; stages of parallel branches run at the same time."""
        beams = [
            LatencyBeam(self._instance, LatencyOrder(self._instance, order))
            for order in dict.fromkeys(map(tuple, topological_orders(self._instance)))
        ]
        for width, beam in itertools.product(BEAM_WIDTHS, beams):
            if self._is_proven() or (self._found and budget.is_used_up):
                return
            for stages in beam.plans(width, budget if self._found else Budget()):
                self._measure(stages)

    def _search_ideals(self, ideals: Ideals, groups: Groups, all_groups: bool) -> None:
        """Search plans that are sequences of ideals, with the best links (which give the bound) and with the worst."""
        problem, instance = self._instance.problem, self._instance
        is_throughput = problem.objective == "throughput"
        best, worst = (stage_costs(instance, groups, ideals, optimistic=each) for each in (True, False))
        try:
            table = self._table(best, "period")
            self._measure_sequences(table, groups, ideals)
            if ideals.complete and all_groups and is_throughput:
                bound = min(table.best().values(), default=math.inf) * (1 - 1e-9)
                self._raise_bound(bound, "dynamic programming over the ideals of the graph")
            if not (is_throughput and self._is_proven()):
                self._measure_sequences(self._table(worst, "period"), groups, ideals)
            if not is_throughput or problem.maximum_latency_seconds < math.inf:
                for costs in (best, worst):
                    self._measure_sequences(self._table(costs, "latency"), groups, ideals)
        except OutOfBudgetError:
            return

    def _table(self, costs: StageCosts, value: Value) -> StageTable:
        problem = self._instance.problem
        limit = problem.maximum_period_seconds if value == "latency" else math.inf
        budget = self._budget if self._found else Budget()
        return StageTable(costs, value, self._instance.machine_limit, problem.stages, limit, budget=budget)

    def _groups(self, positions: int) -> tuple[Groups, bool]:
        """Return the groups that may hold a stage, and whether these are all groups.

        If the tables would be too large, return single machines only; if these are still too many, the fastest ones.
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
        work = TABLES_SHARE * self._budget.whole_work
        return steps <= work and COSTS_AT_ONCE * cost.bytes <= MOST_MATRIX_BYTES

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
            self._measure(
                [Placement(group, tuple(each.tolist())) for group, each in zip(machines, pieces, strict=True)]
            )

    def _measure(self, stages: list[Placement]) -> None:
        """Evaluate a plan, and keep it if it keeps to all limits."""
        self._budget.spend(EVALUATION_WORK * len(stages))
        try:
            self._keep([candidate(self._instance, stages)])
        except PlanError:  # a link is missing between stages that are not adjacent
            return

    def _improve(self, budget: Budget) -> None:
        """Run local searches from the best few plans on different machines; half the budget is for the best result."""
        problem = self._instance.problem
        ranked = sorted(self._found, key=lambda each: each.rank(problem))
        different = {frozenset(each.machines): each for each in reversed(ranked)}
        starts = sorted(different.values(), key=lambda each: each.rank(problem))[:MOST_STARTS]
        changed = []
        for number, plan in enumerate(starts):
            part = budget.rest(1 / (2 * len(starts) - number))
            changed.append(self._local_search.improved(plan, part))
            self._keep(changed[-1:])
            if self._is_proven():
                return
        best = best_of(problem, changed)
        if best is not None:
            self._keep([self._local_search.improved(best, budget)])

    @property
    def _has_program(self) -> bool:
        machines = len(self._instance.machines)
        columns = len(self._instance.pieces) * machines + len(self._instance.tensors) * machines**2
        most = min(MOST_PROGRAM_COLUMNS, self._budget.whole_work / COLUMN_WORK)
        return machines <= MOST_PROGRAM_MACHINES and columns <= most

    def _solve_program(self) -> bool:
        instance = self._instance
        if self._budget.is_used_up:
            return False
        large = len(instance.pieces) > LARGE_PIECES
        program = PlacementProgram(instance, self._best(), self._spread_bound)
        bound, plan = program.solve(self._budget.until(0.95), LARGE_GAP if large else 1e-7)
        if plan is not None:
            self._keep([plan])
        if self._single_suffice:
            self._raise_bound(bound, "mixed-integer program (HiGHS)")
        return self._is_proven() or (bound == math.inf and self._single_suffice)

    def _result(self, method: str) -> Found:
        chosen = self._best()
        bound = self._bound()
        if chosen is not None:
            value = chosen.value(self._instance.problem)
            bound = value if value <= bound * (1 + ROUNDING) else bound
        exact = method != BEST_FOUND
        if self._sources:
            method += f"; bound: {self._sources[-1]}"
        return Found(chosen, tuple(self._found), bound, method, exact)
