"""Explains the chosen plan: the best alternatives, and why machines stay idle, in words with numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tvm_split.planner.problem import TOLERANCE, Alternative, Problem
from tvm_split.planner.search.candidate import Candidate, within_limits
from tvm_split.planner.search.instance import Instance
from tvm_split.units import names_of, seconds_text

MOST_ALTERNATIVES = 4
MOST_IDLE = 12
"""Most idle machines that get a reason each; the others are only counted."""


def alternatives(
    instance: Instance, chosen: Candidate, others: Iterable[Candidate], deliver: Callable[[Candidate], Candidate]
) -> tuple[Alternative, ...]:
    """Return the best few plans on other sets of machines, best first.

    The best plan for each number of machines comes before the other single machines. ``deliver`` turns each plan into
    the plan as it runs, which is never better.
    """
    problem = instance.problem
    taken = {frozenset(chosen.machines)}
    ranked = sorted(others, key=lambda each: each.rank(problem))
    first: list[Candidate] = []
    rest: list[Candidate] = []
    counts: set[int] = set()
    for each in ranked:
        if frozenset(each.machines) in taken:
            continue
        taken.add(frozenset(each.machines))
        (rest if len(each.machines) in counts else first).append(each)
        counts.add(len(each.machines))
    near = sorted(first, key=lambda each: abs(len(each.machines) - len(chosen.machines)))[:MOST_ALTERNATIVES]
    alone = [each for each in rest if len(each.machines) == 1]
    most = (near + alone + [each for each in rest if len(each.machines) > 1])[:MOST_ALTERNATIVES]
    delivered = {frozenset(each.machines): each for each in map(deliver, most)}
    delivered.pop(frozenset(chosen.machines), None)
    shown = sorted(delivered.values(), key=lambda each: each.rank(problem))
    return tuple(
        Alternative(
            _title(instance, each),
            each.named(instance),
            each.flow.period_seconds,
            each.flow.latency_seconds,
            _compared(problem, chosen, each),
        )
        for each in shown
    )


def why_no_more_machines(
    instance: Instance,
    chosen: Candidate,
    others: Sequence[Candidate],
    deliver: Callable[[Candidate], Candidate],
) -> str:
    """Return one sentence for every idle machine."""
    problem = instance.problem
    sentences = []
    used = set(chosen.machines)
    idle = [machine for machine in range(len(instance.machines)) if machine not in used]
    machines_of = [(each, set(each.machines)) for each in others]
    for machine in idle[:MOST_IDLE]:
        name = instance.machines[machine]
        # Prefer plans that also use machines of this plan, so that a machine is not compared with its identical twin.
        using = [each for each, machines in machines_of if machine in machines and machines & used]
        using = using or [each for each, machines in machines_of if machine in machines]
        kept = [each for each in using if within_limits(problem, each.flow)] or using
        best = min(kept, key=lambda each: each.rank(problem), default=None)
        best = None if best is None else deliver(best)
        if best is not None and machine not in best.machines:
            sentences.append(f"{name} is idle: the best plan found with it has no turn for it")
        elif best is None:
            sentences.append(f"{name} is idle: {_why_unusable(instance, machine, chosen)}")
        else:
            compared = _compared(problem, chosen, best)
            sentences.append(f"{name} is idle: the best plan found that uses it {compared}")
    more = len(idle) - MOST_IDLE
    return "; ".join([*sentences, f"{more} more machines are idle"] if more > 0 else sentences)


def _compared(problem: Problem, chosen: Candidate, other: Candidate) -> str:
    kind, other_kind = ("period", "latency") if problem.objective == "throughput" else ("latency", "period")
    own, value = chosen.value(problem), other.value(problem)
    if value > own * (1 + TOLERANCE):
        text = f"has a {kind} of {seconds_text(value)}, this one {seconds_text(own)}"
    else:
        same = f"has a {kind} of {seconds_text(value)}, this one {seconds_text(own)}, but"
        if abs(value - own) <= own * TOLERANCE:
            same = f"has the same {kind} of {seconds_text(own)}, and"
        text = f"{same} a {other_kind} of {seconds_text(other.other_value(problem))} against "
        text += seconds_text(chosen.other_value(problem))
        if not within_limits(problem, other.flow):
            limit = problem.maximum_latency_seconds if kind == "period" else problem.maximum_period_seconds
            return f"{text}, over the limit of {seconds_text(limit)}"
        return f"{text}, on {len(other.machines)} machines instead of {len(chosen.machines)}"
    if kind == "period":
        return f"{text}, since {other.flow.limiting} takes that long"
    wire = other.flow.latency_seconds - math.fsum(load.compute_seconds for load in other.flow.loads)
    return f"{text}, of which {seconds_text(max(wire, 0.0))} pass on links" if wire > 0 else text


def _why_unusable(instance: Instance, machine: int, chosen: Candidate) -> str:
    if len(chosen.machines) >= instance.machine_limit:
        return f"at most {instance.machine_limit} machines may be used, and no plan found with it is as good"
    if instance.problem.stages is not None and not instance.problem.replicas:
        return f"{instance.problem.stages} stages were asked for, and no plan found with it is as good"
    if not any(math.isfinite(value) for value in instance.seconds[:, machine]):
        return "it may run no piece, by its pins, times and links to the client"
    lonely = not (instance.linked[machine, :-1].any() or instance.linked[:-1, machine].any())
    if lonely and len(instance.machines) > 1:
        return "no link joins it to another machine, and it does not fit the whole model by itself"
    return "no plan found that uses it fits the links, pins and memory"


def _title(instance: Instance, found: Candidate) -> str:
    if len(found.machines) == 1:
        return f"all on {instance.machines[found.machines[0]]}"
    return f"{len(found.stages)} stages on {names_of([instance.machines[machine] for machine in found.machines])}"
