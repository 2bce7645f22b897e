"""The search's front door: from a problem to a plan with its certificate."""

from __future__ import annotations

from tvm_split.errors import PlanError
from tvm_split.planner.problem import Problem, Solution
from tvm_split.planner.search.candidate import Candidate
from tvm_split.planner.search.certificate import alternatives, why_no_more_machines
from tvm_split.planner.search.chain import ChainSearch, is_small_enough, solve_chain
from tvm_split.planner.search.diagnosis import require_places, why_impossible
from tvm_split.planner.search.evaluate import solved_stages
from tvm_split.planner.search.instance import Instance, instance_of

DEFAULT_TIME_LIMIT_SECONDS = 10.0
CHAIN_METHOD = "exact: dynamic programming over sets of machines and cuts of a chain"
REPLICA_METHOD = "exact: dynamic programming over sets of machines, replicas and cuts of a chain"


def solve(problem: Problem, *, time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS) -> Solution:
    """The best plan of a problem, and how far from the best it can be at most.

    Raises:
        PlanError: names or numbers are wrong, or no plan fits; the message says which demand, and by how much.
    """
    instance = instance_of(problem)
    require_places(instance)
    if not (instance.is_chain and is_small_enough(instance)):
        raise PlanError("only chains can be planned")
    search = ChainSearch(instance)
    chosen = solve_chain(search)
    if chosen is None:
        raise PlanError(why_impossible(problem, _best_chain, _nearest))
    others = search.others(chosen)
    return Solution(
        stages=solved_stages(instance, chosen.stages),
        evaluation=chosen.evaluation,
        lower_bound_seconds=chosen.value(problem),
        gap=0.0,
        method=REPLICA_METHOD if problem.replicas else CHAIN_METHOD,
        why_no_more_machines=why_no_more_machines(instance, chosen, others, exact=True),
        alternatives=alternatives(instance, chosen, others),
    )


def _best_chain(problem: Problem) -> Candidate | None:
    return solve_chain(ChainSearch(instance_of(problem)))


def _nearest(instance: Instance) -> Candidate | None:
    return ChainSearch(instance).nearest_to_memory()
