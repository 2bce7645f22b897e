"""Candidate plans with their evaluation, and how candidates are compared."""

from __future__ import annotations

import graphlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import Flow
from tvm_split.planner.problem import TOLERANCE, Problem, Stage, Timed, objective_seconds
from tvm_split.planner.round_robin import fairest_turns
from tvm_split.planner.search.instance import Instance
from tvm_split.planner.step_graph import NumberedTransfer
from tvm_split.units import names_of


@dataclass(frozen=True)
class Placement:
    """A stage by numbers: the pieces in topological order, and the machines that share its micro-batches."""

    machines: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A plan: stages by numbers, in topological order, and their evaluated flow."""

    stages: tuple[Placement, ...]
    flow: Flow

    @property
    def machines(self) -> tuple[int, ...]:
        return tuple(machine for stage in self.stages for machine in stage.machines)

    def value(self, problem: Problem) -> float:
        """Return the objective's value in seconds: the period or the latency."""
        return objective_seconds(problem.objective, self.flow)

    def other_value(self, problem: Problem) -> float:
        """Return the value that breaks ties, in seconds: the latency or the period."""
        throughput = problem.objective == "throughput"
        return self.flow.latency_seconds if throughput else self.flow.period_seconds

    def rank(self, problem: Problem) -> tuple[float, float, int]:
        """Return the sort key of a plan; smaller is better."""
        return self.value(problem), self.other_value(problem), len(self.machines)

    def named(self, instance: Instance) -> tuple[Stage, ...]:
        """Return the stages by names, with the shares of their replicas."""
        share = {load.machine: load.share for load in self.flow.loads}
        stages = []
        for stage in self.stages:
            machines = tuple(instance.machines[machine] for machine in stage.machines)
            pieces = tuple(instance.pieces[piece] for piece in stage.pieces)
            stages.append(Stage(machines, pieces, tuple(share[machine] for machine in machines)))
        return tuple(stages)


def candidate(
    instance: Instance, stages: Sequence[Placement], share_of: Mapping[int, float] | None = None
) -> Candidate:
    """Evaluate stages, and put them in topological order.

    Replicas get shares in proportion to their speeds, or the shares in ``share_of``, by machine.

    Raises:
        PlanError: stages wait for each other in a cycle, or a link is missing.
    """
    stage_of = {piece: number for number, stage in enumerate(stages) for piece in stage.pieces}
    stage_of[instance.client] = instance.client
    transfers = []
    for tensor in instance.tensors:
        source = stage_of[tensor.source]
        ends = {stage_of[piece] for piece in tensor.destinations}
        transfers += [(source, end, tensor.bytes) for end in ends if end != source]
    if any(source > end >= 0 for source, end, _ in transfers):
        order = _topological_order(instance, stages, transfers)
        stages = [stages[number] for number in order]
        place = {number: place for place, number in enumerate(order)} | {instance.client: instance.client}
        transfers = [(place[source], place[end], size) for source, end, size in transfers]
    numbered = [
        NumberedTransfer(source, () if end == instance.client else (end,), size) for source, end, size in transfers
    ]
    steps = [instance.step(stage.machines, stage.pieces) for stage in stages]
    if share_of:
        steps = [
            step._replace(shares=tuple(share_of[machine] for machine in step.machines)) if not step.shares else step
            for step in steps
        ]
    return Candidate(tuple(stages), Flow(instance.problem, instance, steps, numbered))


def _topological_order(
    instance: Instance, stages: Sequence[Placement], transfers: Sequence[tuple[int, int, float]]
) -> tuple[int, ...]:
    before: dict[int, set[int]] = {number: set() for number in range(len(stages))}
    for source, end, _ in transfers:
        if instance.client not in (source, end):
            before[end].add(source)
    try:
        return tuple(graphlib.TopologicalSorter(before).static_order())
    except graphlib.CycleError as error:
        names = [names_of([instance.machines[m] for m in stages[number].machines]) for number in error.args[1]]
        raise PlanError(f"the stages wait for each other in a cycle: {' → '.join(reversed(names))}") from error


def delivered(instance: Instance, plan: Candidate) -> Candidate:
    """Return the plan as it runs: each replica gets the share that its round-robin schedule gives it.

    A replica without a share is removed. The result is never better than with shares of any size. A plan without
    replicas is returned unchanged.
    """
    several = [stage.machines for stage in plan.stages if len(stage.machines) > 1]
    if not several:
        return plan
    loads = {instance.machine_number[load.machine]: load for load in plan.flow.loads}
    schedules = fairest_turns(
        [[loads[machine].share for machine in machines] for machines in several],
        [max(loads[machine].compute_seconds for machine in machines) for machines in several],
    )
    share_of = {
        machine: count / sum(counts)
        for machines, counts in zip(several, schedules, strict=True)
        for machine, count in zip(machines, counts, strict=True)
        if count
    }
    stages = [
        Placement(tuple(machine for machine in stage.machines if machine in share_of), stage.pieces)
        if len(stage.machines) > 1
        else stage
        for stage in plan.stages
    ]
    return candidate(instance, stages, share_of)


def best_delivered(instance: Instance, plans: Iterable[Candidate]) -> Candidate | None:
    """Return the best plan after `delivered` that keeps to the problem's limits; None if there is none."""
    problem = instance.problem
    feasible: list[Candidate] = []
    least = math.inf
    for plan in sorted(plans, key=lambda plan: plan.value(problem)):
        if plan.value(problem) > least * (1 + TOLERANCE):
            break
        running = delivered(instance, plan)
        if within_limits(problem, running.flow):
            feasible.append(running)
            least = min(least, running.value(problem))
    return best_of(problem, feasible)


def fits(instance: Instance, plan: Candidate) -> bool:
    """Whether a plan keeps to pins, memory and the numbers of stages and machines; ignores period and latency."""
    return _keeps_numbers(instance, plan) and _keeps_pins(instance, plan) and lack_of(instance, plan) == 0


def _keeps_numbers(instance: Instance, plan: Candidate) -> bool:
    return instance.problem.stages in (None, len(plan.stages)) and len(plan.machines) <= instance.machine_limit


def _keeps_pins(instance: Instance, plan: Candidate) -> bool:
    return all(instance.is_allowed(stage.machines, stage.pieces) for stage in plan.stages)


def lack_of(instance: Instance, plan: Candidate) -> float:
    """Return the bytes by which a plan exceeds the memory, summed over machines."""
    if np.isinf(instance.memory).all():
        return 0.0
    return math.fsum(
        max(0.0, load.memory_bytes - float(instance.memory[instance.machine_number[load.machine]]))
        for load in plan.flow.loads
    )


def within_limits(problem: Problem, plan: Timed) -> bool:
    """Whether the plan's period and latency keep to the problem's limits."""
    # Do not read the latency if its limit is infinite: it takes time to compute.
    return all(
        math.isinf(limit) or getattr(plan, name) <= limit * (1 + TOLERANCE)
        for name, limit in (
            ("period_seconds", problem.maximum_period_seconds),
            ("latency_seconds", problem.maximum_latency_seconds),
        )
    )


def best_of(problem: Problem, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate with the least `value`; ties: the least `other_value`, then the fewest machines."""
    remaining = list(candidates)
    for value_of in (Candidate.value, Candidate.other_value):
        least = min((value_of(plan, problem) for plan in remaining), default=math.inf)
        remaining = [plan for plan in remaining if value_of(plan, problem) <= least * (1 + TOLERANCE)]
    return min(remaining, key=lambda plan: len(plan.machines), default=None)


def one_machine_candidates(instance: Instance) -> list[Candidate]:
    """Return one plan per machine that can hold all pieces: everything on that machine."""
    everything = tuple(range(len(instance.pieces)))
    possible = [machine for machine in range(len(instance.machines)) if np.isfinite(instance.seconds[:, machine]).all()]
    plans = [candidate(instance, [Placement((machine,), everything)]) for machine in possible]
    return [plan for plan in plans if fits(instance, plan)]
