"""Which machine takes the stages of a lost one, by the planner's own evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm_split.errors import PlanError
from tvm_split.placement.evaluate import flow_of, memory_shortage
from tvm_split.placement.problem import Amount, Problem, objective_seconds
from tvm_split.placement.step_graph import Step, StepGraph

Slower = Callable[[Step, str, str], float]
"""Returns by what factor a step is slower on a machine (last) than on its own; infinite if that cannot compute it."""


@dataclass(frozen=True)
class Fallback:
    """The best ``destination`` of the stages of a lost ``machine``, and what is then predicted.

    Without a destination they fit nowhere.
    """

    machine: str
    destination: str = ""
    period_seconds: Amount | None = None
    latency_seconds: Amount | None = None


def fallback(problem: Problem, graph: StepGraph, lost: str, slower: Slower) -> Fallback:
    """Return the fallback for the loss of a machine.

    Only an idle machine takes a replica, as in `rpc_runtime.program.placing`; else the other replicas are left.
    """
    used = {machine for step in graph.steps for machine in step.machines}
    moved = [step for step in graph.steps if lost in step.machines]
    able = [one.name for one in problem.machines if one.name != lost]
    able = [name for name in able if all(math.isfinite(slower(step, lost, name)) for step in moved)]
    # Of equally good ones the first counts: idle machines, then other replicas.
    able.sort(key=lambda name: name in used and 1 + all(name not in step.machines for step in moved))
    best, least = Fallback(lost), math.inf
    for destination in able:
        steps = tuple(_taken(step, lost, destination, destination not in used, slower) for step in graph.steps)
        try:
            flow = flow_of(problem, replace(graph, steps=steps))
        except PlanError:  # a link is missing
            continue
        value = objective_seconds(problem.objective, flow)
        if value < least and memory_shortage(problem, flow) == 0:
            best, least = Fallback(lost, destination, flow.period_seconds, flow.latency_seconds), value
    return best


def _taken(step: Step, lost: str, destination: str, is_idle: bool, slower: Slower) -> Step:
    """Return the step on its machines without the lost one."""
    if lost not in step.machines:
        return step
    may_move = is_idle or len(step.machines) == 1
    kept = [at for at, name in enumerate(step.machines) if may_move or name != lost]
    factors = [slower(step, lost, destination) if name == lost else 1.0 for name in step.machines]
    whole = math.fsum(step.shares[at] for at in kept if step.shares)
    return replace(
        step,
        machines=tuple(destination if step.machines[at] == lost else step.machines[at] for at in kept),
        shares=tuple(step.shares[at] / whole for at in kept if step.shares),
        seconds=tuple(factors[at] * step.seconds[at] for at in kept),
        contended_seconds=tuple(factors[at] * step.contended_seconds[at] for at in kept),
    )
