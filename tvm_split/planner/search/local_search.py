"""A plan made better piece by piece: pieces at the edge of a stage are moved to another machine, measured exactly."""

from __future__ import annotations

import math
import time

from tvm_split.errors import PlanError
from tvm_split.planner.search.candidate import Candidate, candidate, fits, within_limits
from tvm_split.planner.search.exhaustive import stages_of
from tvm_split.planner.search.instance import TOLERANCE, Instance


def improved(instance: Instance, plan: Candidate, deadline: float) -> Candidate:
    """A plan at least as good, found by moves of single pieces until none helps or the deadline (monotonic) passes."""
    neighbours = _neighbours(instance)
    best = plan
    while time.monotonic() < deadline:
        better = _one_step(instance, best, neighbours, deadline)
        if better is None:
            break
        best = better
    return best


def _one_step(instance: Instance, plan: Candidate, neighbours: list[set[int]], deadline: float) -> Candidate | None:
    """The first move found that makes a plan better."""
    choice = [0] * len(instance.pieces)
    for stage in plan.stages:
        for piece in stage.pieces:
            choice[piece] = stage.machines[0]
    idle = [machine for machine in range(len(instance.machines)) if machine not in plan.machines]
    for piece, machine in enumerate(choice):
        near = {choice[other] for other in neighbours[piece]} - {machine}
        if not near and len(plan.stages) > 1:
            continue
        for target in [*sorted(near), *idle]:
            if time.monotonic() > deadline:
                return None
            if math.isinf(instance.seconds[piece, target]):
                continue
            moved = try_stages(instance, [*choice[:piece], target, *choice[piece + 1 :]])
            if moved is not None and is_better(instance, moved, plan):
                return moved
    return None


def try_stages(instance: Instance, choice: list[int]) -> Candidate | None:
    """The plan with each piece on the machine of ``choice``; None if it is none, or not allowed."""
    try:
        found = candidate(instance, stages_of(choice))
    except PlanError:
        return None
    return found if fits(instance, found) and within_limits(instance.problem, found) else None


def is_better(instance: Instance, one: Candidate, other: Candidate) -> bool:
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


def _neighbours(instance: Instance) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in instance.pieces]
    for tensor in instance.tensors:
        if tensor.source == instance.client:
            continue
        for piece in tensor.destinations:
            if piece != instance.client:
                found[piece].add(tensor.source)
                found[tensor.source].add(piece)
    return found
