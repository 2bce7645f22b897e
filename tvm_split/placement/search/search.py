"""Search of one problem: simple plans, tables, beams and local search, until a plan is within 1 % of a lower bound.

`Search.run` is the order of the methods, after plans on one machine and simple plans. Which of them a problem needs, by
objective, graph and number of machines, is in a table of docs/planner.md. Tables (`stage_table`) are filled if
`is_affordable`; a graph needs at most 1,200 ideals. With replicas, 8 machines are affordable; up to 10, tables without
replicas still give plans, but no bound. Beams (`priced_search`) have one or two replicas per stage, local search any
number. The relaxation is `period_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import InstanceOf

from tvm_split.errors import NoPlanError
from tvm_split.parameters import Seconds
from tvm_split.placement.problem import DEFAULT_TIME_LIMIT_SECONDS, TOLERANCE, Problem
from tvm_split.placement.read_problem import as_problem
from tvm_split.placement.search.bounds import (
    SOLVER_TOLERANCE,
    client_bound,
    client_transfers,
    longest_path,
    period_bound,
)
from tvm_split.placement.search.budget import EVALUATION_WORK, WORK_PER_SECOND, Budget, OutOfBudgetError
from tvm_split.placement.search.candidate import (
    Candidate,
    Placement,
    best_of,
    best_scheduled,
    one_machine_candidates,
    scheduled,
    tried,
)
from tvm_split.placement.search.explain import alternatives, require_places, why_impossible, why_no_more_machines
from tvm_split.placement.search.instance import Instance, instance_of
from tvm_split.placement.search.local_search import LocalSearch
from tvm_split.placement.search.priced_search import WIDTHS, PricedSearch
from tvm_split.placement.search.simple_plans import simple_plans
from tvm_split.placement.search.stage_costs import Counts, StageCosts, groups_of, ideals_of, stage_costs
from tvm_split.placement.search.stage_table import LATENCY, PERIOD, StageTable, TableObjective, core_work, is_affordable
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.placement.strategy import Strategy
from tvm_split.units import seconds_text

CLOSED = 2 * SOLVER_TOLERANCE
"""Relative gap below which a plan counts as optimal: the solver of linear programs cannot prove a smaller one."""
RESOLVED = 0.01
"""Relative gap at which the search ends, since no measurement resolves it.

Of three profiles in a row, each predicts another period for one split of ResNet-50 over two workers: 36.7 to 38.1 ms.
"""
ROUNDING = 1e-8
"""Relative difference of a bound and a value that is only rounding, because the sums have another order."""
TABLES_SHARE = 0.6
"""Share of the budget that one table, with its stage costs, may take."""
MOST_RELAXED = 20_000
"""Most pieces times classes of machines for the linear relaxation, which then takes about a second."""
MOST_SEQUENCES = 24
"""Most plans of a table that are evaluated, besides the best ones of each number of machines."""
MOST_STARTS = 3
"""Most plans from which a local search starts."""
REACHED = "exact: a plan reaches the lower bound"
BEST_FOUND = "the best plan found"
DIAGNOSIS_WORK = WORK_PER_SECOND
"""Units of work of each attempt with a demand left out; none starts after twice as much in total."""
SCHEDULED_AFTERWARDS = "; the bound allows any replica shares, the plan uses round-robin schedules"


class Search:
    """Search of one instance within a budget."""

    def __init__(self, instance: Instance, budget: Budget) -> None:
        problem = instance.problem
        # One replica computes a micro-batch, at worst the slowest. So for latency, one machine per stage is as good.
        only_latency = problem.objective == "latency" and math.isinf(problem.maximum_period_seconds)
        self._single_suffice = not problem.replicas or only_latency
        self._instance, self._problem, self._budget = instance, problem, budget
        self._alone = one_machine_candidates(instance)
        self.plans: list[Candidate] = []
        """All plans so far that keep to the limits."""
        self._local_search = LocalSearch(instance, replicas=not self._single_suffice)
        self._has_tables = False  # of all groups of machines
        self._spread_bound, self._source = 0.0, ""

    def run(self) -> Search:
        """Search until the best plan reaches the lower bound or the budget is used up; return the search."""
        self._keep([*self._alone, *simple_plans(self._instance)])
        for method in (self._search_tables, self._raise_bounds, self._search_beams, self._search_locally):
            method()
            if self._is_finished():
                break
        return self

    @property
    def chosen(self) -> Candidate | None:
        """The best plan, with replica shares of any size; None if none was found."""
        return best_of(self.plans)

    @property
    def is_exact(self) -> bool:
        """Whether it is proven that there is no better plan, or no plan at all."""
        return self._is_finished(CLOSED)

    @property
    def lower_bound_seconds(self) -> float:
        chosen, bound = self.chosen, self._bound()
        return chosen.value if chosen is not None and chosen.value <= bound * (1 + ROUNDING) else bound

    @property
    def method(self) -> str:
        """How plan and bound were found."""
        return (REACHED if self.is_exact else BEST_FOUND) + (f"; bound: {self._source}" if self._source else "")

    def _search_tables(self) -> None:
        """Search tables over ideals (see `stage_costs`) that are affordable; their least value is a lower bound."""
        instance, ideals = self._instance, ideals_of(self._instance)
        if ideals is None:
            return
        least_value = self._least_latency if self._problem.objective == "latency" else self._least_period
        for replicas in (True, False) if self._problem.replicas else (False,):
            if is_affordable(instance, len(ideals), TABLES_SHARE * self._budget.whole_work, replicas=replicas):
                costs = stage_costs(instance, groups_of(instance, replicas=replicas), ideals)
                try:
                    bound = least_value(costs) * (1 - TOLERANCE)
                except OutOfBudgetError:
                    return
                if replicas == self._problem.replicas or self._single_suffice:
                    self._has_tables = True
                    self._raise_bound(bound, "dynamic programming over machines and cuts of the graph")

    def _least_latency(self, costs: StageCosts) -> float:
        """Keep the plans of least latency in tables; return a lower bound on the latency of plans of several stages.

        In graphs whose stages may run at the same time, the latency is not the sum over stages, and the bound is 0.
        """
        least = self._evaluate_table(self._table(costs, LATENCY, self._problem.maximum_period_seconds))
        if not self._instance.is_line:
            return least if math.isinf(least) else 0.0
        best = self.chosen
        if best is not None and best.flow.latency_seconds <= least * (1 + TOLERANCE):
            period = self._period_within(costs, least)  # of equal plans, the one of least period
            self._evaluate_table(self._table(costs, LATENCY, period))
        return least

    def _least_period(self, costs: StageCosts) -> float:
        """Keep the plans of least period in tables; return a lower bound on the period of plans of several stages."""
        problem = self._problem
        period = self._evaluate_table(self._table(costs, PERIOD))
        if problem.maximum_latency_seconds < math.inf:
            self._evaluate_table(self._table(costs, LATENCY, problem.maximum_period_seconds))
            if self._instance.is_line:
                period = self._period_within(costs, problem.maximum_latency_seconds)
        if period > problem.maximum_period_seconds * (1 + TOLERANCE):
            return math.inf
        self._evaluate_table(self._table(costs, LATENCY, period))  # of equal plans, the one of least latency
        return max(period, self._least_period_of_cores(costs))

    def _least_period_of_cores(self, costs: StageCosts) -> float:
        """Return the least period in seconds of plans of several stages that the work on shared cores allows.

        It is at most that of the best plan: stages and links of better plans keep to this period.
        """
        best, instance = self.chosen, self._instance
        limit = math.inf if best is None else best.flow.period_seconds
        least = 0.0
        for number, (sharing, cores) in enumerate(instance.core_sets):
            of_client = client_transfers(instance)[1] if instance.client in sharing else 0.0
            work = self._evaluate_table(self._table(costs, core_work(number), limit))
            least = max(least, (work + of_client) / cores)
        return min(least, limit)

    def _period_within(self, costs: StageCosts, latency_limit: float) -> float:
        """Return the least period in seconds of sequences within a latency limit, by binary search.

        The period of a sequence is that of a stage or a link, so there are finitely many values to search.
        """
        lowest = min(self._table(costs, PERIOD).best().values(), default=math.inf)
        links = np.unique(costs.groups.seconds_per_byte[:-1, :-1])[:, None] * costs.adjacent.bytes
        candidates = np.unique(np.concatenate([values[values >= lowest] for values in (*costs.period, links)]))
        periods = candidates[np.isfinite(candidates)]
        low, high, probe = 0, len(periods), len(periods) - 1
        while low < high:
            table = self._table(costs, LATENCY, float(periods[probe]))
            best = table.best()
            used = min(best, key=lambda counts: best[counts], default=None)
            if used is None or best[used] > latency_limit * (1 + TOLERANCE):
                low = probe + 1
            else:
                plan = self._evaluate(table.stages(used))
                period = periods[probe] if plan is None else min(plan.flow.period_seconds, periods[probe])
                high = min(probe, int(np.searchsorted(periods, period * (1 - TOLERANCE))))
            probe = (low + high) // 2
        return float(periods[low]) if low < len(periods) else math.inf

    def _table(self, costs: StageCosts, objective: TableObjective, period_limit: float = math.inf) -> StageTable:
        budget = self._budget.until(TABLES_SHARE) if self.plans else Budget()
        return StageTable(costs, objective, self._instance.machine_limit, self._problem.stages, budget, period_limit)

    def _evaluate_table(self, table: StageTable) -> float:
        """Evaluate the best plans of a table: overall, and of each number of machines. Return its least value."""
        best = table.best()
        ranked = sorted(best, key=lambda used: (best[used], sum(used)))
        sequences = dict.fromkeys(ranked if self._problem.replicas else ranked[:MOST_SEQUENCES])
        first: dict[tuple[int, int], Counts] = {}
        for used in ranked:
            for key in ((-1, sum(used)), *enumerate(used)):
                first.setdefault(key, used)
        for used in sequences | dict.fromkeys(first.values()):
            self._evaluate(table.stages(used))
        return best[ranked[0]] if ranked else math.inf

    def _raise_bounds(self) -> None:
        """Raise the bound by what needs no table: the longest path, or the relaxation and the client's links."""
        instance = self._instance
        if self._problem.objective == "latency":
            self._raise_bound(longest_path(instance), "the longest path")
            return
        size = len(instance.pieces) * len(instance.classes)
        if size <= MOST_RELAXED:
            self._budget.spend(1000 * size)
            self._raise_bound(period_bound(instance, self._budget.until(0.2)), "linear relaxation")
        self._raise_bound(client_bound(instance), "the client's links")

    def _search_beams(self) -> None:
        """For throughput without tables, search plans whose stages follow the order of the pieces."""
        if self._has_tables or self._problem.objective == "latency":
            return
        search = PricedSearch(self._instance, self._budget.until(0.6), known=self.plans)
        self._raise_bound(search.bound, "machine prices, the dual of a linear relaxation")
        for width in WIDTHS:
            known = len(search.plans)
            search.search(width)
            self._keep(search.plans[known:])
            if self._is_finished():
                return

    def _search_locally(self) -> None:
        """Run local searches from the best few plans on different machines; half the budget is for the best result."""
        budget = self._budget
        ranked = sorted(self.plans, key=lambda plan: plan.rank)
        different = {frozenset(plan.machines): plan for plan in reversed(ranked)}
        starts = sorted(different.values(), key=lambda plan: plan.rank)[:MOST_STARTS]
        changed = []
        for number, plan in enumerate(starts):
            changed.append(self._local_search.improved(plan, budget.rest(1 / (2 * len(starts) - number))))
            self._keep(changed[-1:])
            if self._is_finished():
                return
        best = best_of(changed)
        if best is not None:
            self._keep([self._local_search.improved(best, budget)])

    def _evaluate(self, stages: list[Placement]) -> Candidate | None:
        """Evaluate a plan, and keep it if it keeps to all limits; None if it does not fit."""
        self._budget.spend(EVALUATION_WORK * len(stages))
        plan = tried(self._instance, stages)
        self._keep(filter(None, [plan]))
        return plan

    def _keep(self, plans: Iterable[Candidate]) -> None:
        self.plans += (plan for plan in plans if plan.is_within_limits)

    def _bound(self) -> float:
        """Return the lower bound in seconds over plans on one machine, which are all known, and on several."""
        alone = [plan.value for plan in self._alone if plan.is_within_limits]
        return min([self._spread_bound, *alone])

    def _raise_bound(self, value: float, source: str) -> None:
        if value > self._spread_bound:
            self._spread_bound, self._source = value, source

    def _is_finished(self, gap: float = RESOLVED) -> bool:
        """Whether the best plan is within a relative gap of the lower bound, or no plan exists."""
        best = self.chosen
        return self._bound() == math.inf if best is None else best.value <= self._bound() * (1 + gap)


class Best(Strategy):
    """Strategy that returns the best plan found within the time limit, with its optimality gap."""

    name: ClassVar[str] = "best"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        return solve(problem, time_limit_seconds=time_limit_seconds)


def solve(
    problem: Problem | str | Path,
    *,
    time_limit_seconds: Seconds = DEFAULT_TIME_LIMIT_SECONDS,
    budget: InstanceOf[Budget] | None = None,
) -> Solution:
    """Return the best plan found for a problem, with its optimality gap.

    Chains of up to about 200 pieces on 10 different machines (identical ones count less) are solved exactly. Other
    graphs are exact only if a lower bound proves it within the time. `Solution.method` says which.

    Exact results hold for replicas with shares of any size. Plans are compared and described with the shares of
    round-robin schedules; the lower bound holds for both. If replicas share cores, the bound is for shares in
    proportion to their speeds.

    Args:
        problem: the problem, or its file, as for ``tvm-split solve``.
        budget: used instead of the time limit; a budget of work alone gives the same plan on every machine.

    Raises:
        PlanError: names or numbers are wrong.
        NoPlanError: no plan fits; the message says which demand is not met, and by how much.
    """
    problem = as_problem(problem)
    instance = instance_of(problem)
    require_places(instance)
    search = Search(instance, budget or Budget(time_limit_seconds)).run()
    chosen = search.chosen
    if chosen is None:
        raise NoPlanError(_why_impossible(problem, is_proven=search.is_exact))
    best = best_scheduled(instance, search.plans)
    if best is None:
        period = scheduled(instance, chosen).flow.period_seconds
        raise NoPlanError(
            f"the round-robin schedules of the best plan's replicas give a period of {seconds_text(period)}, the limit "
            f"is {seconds_text(problem.maximum_period_seconds)}; shares of any size would meet it. Raise the limit "
            "a little"
        )
    # The bound is for shares by speed; on oversubscribed cores those of a schedule may happen to be better.
    is_worse = best.value > chosen.value * (1 + TOLERANCE)
    method = search.method + (SCHEDULED_AFTERWARDS if is_worse else "")
    return replace(
        solution_of(problem, best.named(instance), search.lower_bound_seconds, method),
        why_no_more_machines=why_no_more_machines(instance, best, search.plans),
        alternatives=alternatives(instance, best, search.plans),
    )


def _why_impossible(problem: Problem, *, is_proven: bool) -> str:
    budget = Budget(work=2 * DIAGNOSIS_WORK)

    def search(relaxed: Problem) -> list[Candidate]:
        budget.require()
        return Search(instance_of(relaxed), budget.rest(0.5)).run().plans

    try:
        reason = why_impossible(problem, search)
    except OutOfBudgetError:
        return "no plan meets all demands; the time ended before the cause was known. Leave out some demands"
    if is_proven:
        return reason
    return f"no plan was found in time (not proven impossible); by the search so far, {reason}"
