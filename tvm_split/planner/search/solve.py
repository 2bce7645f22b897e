"""Entry point of the search: from a problem to a plan with its certificate."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tvm_split.errors import PlanError
from tvm_split.planner.problem import (
    DEFAULT_TIME_LIMIT_SECONDS,
    TOLERANCE,
    Problem,
    Solution,
)
from tvm_split.planner.search.budget import WORK_PER_SECOND, Budget, OutOfBudgetError
from tvm_split.planner.search.candidate import best_delivered, delivered
from tvm_split.planner.search.explain import (
    alternatives,
    require_places,
    why_impossible,
    why_no_more_machines,
)
from tvm_split.planner.search.instance import instance_of
from tvm_split.planner.search.search import Search, SearchResult
from tvm_split.planner.strategy import Strategy, solution_of
from tvm_split.units import seconds_text

DIAGNOSIS_WORK = WORK_PER_SECOND
"""Units of work of each attempt with a demand left out; none starts after twice as much in total."""
SCHEDULED_AFTERWARDS = "; that is of shares of any size: replicas have those of their round-robin schedule"


class Best(Strategy):
    """Strategy that returns the best plan found within the time limit, with its optimality gap."""

    name: ClassVar[str] = "best"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        return solve(problem, time_limit_seconds=time_limit_seconds)


def solve(
    problem: Problem, *, time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS, budget: Budget | None = None
) -> Solution:
    """Return the best plan found for a problem, with its optimality gap.

    Chains of up to about 200 pieces on 10 different machines (identical ones count less) are solved exactly. Other
    graphs are exact only if a lower bound proves it within the time. `Solution.method` says which.

    Exact results hold for replicas with shares of any size. Plans are compared and described with the shares of
    round-robin schedules; the lower bound holds for both. If replicas share cores, the bound is for shares in
    proportion to their speeds.

    Args:
        budget: used instead of the time limit; a budget of work alone gives the same plan on every machine.

    Raises:
        PlanError: names or numbers are wrong, or no plan fits; the message says which demand, and by how much.
    """
    instance = instance_of(problem)
    require_places(instance)
    result = Search(instance, budget or Budget(time_limit_seconds)).run()
    chosen = result.chosen
    if chosen is None:
        raise PlanError(_why_impossible(problem, is_proven=result.exact))
    best = best_delivered(instance, result.plans)
    if best is None:
        period = delivered(instance, chosen).flow.period_seconds
        raise PlanError(
            f"the best plan found has a period of {seconds_text(period)} by the round-robin schedules of its replicas, "
            f"and at most {seconds_text(problem.maximum_period_seconds)} are allowed; with shares of any size it would "
            "keep to that, so allow a little more"
        )
    # The bound is for shares by speed; on oversubscribed cores those of a schedule may happen to be better.
    is_worse = best.value(problem) > chosen.value(problem) * (1 + TOLERANCE)
    method = result.method + (SCHEDULED_AFTERWARDS if is_worse else "")
    return dataclasses.replace(
        solution_of(problem, best.named(instance), result.lower_bound_seconds, method),
        why_no_more_machines=why_no_more_machines(instance, best, result.plans),
        alternatives=alternatives(instance, best, result.plans),
    )


def _why_impossible(problem: Problem, *, is_proven: bool) -> str:
    budget = Budget(work=2 * DIAGNOSIS_WORK)

    def search(relaxed: Problem) -> SearchResult:
        budget.require()
        return Search(instance_of(relaxed), budget.rest(0.5)).run()

    try:
        reason = why_impossible(problem, search)
    except OutOfBudgetError:
        return "no plan meets all demands, and the time ended before it was known which one is too much: leave some out"
    if is_proven:
        return reason
    return f"no plan was found in the time given, which is no proof; as far as was searched, {reason}"
