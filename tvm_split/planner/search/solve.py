"""The search's front door: from a problem to a plan with its certificate."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import evaluate
from tvm_split.planner.problem import TOLERANCE, Problem, Solution, gap_of, objective_seconds
from tvm_split.planner.search.candidate import Candidate, Deliveries, candidate, within_limits
from tvm_split.planner.search.certificate import alternatives, why_no_more_machines
from tvm_split.planner.search.chain import ChainSearch, is_small_enough, solve_chain
from tvm_split.planner.search.crowded_chain import is_crowded_chain, solve_crowded_chain
from tvm_split.planner.search.diagnosis import require_places, why_impossible
from tvm_split.planner.search.exhaustive import is_small
from tvm_split.planner.search.graph import GraphSearch, nearest_to_memory
from tvm_split.planner.search.instance import Instance, instance_of
from tvm_split.planner.search.simple_plans import simple_plans
from tvm_split.planner.search.stage_dp import OutOfTimeError
from tvm_split.planner.step_graph import lower
from tvm_split.units import seconds_text

DEFAULT_TIME_LIMIT_SECONDS = 10.0
DIAGNOSIS_SECONDS = 1.0
"""For each attempt with a demand less; none begins after twice that."""
TABLES_SHARE = 0.8
"""Of the time limit: then a chain whose tables have not come to their end is searched as any other graph."""
CHAIN_METHOD = "exact: dynamic programming over sets of machines and cuts of a chain"
REPLICA_METHOD = "exact: dynamic programming over sets of machines, replicas and cuts of a chain"
CROWDED_METHOD = "exact: dynamic programming over cuts of a chain on machines that share cores"
CORES_AFTERWARDS = "dynamic programming over a chain without shared cores, which were counted afterwards"
CORES_GAP = 0.02
"""What plans without shared cores may be better by at most, if a plan that was found without them is to do; about what
two measurements of the same thing differ by."""
TURNS_AFTERWARDS = "; that is of shares of any size: replicas have those that turns give them"
TIGHTER_LIMITS = 3
"""Searches for a plan that keeps to a longest period with the turns that its replicas have."""


def solve(
    problem: Problem, *, time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS, whole_turns: bool = True
) -> Solution:
    """The best plan of a problem, and how far from the best it can be at most.

    Chains of up to about 200 pieces on 10 unlike machines (equal ones count less) are solved exactly; other graphs
    exactly up to 9 pieces on 4 machines, and beyond for as long as the time allows. `Solution.method` says which.

    What is exact is so for replicas with shares of any size. They are delivered with the shares that whole turns give
    them: of the plans that were looked at the one that is best by that is taken, and all that is told is of that, but
    for the lower bound, which holds for both; where replicas share cores, of shares in proportion to their speeds.
    Without ``whole_turns`` it is the best one by shares of any size.

    Raises:
        PlanError: names or numbers are wrong, or no plan fits; the message says which demand, and by how much.
    """
    start = time.monotonic()
    instance = instance_of(problem)
    require_places(instance)
    deliveries, deadline = Deliveries(instance), start + time_limit_seconds
    found = _searched(instance, time_limit_seconds, start, deliveries)
    if not (whole_turns and problem.replicas):
        return _solution(instance, found, found.chosen, lambda plan: plan)
    plans = [found.chosen, *found.others]
    best = deliveries.best_of(plans, deadline)
    limit = problem.maximum_period_seconds
    for _ in range(TIGHTER_LIMITS):
        if best is not None or time.monotonic() > deadline:
            break
        # What turns cost is left between the limit that is searched for and the one that is kept to.
        limit *= problem.maximum_period_seconds / deliveries.of(plans[0]).flow.period_seconds
        tighter = dataclasses.replace(
            instance, problem=dataclasses.replace(instance.problem, maximum_period_seconds=limit)
        )
        try:
            again = _searched(tighter, deadline - time.monotonic(), time.monotonic(), deliveries)
        except PlanError:  # by shares of any size there is one, so these words would be wrong
            break
        plans = [again.chosen, *again.others]
        best = deliveries.best_of(plans, deadline)
    if best is None:
        period = deliveries.of(found.chosen).flow.period_seconds
        raise PlanError(
            f"the best plan found has a period of {seconds_text(period)} by the turns of its replicas, and at most "
            f"{seconds_text(problem.maximum_period_seconds)} are allowed; with shares of any size it would keep to "
            "that, so allow a little more"
        )
    return _solution(instance, found, best, deliveries.of)


@dataclasses.dataclass(frozen=True)
class _Found:
    """The best plan by shares of any size, others, and what is known of all of them."""

    chosen: Candidate
    others: Sequence[Candidate]
    lower_bound_seconds: float
    method: str
    exact: bool


def _searched(instance: Instance, time_limit_seconds: float, start: float, deliveries: Deliveries) -> _Found:
    if not _is_chain(instance, time_limit_seconds):
        return _crowded(instance) or _solve_graph(instance, time_limit_seconds, start, deliveries)
    try:
        return _by_tables(instance, time_limit_seconds, start, deliveries)
    except OutOfTimeError:
        now = time.monotonic()
        return _crowded(instance) or _solve_graph(instance, start + time_limit_seconds - now, now, deliveries)


def _by_tables(instance: Instance, time_limit_seconds: float, start: float, deliveries: Deliveries) -> _Found:
    problem, deadline = instance.problem, start + TABLES_SHARE * time_limit_seconds
    # Tables know each stage by itself: cores are counted when the best plan without them is known.
    search = ChainSearch(
        dataclasses.replace(instance, problem=dataclasses.replace(problem, shared_cores=()), core_sets=()), deadline
    )
    loose = solve_chain(search)
    if loose is None:
        raise PlanError(_why_impossible(problem))
    bound, chosen = loose.value(problem), candidate(instance, loose.stages)
    others = search.others(loose)
    if problem.shared_cores:
        others = [candidate(instance, each.stages) for each in others]
    others += _simple_plans(instance, deadline) if problem.replicas else []
    gap = gap_of(chosen.flow.period_seconds, loose.flow.period_seconds)
    holds = within_limits(problem, chosen.flow) and not is_small(instance)
    if gap <= TOLERANCE or (holds and problem.objective == "latency"):
        method = REPLICA_METHOD if problem.replicas else CHAIN_METHOD
        return _Found(chosen, others, chosen.value(problem), method, exact=True)  # equal but for rounding
    if (crowded := _crowded(instance)) is not None:
        return crowded
    if holds and gap <= CORES_GAP:
        return _Found(chosen, others, bound, CORES_AFTERWARDS, exact=False)
    return _solve_graph(instance, time_limit_seconds, time.monotonic(), deliveries, [chosen, *others], bound)


def _simple_plans(instance: Instance, deadline: float) -> list[Candidate]:
    """Those with which a plan whose replicas lose by their turns is compared: few replicas, or all machines in one."""
    single = dataclasses.replace(instance, problem=dataclasses.replace(instance.problem, replicas=False))
    search = ChainSearch(single, deadline)
    alone = solve_chain(search)
    known = [] if alone is None else [alone, *search.others(alone)]
    return [candidate(instance, each.stages) for each in known] + simple_plans(instance)


def _crowded(instance: Instance) -> _Found | None:
    """The best plan of a chain on alike machines that all share the same cores; None if it is none, or has none."""
    if is_small(instance) or not is_crowded_chain(instance):
        return None
    chosen, others = solve_crowded_chain(instance)
    if chosen is None:
        return None
    return _Found(chosen, others, chosen.value(instance.problem), CROWDED_METHOD, exact=True)


def _solve_graph(
    instance: Instance,
    time_limit_seconds: float,
    start: float,
    deliveries: Deliveries,
    known: Sequence[Candidate] = (),
    loose_bound: float = 0.0,
) -> _Found:
    result = GraphSearch(
        instance, time_limit_seconds, start, known=known, loose_bound=loose_bound, deliveries=deliveries
    ).solve()
    if result.chosen is None:
        reason = _why_impossible(instance.problem)
        if not result.exact:
            reason = f"no plan was found in {time_limit_seconds:g} s, which is no proof; as far as was looked, {reason}"
        raise PlanError(reason)
    return _Found(result.chosen, result.others, result.lower_bound_seconds, result.method, exact=False)


def _solution(
    instance: Instance, found: _Found, chosen: Candidate, deliver: Callable[[Candidate], Candidate]
) -> Solution:
    stages = chosen.named(instance)
    evaluation = evaluate(instance.problem, lower(instance.problem, stages))
    value = objective_seconds(instance.problem.objective, evaluation)
    # Where cores are too few, other shares than those by speed may be better, as turns may happen to give them.
    bound = min(found.lower_bound_seconds, value)
    is_worse = value > found.chosen.value(instance.problem) * (1 + TOLERANCE)
    return Solution(
        stages=stages,
        evaluation=evaluation,
        lower_bound_seconds=bound,
        gap=gap_of(value, bound),
        method=found.method + (TURNS_AFTERWARDS if is_worse else ""),
        why_no_more_machines=why_no_more_machines(instance, chosen, found.others, deliver, exact=found.exact),
        alternatives=alternatives(instance, chosen, found.others, deliver),
    )


def _is_chain(instance: Instance, time_limit_seconds: float = math.inf) -> bool:
    return instance.is_chain and is_small_enough(instance, time_limit_seconds)


def _why_impossible(problem: Problem) -> str:
    deadline = time.monotonic() + 2 * DIAGNOSIS_SECONDS

    def best(asked: Problem) -> Candidate | None:
        if time.monotonic() > deadline:
            raise OutOfTimeError
        return _best(asked)

    try:
        return why_impossible(problem, best, _nearest)
    except OutOfTimeError:
        return "no plan meets all demands, and there was no time to find out which of them is too much: leave some out"


def _best(problem: Problem) -> Candidate | None:
    """The best plan found in a short time, if any piece has a place."""
    instance = instance_of(problem)
    if _is_chain(instance) and not instance.core_sets:
        return solve_chain(ChainSearch(instance))
    return GraphSearch(instance, DIAGNOSIS_SECONDS).solve().chosen


def _nearest(instance: Instance) -> Candidate | None:
    if _is_chain(instance):
        return ChainSearch(instance).nearest_to_memory()
    return nearest_to_memory(instance, DIAGNOSIS_SECONDS)
