"""Entry point of the search: from a problem to a plan with its certificate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

from tvm_split.errors import PlanError
from tvm_split.planner.problem import (
    DEFAULT_TIME_LIMIT_SECONDS,
    TOLERANCE,
    Problem,
    Solution,
    gap_of,
    objective_seconds,
)
from tvm_split.planner.search.budget import WORK_PER_SECOND, Budget, OutOfBudgetError
from tvm_split.planner.search.candidate import Candidate, best_delivered, candidate, delivered, within_limits
from tvm_split.planner.search.certificate import alternatives, why_no_more_machines
from tvm_split.planner.search.diagnosis import require_places, why_impossible
from tvm_split.planner.search.exact import (
    ChainSearch,
    is_oversubscribed,
    is_small_enough,
    solve_chain,
    solve_oversubscribed,
)
from tvm_split.planner.search.graph import Found, GraphSearch, nearest_to_memory
from tvm_split.planner.search.instance import Instance, instance_of
from tvm_split.planner.search.simple_plans import simple_plans
from tvm_split.planner.strategy import solution_of
from tvm_split.units import seconds_text

DIAGNOSIS_WORK = WORK_PER_SECOND
"""Units of work of each attempt with a demand left out; none starts after twice as much in total."""
TABLES_SHARE = 0.8
"""Share of the budget for the tables of a chain; if they are not finished then, it is searched as a graph."""
CHAIN_METHOD = "exact: dynamic programming over sets of machines and cuts of a chain"
REPLICA_METHOD = "exact: dynamic programming over sets of machines, replicas and cuts of a chain"
SHARED_CORES_METHOD = "exact: dynamic programming over cuts of a chain on machines that share cores"
CORES_AFTERWARDS = "dynamic programming over a chain without shared cores, which were counted afterwards"
CORES_GAP = 0.02
"""Largest relative gap to the best plan without shared cores at which such a plan is accepted; about the difference of
two measurements of the same thing."""
SCHEDULED_AFTERWARDS = "; that is of shares of any size: replicas have those of their round-robin schedule"


def solve(
    problem: Problem,
    *,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    budget: Budget | None = None,
    whole_turns: bool = True,
) -> Solution:
    """Return the best plan found for a problem, with its optimality gap.

    Chains of up to about 200 pieces on 10 different machines (identical ones count less) are solved exactly. Other
    graphs are exact only if a lower bound proves it within the time. `Solution.method` says which.

    Exact results hold for replicas with shares of any size. Plans are compared and described with the shares of
    round-robin schedules; the lower bound holds for both. If replicas share cores, the bound is for shares in
    proportion to their speeds.

    Args:
        budget: used instead of the time limit; a budget of work alone gives the same plan on every machine.
        whole_turns: give replicas the shares of round-robin schedules; if False, shares of any size.

    Raises:
        PlanError: names or numbers are wrong, or no plan fits; the message says which demand, and by how much.
    """
    budget = budget or Budget(time_limit_seconds)
    instance = instance_of(problem)
    require_places(instance)
    found = _searched(instance, budget)
    chosen = found.chosen
    if chosen is None:
        raise PlanError(_why_impossible(problem, is_proven=found.exact))
    if not (whole_turns and problem.replicas):
        return _solution(instance, found, chosen, lambda plan: plan)
    best = best_delivered(instance, [chosen, *found.others])
    if best is None:
        period = delivered(instance, chosen).flow.period_seconds
        raise PlanError(
            f"the best plan found has a period of {seconds_text(period)} by the round-robin schedules of its replicas, "
            f"and at most {seconds_text(problem.maximum_period_seconds)} are allowed; with shares of any size it would "
            "keep to that, so allow a little more"
        )
    return _solution(instance, found, best, partial(delivered, instance))


def _searched(instance: Instance, budget: Budget) -> Found:
    if _is_chain(instance, budget.whole_work):
        try:
            return _by_tables(instance, budget)
        except OutOfBudgetError:
            pass
    return _on_shared_cores(instance) or GraphSearch(instance, budget.rest()).solve()


def _by_tables(instance: Instance, budget: Budget) -> Found:
    problem = instance.problem
    # Tables see one stage at a time, so shared cores are counted after the best plan without them is known.
    search = ChainSearch(
        dataclasses.replace(instance, problem=dataclasses.replace(problem, shared_cores=()), core_sets=()),
        budget.until(TABLES_SHARE),
    )
    loose = solve_chain(search)
    if loose is None:
        return Found(None, (), math.inf, CHAIN_METHOD, exact=True)
    bound, chosen = loose.value(problem), candidate(instance, loose.stages)
    others = search.others(loose)
    if problem.shared_cores:
        others = [candidate(instance, each.stages) for each in others]
    others += _simple_plans(instance, budget.until(TABLES_SHARE)) if problem.replicas else []
    gap = gap_of(chosen.flow.period_seconds, loose.flow.period_seconds)
    holds = within_limits(problem, chosen.flow)
    if gap <= TOLERANCE or (holds and problem.objective == "latency"):
        method = REPLICA_METHOD if problem.replicas else CHAIN_METHOD
        return Found(chosen, tuple(others), chosen.value(problem), method, exact=True)  # equal except for rounding
    if (found := _on_shared_cores(instance)) is not None:
        return found
    if holds and gap <= CORES_GAP:
        return Found(chosen, tuple(others), bound, CORES_AFTERWARDS, exact=False)
    return GraphSearch(instance, budget.rest(), known=[chosen, *others], loose_bound=bound).solve()


def _simple_plans(instance: Instance, budget: Budget) -> list[Candidate]:
    """Return plans to compare with, in case round-robin schedules slow the chosen one: no replicas, or one stage."""
    single = dataclasses.replace(instance, problem=dataclasses.replace(instance.problem, replicas=False))
    search = ChainSearch(single, budget)
    alone = solve_chain(search)
    known = [] if alone is None else [alone, *search.others(alone)]
    return [candidate(instance, each.stages) for each in known] + simple_plans(instance)


def _on_shared_cores(instance: Instance) -> Found | None:
    """Return the best plan of a chain on identical machines that share all cores; None if this does not apply."""
    if not is_oversubscribed(instance):
        return None
    chosen, others = solve_oversubscribed(instance)
    if chosen is None:
        return None
    return Found(chosen, tuple(others), chosen.value(instance.problem), SHARED_CORES_METHOD, exact=True)


def _solution(
    instance: Instance, found: Found, chosen: Candidate, deliver: Callable[[Candidate], Candidate]
) -> Solution:
    # The bound is for shares by speed; on oversubscribed cores those of a schedule may happen to be better.
    solution = solution_of(instance.problem, chosen.named(instance), found.lower_bound_seconds)
    value = objective_seconds(instance.problem.objective, solution.evaluation)
    best = value if found.chosen is None else found.chosen.value(instance.problem)
    is_worse = value > best * (1 + TOLERANCE)
    return dataclasses.replace(
        solution,
        method=found.method + (SCHEDULED_AFTERWARDS if is_worse else ""),
        why_no_more_machines=why_no_more_machines(instance, chosen, found.others, deliver, exact=found.exact),
        alternatives=alternatives(instance, chosen, found.others, deliver),
    )


def _is_chain(instance: Instance, work: float = math.inf) -> bool:
    return instance.is_chain and is_small_enough(instance, work)


def _why_impossible(problem: Problem, *, is_proven: bool) -> str:
    budget = Budget(work=2 * DIAGNOSIS_WORK)

    def best(asked: Problem) -> Candidate | None:
        budget.require()
        return _best(asked, budget.rest(0.5))

    try:
        reason = why_impossible(problem, best, _nearest)
    except OutOfBudgetError:
        return "no plan meets all demands, and there was no time to find out which of them is too much: leave some out"
    if is_proven:
        return reason
    return f"no plan was found in the time given, which is no proof; as far as was searched, {reason}"


def _best(problem: Problem, budget: Budget) -> Candidate | None:
    """Return the best plan found with little work; None if there is none."""
    instance = instance_of(problem)
    if _is_chain(instance) and not instance.core_sets:
        return solve_chain(ChainSearch(instance))
    return GraphSearch(instance, budget).solve().chosen


def _nearest(instance: Instance) -> Candidate | None:
    if _is_chain(instance):
        return ChainSearch(instance).nearest_to_memory()
    return nearest_to_memory(instance, Budget(work=DIAGNOSIS_WORK))
