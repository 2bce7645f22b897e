"""A plan made better step by step, each measured exactly: pieces at the edge of a stage move, replicas come and go."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm_split.errors import PlanError
from tvm_split.planner.problem import TOLERANCE
from tvm_split.planner.search.candidate import Candidate, candidate, fits, within_limits
from tvm_split.planner.search.ideals import predecessors, successors
from tvm_split.planner.search.instance import Instance
from tvm_split.planner.search.placement import Placed

Stages = list[Placed]


def improved(instance: Instance, plan: Candidate, deadline: float) -> Candidate:
    """A plan at least as good, found by single steps until none helps or the deadline (monotonic) passes."""
    before = predecessors(instance)
    neighbours = [needed | {*needing} for needed, needing in zip(before, successors(before), strict=True)]
    best = plan
    while time.monotonic() < deadline:
        better = _one_step(instance, best, neighbours, deadline)
        if better is None:
            break
        best = better
    return best


def _one_step(instance: Instance, plan: Candidate, neighbours: list[set[int]], deadline: float) -> Candidate | None:
    """The first step found that makes a plan better."""
    idle = [machine for machine in range(len(instance.machines)) if machine not in plan.machines]
    for stages in _steps(instance, plan.stages, idle, neighbours):
        if time.monotonic() > deadline:
            return None
        changed = _allowed(instance, stages)
        if changed is not None and _is_better(instance, changed, plan):
            return changed
    return None


def _steps(
    instance: Instance, stages: Sequence[Placed], idle: Sequence[int], neighbours: list[set[int]]
) -> Iterator[Stages]:
    if instance.problem.replicas:  # the fewer steps come first, in case that time is short
        yield from _moved_machines(stages, idle)
    yield from _moved_pieces(instance, stages, idle, neighbours)


def _moved_pieces(
    instance: Instance, stages: Sequence[Placed], idle: Sequence[int], neighbours: list[set[int]]
) -> Iterator[Stages]:
    """A piece goes to a stage that has a neighbour of it, or to an idle machine."""
    groups = [*(stage.machines for stage in stages), *((machine,) for machine in idle)]
    home = {piece: number for number, stage in enumerate(stages) for piece in stage.pieces}
    for piece in range(len(instance.pieces)):
        near = {home[other] for other in neighbours[piece]} - {home[piece]}
        if not near and len(stages) > 1:
            continue
        for target in [*sorted(near), *range(len(stages), len(groups))]:
            if any(math.isinf(instance.seconds[piece, machine]) for machine in groups[target]):
                continue
            held: list[list[int]] = [[] for _ in groups]
            for other, number in home.items():
                held[target if other == piece else number].append(other)
            yield [Placed(group, tuple(sorted(pieces))) for group, pieces in zip(groups, held, strict=True) if pieces]


def _moved_machines(stages: Sequence[Placed], idle: Sequence[int]) -> Iterator[Stages]:
    """A stage gets an idle machine as one more replica, or one of its replicas leaves it, to another stage or none."""
    leaving = [(number, machine) for number, stage in enumerate(stages) for machine in stage.machines]
    for source, machine in [*((None, machine) for machine in idle), *leaving]:
        if source is not None and len(stages[source].machines) == 1:
            continue
        for target in [*range(len(stages)), *([] if source is None else [None])]:
            if target != source:
                yield [_with_machine(stage, number, machine, source, target) for number, stage in enumerate(stages)]


def _with_machine(stage: Placed, number: int, machine: int, source: int | None, target: int | None) -> Placed:
    if number == target:
        return replace(stage, machines=tuple(sorted((*stage.machines, machine))))
    if number == source:
        return replace(stage, machines=tuple(other for other in stage.machines if other != machine))
    return stage


def _allowed(instance: Instance, stages: Stages) -> Candidate | None:
    """The plan; None if it is none, or not allowed."""
    try:
        found = candidate(instance, stages)
    except PlanError:
        return None
    return found if fits(instance, found) and within_limits(instance.problem, found.flow) else None


def _is_better(instance: Instance, one: Candidate, other: Candidate) -> bool:
    """By the value, then the other value, then the number of machines."""
    problem = instance.problem
    for own, compared in (
        (one.value(problem), other.value(problem)),
        (one.other_value(problem), other.other_value(problem)),
    ):
        if own < compared * (1 - TOLERANCE):
            return True
        if own > compared * (1 + TOLERANCE):
            return False
    return len(one.machines) < len(other.machines)
