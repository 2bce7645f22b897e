"""What turns make of the shares that a search gives replicas: some are so rare that there are no turns for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from tvm_split.planner.problem import Problem, Solution, Stage, gap_of, objective_seconds
from tvm_split.planner.search import evaluate
from tvm_split.rpc_runtime.program.turns import lengths_of_turns, longest_turns, turns_by_share

TURNS_AFTERWARDS = "; replicas have the shares that turns give them"
EXACT = "exact: "
ROUNDING = 1e-9


def with_turns(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with shares as turns give them; replicas may be left out, such as those with less than a turn."""
    return tuple(_with_turns(stage) for stage in stages)


def as_delivered(problem: Problem, found: Solution) -> Solution:
    """The solution with shares, period and gap as turns give them; the bound is that of any shares."""
    stages = with_turns(found.stages)
    if stages == found.stages:
        return found
    evaluation = evaluate(problem, stages, by_shares=True)
    return replace(
        found,
        stages=stages,
        evaluation=evaluation,
        gap=gap_of(objective_seconds(problem.objective, evaluation), found.lower_bound_seconds),
        method=found.method.removeprefix(EXACT) + TURNS_AFTERWARDS,
    )


def _with_turns(stage: Stage) -> Stage:
    if len(stage.machines) == 1 or stage.sharding:
        return stage
    counts = _fairest(stage.shares)
    kept = [place for place, count in enumerate(counts) if count]
    shares = tuple(counts[place] / sum(counts) for place in kept)
    turns: tuple[int, ...] = ()
    # Of what turns give there may be shorter ones that are as good as alike, until there are none.
    while turns != (turns := turns_by_share(shares)):
        shares = tuple(turns.count(place) / len(turns) for place in range(len(kept)))
    return replace(stage, machines=tuple(stage.machines[place] for place in kept), shares=shares)


def _fairest(shares: Sequence[float]) -> tuple[int, ...]:
    """Turns of each replica, or none, by which the one with most beyond its share has least; of equal ones the fewest.

    For turns of a length it is best to give each to the replica that has least beyond its share with it (Jefferson's
    method: Balinski, Young 1982, "Fair Representation"). So another replica does not make this worse.
    """
    whole = math.fsum(shares)
    best, least = (0,) * len(shares), math.inf
    for length in lengths_of_turns(longest_turns(len(shares))):
        counts = [0] * len(shares)
        waiting = [(whole / share, replica) for replica, share in enumerate(shares)]
        heapify(waiting)
        for _ in range(length):
            replica = waiting[0][1]
            counts[replica] += 1
            heapreplace(waiting, ((counts[replica] + 1) * whole / shares[replica], replica))
        most = max(count * whole / (length * share) for count, share in zip(counts, shares, strict=True))
        if most < least * (1 - ROUNDING) and length <= longest_turns(sum(map(bool, counts))):
            best, least = tuple(counts), most
    return best
