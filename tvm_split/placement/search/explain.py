"""Explains a plan: the best alternatives, and why machines stay idle; or why no plan fits, and by how much.

To find the demand that no plan meets, it drops one demand after the other and searches again.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import NoPlanError
from tvm_split.placement.evaluate import memory_shortage
from tvm_split.placement.problem import TOLERANCE, Problem, ProblemLink
from tvm_split.placement.search.candidate import Candidate, best_of, scheduled
from tvm_split.placement.search.instance import Instance, instance_of
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.units import count_text, names_of, precise_bytes_text, seconds_text

MOST_ALTERNATIVES = 4
MOST_IDLE = 12
"""Most idle machines that get a reason each; the others are only counted."""
Find = Callable[[Problem], Sequence[Candidate]]
"""Function that returns the plans of a problem in which a demand is left out."""


def require_places(instance: Instance) -> None:
    """Check that every piece can run on at least one machine.

    Raises:
        NoPlanError: pins, missing times or missing client links leave no machine for a piece; names the piece and why.
    """
    for piece, name in enumerate(instance.pieces):
        if all(math.isinf(value) for value in instance.seconds[piece]):
            reasons = (f"not on {machine}, {_why_not(instance, name, machine)}" for machine in instance.machines)
            raise NoPlanError(f"piece {name!r} can run on no machine: {'; '.join(reasons)}")


def why_impossible(problem: Problem, find: Find) -> str:
    """Return a message that names the demand that no plan meets."""
    able = int(np.isfinite(instance_of(problem).times).any(axis=0).sum())
    if problem.stages and able < problem.stages:
        return f"no plan has {problem.stages} stages: only {able} machines have seconds for a piece"
    free = dataclasses.replace(problem, maximum_period_seconds=math.inf, maximum_latency_seconds=math.inf)
    if free != problem and find(free):
        return _why_over_limits(problem, find)
    unlimited = dataclasses.replace(
        free, machines=tuple(dataclasses.replace(machine, memory_bytes=math.inf) for machine in problem.machines)
    )
    if plans := find(unlimited):
        return _why_too_large(instance_of(free), plans)
    ends = itertools.permutations([*(machine.name for machine in problem.machines), CLIENT], 2)
    linked = dataclasses.replace(free, links=tuple(ProblemLink(*pair, math.inf) for pair in ends))
    unlimited = dataclasses.replace(linked, machines=unlimited.machines)
    for relaxed in (linked, unlimited):
        chosen = best_of(find(relaxed))
        if chosen:
            return _missing_links(problem, relaxed, chosen)
    if find(dataclasses.replace(unlimited, pins=())):
        pins = (f"{pin.piece!r} {'not on' if pin.forbidden else 'on'} {pin.machine}" for pin in problem.pins[:6])
        return (
            f"no plan keeps to the pins: with them, a machine depends on its own results in a cycle, or more "
            f"machines are needed than are allowed; the pins are {', '.join(pins)}"
        )
    if (problem.stages, problem.maximum_machines) != (None, None):
        chosen = best_of(find(dataclasses.replace(unlimited, pins=(), stages=None, maximum_machines=None)))
        if chosen:
            demand = f"{problem.stages} stages" if problem.stages else f"at most {problem.maximum_machines} machines"
            return (
                f"no plan of {demand} was found, but there are plans on {len(chosen.machines)} machines; ask for "
                "another number, or allow more time"
            )
    return "no plan runs every piece: every choice of machines that have seconds for the pieces has a cycle"


def _why_too_large(instance: Instance, plans: Sequence[Candidate]) -> str:
    """Return a message with the memory needed, the memory available, and what the nearest of some plans lacks."""
    nearest = min(plans, key=lambda plan: (memory_shortage(instance.problem, plan.flow), len(plan.machines)))
    weights, memory = math.fsum(instance.weight_bytes), math.fsum(instance.memory_bytes)
    limits = {load: float(instance.memory_bytes[instance.machine_number[load.machine]]) for load in nearest.flow.loads}
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
        f"{precise_bytes_text(memory_shortage(instance.problem, nearest.flow))}: {'; '.join(lines)}"
    )


def _why_over_limits(problem: Problem, find: Find) -> str:
    period, latency = problem.maximum_period_seconds, problem.maximum_latency_seconds
    fastest = best_of(find(dataclasses.replace(problem, objective="latency", maximum_latency_seconds=math.inf)))
    if fastest is None:
        free = dataclasses.replace(
            problem, objective="throughput", maximum_period_seconds=math.inf, maximum_latency_seconds=math.inf
        )
        best = best_of(find(free))
        reachable = "" if best is None else f"; the least found is {seconds_text(best.flow.period_seconds)}"
        return f"no plan has a period of at most {seconds_text(period)}{reachable}"
    least = seconds_text(fastest.flow.latency_seconds)
    if math.isinf(period):
        return f"no plan has a latency of at most {seconds_text(latency)}; the least found is {least}"
    return (
        f"no plan has a latency of at most {seconds_text(latency)} and a period of at most {seconds_text(period)}; "
        f"with that period, the least latency found is {least}"
    )


def _missing_links(problem: Problem, relaxed: Problem, plan: Candidate) -> str:
    instance, linked = instance_of(relaxed), instance_of(problem).linked
    number = instance.machine_number | {CLIENT: instance.client}
    holder = {
        instance.pieces[piece]: instance.machines[stage.machines[0]] for stage in plan.stages for piece in stage.pieces
    } | {CLIENT: CLIENT}
    pairs = {(holder[edge.source], holder[edge.destination]): None for edge in problem.edges}
    missing = [
        f"from {source} to {end}" for source, end in pairs if source != end and not linked[number[source], number[end]]
    ]
    return (
        f"no plan fits the links: one on {names_of([instance.machines[machine] for machine in plan.machines])} would, "
        f"but there is no link {names_of(missing)}; links are one-way, so name both directions"
    )


def _why_not(instance: Instance, name: str, machine: str) -> str:
    pins = [pin for pin in instance.problem.pins if pin.piece == name]
    piece, number = instance.piece_number[name], instance.machine_number[machine]
    elsewhere = [pin.machine for pin in pins if not pin.forbidden and pin.machine != machine]
    if elsewhere:
        return f"since it is pinned to {elsewhere[0]}"
    if any(pin.forbidden and pin.machine == machine for pin in pins):
        return "where a pin forbids it"
    if math.isinf(instance.times[piece, number]):
        return "for which it has no seconds"
    reads_input = any(tensor.source == instance.client and piece in tensor.destinations for tensor in instance.tensors)
    if reads_input and not instance.linked[-1, number]:
        return "to which there is no link from the client"
    return "from which there is no link to the client"


def alternatives(instance: Instance, chosen: Candidate, candidates: Sequence[Candidate]) -> tuple[Solution, ...]:
    """Return the best few plans on other sets of machines as they run, best first.

    The best plan for each number of machines comes before the other single machines. Besides the nearest numbers, those
    of 1, 2, 4, 8 … fewer machines are there, since one of them may be preferred.
    """
    problem = instance.problem
    plans: dict[frozenset[int], Candidate] = {}
    for plan in sorted(candidates, key=lambda plan: plan.rank):
        plans.setdefault(frozenset(plan.machines), plan)
    plans.pop(frozenset(chosen.machines), None)
    first: dict[int, Candidate] = {}
    for plan in plans.values():
        first.setdefault(len(plan.machines), plan)
    near = sorted(first.values(), key=lambda plan: abs(len(plan.machines) - len(chosen.machines)))[:MOST_ALTERNATIVES]
    rest = sorted(plans.values(), key=lambda plan: len(plan.machines) > 1)
    fewer = [first[2**power] for power in range(len(chosen.machines).bit_length()) if 2**power in first]
    most = [*dict.fromkeys([*near, *rest])][:MOST_ALTERNATIVES]
    most += [plan for plan in fewer if plan not in most and len(plan.machines) < len(chosen.machines)]
    running = {frozenset(plan.machines): plan for plan in (scheduled(instance, plan) for plan in most)}
    running.pop(frozenset(chosen.machines), None)
    shown = sorted(running.values(), key=lambda plan: plan.rank)
    return tuple(
        dataclasses.replace(
            solution_of(problem, plan.named(instance)),
            name=_title(instance, plan),
            why=_compared(problem, chosen, plan),
        )
        for plan in shown
    )


def why_no_more_machines(instance: Instance, chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return one sentence for every idle machine."""
    problem = instance.problem
    sentences = []
    used = set(chosen.machines)
    idle = [machine for machine in range(len(instance.machines)) if machine not in used]
    machines_of = [(plan, set(plan.machines)) for plan in candidates]
    for machine in idle[:MOST_IDLE]:
        # Prefer plans that also use machines of this plan, so that a machine is not compared with its identical twin.
        using = [plan for plan, machines in machines_of if machine in machines and machines & used]
        using = using or [plan for plan, machines in machines_of if machine in machines]
        feasible = [plan for plan in using if plan.is_within_limits] or using
        best = min(feasible, key=lambda plan: plan.rank, default=None)
        best = None if best is None else scheduled(instance, best)
        if best is None:
            reason = _why_unusable(instance, machine, chosen)
        elif machine in best.machines:
            reason = f"the best plan found that uses it {_compared(problem, chosen, best)}"
        else:
            reason = "the round-robin schedule of the best plan that includes it never reaches it"
        sentences.append(f"{instance.machines[machine]} is idle: {reason}")
    more = len(idle) - MOST_IDLE
    return "; ".join([*sentences, f"{more} more machines are idle"] if more > 0 else sentences)


def _compared(problem: Problem, chosen: Candidate, plan: Candidate) -> str:
    kind, other_kind = ("period", "latency") if problem.objective == "throughput" else ("latency", "period")
    chosen_value, value = chosen.value, plan.value
    text = f"has a {kind} of {seconds_text(value)}, this one {seconds_text(chosen_value)}"
    if value <= chosen_value * (1 + TOLERANCE):
        is_same = value >= chosen_value * (1 - TOLERANCE)
        text = f"has the same {kind} of {seconds_text(chosen_value)}, and" if is_same else f"{text}, but"
        text += f" a {other_kind} of {seconds_text(plan.other_value)} against "
        text += seconds_text(chosen.other_value)
        if not plan.is_within_limits:
            limit = problem.maximum_latency_seconds if kind == "period" else problem.maximum_period_seconds
            return f"{text}, over the limit of {seconds_text(limit)}"
        return f"{text}, on {count_text(len(plan.machines), 'machine')} instead of {len(chosen.machines)}"
    if kind == "period":
        return f"{text}, since {plan.flow.limiting} takes that long"
    wire = plan.flow.latency_seconds - math.fsum(load.compute_seconds for load in plan.flow.loads)
    return f"{text}, of which {seconds_text(wire)} are transfers" if wire > 0 else text


def _why_unusable(instance: Instance, machine: int, chosen: Candidate) -> str:
    if len(chosen.machines) >= instance.machine_limit:
        return f"at most {instance.machine_limit} machines may be used, and no plan found with it is as good"
    if instance.problem.stages is not None and not instance.problem.replicas:
        return f"{instance.problem.stages} stages were asked for, and no plan found with it is as good"
    if not any(math.isfinite(value) for value in instance.seconds[:, machine]):
        return "pins, missing times or missing client links exclude it from every piece"
    is_linked = instance.linked[machine, :-1].any() or instance.linked[:-1, machine].any()
    if not is_linked and len(instance.machines) > 1:
        return "no link connects it to another machine, and it cannot hold the whole model by itself"
    return "no plan found that uses it fits the links, pins and memory"


def _title(instance: Instance, plan: Candidate) -> str:
    if len(plan.machines) == 1:
        return f"all on {instance.machines[plan.machines[0]]}"
    machines = names_of([instance.machines[machine] for machine in plan.machines])
    return f"{count_text(len(plan.stages), 'stage')} on {machines}"
