"""Explains why no plan fits a problem, and by how much: it drops one demand after the other and searches again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Problem, ProblemLink
from tvm_split.planner.search.candidate import Candidate, lack_of
from tvm_split.planner.search.instance import Instance, instance_of
from tvm_split.planner.search.search import Found
from tvm_split.units import names_of, precise_bytes_text, seconds_text

Find = Callable[[Problem], Found]
"""Function that searches a problem in which a demand is left out."""


def require_places(instance: Instance) -> None:
    """Check that every piece can run on at least one machine.

    Raises:
        PlanError: pins, missing times or missing client links leave no machine for a piece; names the piece and why.
    """
    for piece, name in enumerate(instance.pieces):
        if all(math.isinf(value) for value in instance.seconds[piece]):
            raise PlanError(_why_nowhere(instance, name))


def why_impossible(problem: Problem, find: Find) -> str:
    """Return a message that names the demand that no plan meets."""
    able = int(np.isfinite(instance_of(problem).times).any(axis=0).sum())
    if problem.stages and able < problem.stages:
        return f"no plan has {problem.stages} stages: only {able} machines have seconds for any piece"
    free = dataclasses.replace(problem, maximum_period_seconds=math.inf, maximum_latency_seconds=math.inf)
    if free != problem and find(free).chosen:
        return _why_over_limits(problem, find)
    unlimited = dataclasses.replace(
        free, machines=tuple(dataclasses.replace(machine, memory_bytes=math.inf) for machine in problem.machines)
    )
    found = find(unlimited)
    if found.chosen:
        return _why_too_large(instance_of(free), found.plans)
    linked = _fully_linked(free)
    unlimited = dataclasses.replace(linked, machines=unlimited.machines)
    for relaxed in (linked, unlimited):
        chosen = find(relaxed).chosen
        if chosen:
            return _missing_links(problem, relaxed, chosen)
    if find(dataclasses.replace(unlimited, pins=())).chosen:
        return (
            f"no plan keeps to the pins: with them, a machine would wait for its own values in a circle, or more "
            f"machines were needed than may be used; pinned are {_pin_list(problem)}"
        )
    if (problem.stages, problem.maximum_machines) != (None, None):
        chosen = find(dataclasses.replace(unlimited, pins=(), stages=None, maximum_machines=None)).chosen
        if chosen:
            wanted = f"{problem.stages} stages" if problem.stages else f"at most {problem.maximum_machines} machines"
            return (
                f"no plan of {wanted} was found; of those on {len(chosen.machines)} machines there are some, so ask "
                "for another number, or leave more time"
            )
    return (
        "no plan runs every piece: the machines that have seconds for a piece cannot be put in an order without circles"
    )


def _why_too_large(instance: Instance, plans: Sequence[Candidate]) -> str:
    """Return a message with the memory needed, the memory available, and what the nearest of some plans lacks."""
    nearest = min(plans, key=lambda plan: (lack_of(instance, plan), len(plan.machines)))
    weights, memory = math.fsum(instance.weights), math.fsum(instance.memory)
    limits = {load: float(instance.memory[instance.machine_number[load.machine]]) for load in nearest.flow.loads}
    lines = [
        f"{load.machine} needs {precise_bytes_text(load.memory_bytes)} "
        f"(weights {precise_bytes_text(load.weight_bytes)}, activations {precise_bytes_text(load.activation_bytes)}, "
        f"in flight {precise_bytes_text(load.buffer_bytes)}) and has {precise_bytes_text(limit)}"
        for load, limit in limits.items()
        if load.memory_bytes > limit
    ]
    return (
        f"no plan fits the memory: the weights are {precise_bytes_text(weights)}, "
        f"the machines have {precise_bytes_text(memory)}; the plan found that comes nearest lacks "
        f"{precise_bytes_text(lack_of(instance, nearest))}: {'; '.join(lines)}"
    )


def _why_over_limits(problem: Problem, find: Find) -> str:
    period, latency = problem.maximum_period_seconds, problem.maximum_latency_seconds
    fastest = find(dataclasses.replace(problem, objective="latency", maximum_latency_seconds=math.inf)).chosen
    if fastest is None:
        free = dataclasses.replace(
            problem, objective="throughput", maximum_period_seconds=math.inf, maximum_latency_seconds=math.inf
        )
        best = find(free).chosen
        reachable = "" if best is None else f"; the least found is {seconds_text(best.flow.period_seconds)}"
        return f"no plan has a period of at most {seconds_text(period)}{reachable}"
    reached = seconds_text(fastest.flow.latency_seconds)
    if math.isinf(period):
        return f"no plan has a latency of at most {seconds_text(latency)}; the least found is {reached}"
    return (
        f"no plan has a latency of at most {seconds_text(latency)} and a period of at most {seconds_text(period)}; "
        f"with that period, the least latency found is {reached}"
    )


def _fully_linked(problem: Problem) -> Problem:
    names = [*(machine.name for machine in problem.machines), CLIENT]
    return dataclasses.replace(
        problem, links=tuple(ProblemLink(*pair, math.inf) for pair in itertools.permutations(names, 2))
    )


def _missing_links(problem: Problem, relaxed: Problem, found: Candidate) -> str:
    instance, linked = instance_of(relaxed), instance_of(problem).linked
    number = instance.machine_number | {CLIENT: instance.client}
    holder = {
        instance.pieces[piece]: instance.machines[stage.machines[0]] for stage in found.stages for piece in stage.pieces
    } | {CLIENT: CLIENT}
    pairs = {(holder[edge.source], holder[edge.destination]): None for edge in problem.edges}
    missing = [
        f"from {source} to {end}" for source, end in pairs if source != end and not linked[number[source], number[end]]
    ]
    return (
        f"no plan fits the links: one on {names_of([instance.machines[machine] for machine in found.machines])} would, "
        f"but there is no link {names_of(missing)}; links are one-way, so name both directions"
    )


def _pin_list(problem: Problem) -> str:
    return ", ".join(f"{pin.piece!r} {'not on' if pin.forbidden else 'on'} {pin.machine}" for pin in problem.pins[:6])


def _why_nowhere(instance: Instance, name: str) -> str:
    problem = instance.problem
    ends = {(edge.source, edge.destination) for edge in problem.edges}
    reasons = []
    for machine in problem.machines:
        forbidden = [pin for pin in problem.pins if pin.piece == name and pin.forbidden and pin.machine == machine.name]
        elsewhere = [
            pin for pin in problem.pins if pin.piece == name and not pin.forbidden and pin.machine != machine.name
        ]
        number = instance.machine_number[machine.name]
        if elsewhere:
            reasons.append(f"not on {machine.name}, since it is pinned to {elsewhere[0].machine}")
        elif forbidden:
            reasons.append(f"not on {machine.name}, where a pin forbids it")
        elif math.isinf(instance.times[instance.piece_number[name], number]):
            reasons.append(f"not on {machine.name}, for which it has no seconds")
        elif (CLIENT, name) in ends and not instance.linked[-1, number]:
            reasons.append(f"not on {machine.name}, to which there is no link from the client")
        else:
            reasons.append(f"not on {machine.name}, from which there is no link to the client")
    return f"piece {name!r} can run on no machine: {'; '.join(reasons)}"
