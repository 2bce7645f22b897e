"""What turns make of the shares that a search gives replicas: some are so rare that there are no turns for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm_split.planner.problem import Problem, Solution, Stage, gap_of, objective_seconds
from tvm_split.planner.search import evaluate
from tvm_split.rpc_runtime.program.turns import longest_turns, turns_by_share

TURNS_AFTERWARDS = "; replicas have the shares that turns give them"


def with_turns(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with shares as turns give them.

    Without replicas whose share is less than the shortest turn, the rarest left out first.
    """
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
        method=found.method + TURNS_AFTERWARDS,
    )


def _with_turns(stage: Stage) -> Stage:
    if len(stage.machines) == 1 or stage.sharding:
        return stage
    kept = sorted(range(len(stage.machines)), key=lambda place: -stage.shares[place])
    whole = math.fsum(stage.shares)
    while stage.shares[kept[-1]] / whole * longest_turns(len(kept)) < 1 - 1e-9:
        kept.pop()
        whole = math.fsum(stage.shares[place] for place in kept)
    kept.sort()
    shares = tuple(stage.shares[place] / whole for place in kept)
    turns: tuple[int, ...] = ()
    # Of what turns give there may be shorter ones that are as good as alike, until there are none.
    while turns != (turns := turns_by_share(shares)):
        shares = tuple(turns.count(place) / len(turns) for place in range(len(kept)))
    return replace(stage, machines=tuple(stage.machines[place] for place in kept), shares=shares)
