"""The search's front door: from a problem to a plan with its certificate."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from tvm_split.errors import PlanError
from tvm_split.planner.problem import Problem, Solution, gap_of
from tvm_split.planner.search.candidate import Candidate, candidate, within_limits
from tvm_split.planner.search.certificate import alternatives, why_no_more_machines
from tvm_split.planner.search.chain import ChainSearch, is_small_enough, solve_chain
from tvm_split.planner.search.crowded_chain import is_crowded_chain, solve_crowded_chain
from tvm_split.planner.search.diagnosis import require_places, why_impossible
from tvm_split.planner.search.exhaustive import is_small
from tvm_split.planner.search.graph import GraphSearch, nearest_to_memory
from tvm_split.planner.search.instance import TOLERANCE, Instance, instance_of

DEFAULT_TIME_LIMIT_SECONDS = 10.0
DIAGNOSIS_SECONDS = 1.0
CHAIN_METHOD = "exact: dynamic programming over sets of machines and cuts of a chain"
REPLICA_METHOD = "exact: dynamic programming over sets of machines, replicas and cuts of a chain"
CROWDED_METHOD = "exact: dynamic programming over cuts of a chain on machines that share cores"
CORES_AFTERWARDS = "dynamic programming over a chain without shared cores, which were counted afterwards"
CORES_GAP = 0.02
"""What plans without shared cores may be better by at most, if a plan that was found without them is to do; about what
two measurements of the same thing differ by."""


def solve(problem: Problem, *, time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS) -> Solution:
    """The best plan of a problem, and how far from the best it can be at most.

    Chains of up to about 200 pieces on 10 unlike machines (equal ones count less) are solved exactly; other graphs
    exactly up to 9 pieces on 4 machines, and beyond for as long as the time allows. `Solution.method` says which.

    Raises:
        PlanError: names or numbers are wrong, or no plan fits; the message says which demand, and by how much.
    """
    start = time.monotonic()
    instance = instance_of(problem)
    require_places(instance)
    if not _is_chain(instance):
        return _crowded(instance) or _solve_graph(instance, time_limit_seconds, start)
    # Tables know each stage by itself: cores are counted when the best plan without them is known.
    search = ChainSearch(
        dataclasses.replace(instance, problem=dataclasses.replace(problem, shared_cores=()), core_sets=())
    )
    loose = solve_chain(search)
    if loose is None:
        raise PlanError(why_impossible(problem, _best, _nearest))
    bound, chosen = loose.value(problem), candidate(instance, loose.stages)
    others = [candidate(instance, each.stages) for each in search.others(loose)]
    gap = gap_of(chosen.evaluation.period_seconds, loose.evaluation.period_seconds)
    holds = within_limits(problem, chosen.evaluation) and not is_small(instance)
    if gap <= TOLERANCE or (holds and problem.objective == "latency"):
        method = REPLICA_METHOD if problem.replicas else CHAIN_METHOD
        return _solution(instance, chosen, others, chosen.value(problem), method, exact=True)  # equal but for rounding
    if (crowded := _crowded(instance)) is not None:
        return crowded
    if holds and gap <= CORES_GAP:
        return _solution(instance, chosen, others, bound, CORES_AFTERWARDS, exact=False)
    return _solve_graph(instance, time_limit_seconds, time.monotonic(), [chosen, *others], bound)


def _crowded(instance: Instance) -> Solution | None:
    """The best plan of a chain on alike machines that all share the same cores; None if it is none, or has none."""
    if is_small(instance) or not is_crowded_chain(instance):
        return None
    chosen, others = solve_crowded_chain(instance)
    if chosen is None:
        return None
    return _solution(instance, chosen, others, chosen.value(instance.problem), CROWDED_METHOD, exact=True)


def _solve_graph(
    instance: Instance,
    time_limit_seconds: float,
    start: float,
    known: Sequence[Candidate] = (),
    loose_bound: float = 0.0,
) -> Solution:
    result = GraphSearch(instance, time_limit_seconds, start, known=known, loose_bound=loose_bound).solve()
    if result.chosen is None:
        reason = why_impossible(instance.problem, _best, _nearest)
        raise PlanError(reason if result.exact else f"no plan was found in {time_limit_seconds:g} s; {reason}")
    return _solution(instance, result.chosen, result.others, result.lower_bound_seconds, result.method, exact=False)


def _solution(
    instance: Instance,
    chosen: Candidate,
    others: Sequence[Candidate],
    lower_bound_seconds: float,
    method: str,
    *,
    exact: bool,
) -> Solution:
    return Solution(
        stages=chosen.named(instance),
        evaluation=chosen.evaluation,
        lower_bound_seconds=lower_bound_seconds,
        gap=gap_of(chosen.value(instance.problem), lower_bound_seconds),
        method=method,
        why_no_more_machines=why_no_more_machines(instance, chosen, others, exact=exact),
        alternatives=alternatives(instance, chosen, others),
    )


def _is_chain(instance: Instance) -> bool:
    return instance.is_chain and is_small_enough(instance)


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
