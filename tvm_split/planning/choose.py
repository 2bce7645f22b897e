"""Choose a plan among solutions, and say why the others lost: on fewer machines, of whole or of sharded layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm_split.placement.evaluate import keeps_demands
from tvm_split.placement.problem import Problem
from tvm_split.placement.solution import Solution
from tvm_split.units import count_text, names_of, seconds_text

RELAXATION = "the relaxation in which pieces may be split, without communication"
"""The problem that gives the lower bound if layers may be sharded."""
MORE_MACHINES = "the plan on more machines"
"""The name of the alternative that was rejected."""
MARGIN = 0.02
"""Least gain of a plan on more machines, and of a sharded one: about the relative difference between two measurements
of the same thing on a quiet machine."""
MARGIN_PER_DOUBLING = 0.15
"""Additional gain in throughput that more machines must bring for each doubling of the latency."""
LARGEST_MARGIN = 0.3
"""Largest gain that more machines must bring: a user who asks for throughput accepts a long latency for it."""


def with_fewest_machines(problem: Problem, solution: Solution) -> Solution:
    """Return the alternative with the fewest machines among those that are almost as good; else the solution itself.

    Almost as good is within `MARGIN`. For throughput the limit grows by `MARGIN_PER_DOUBLING` for each factor of two by
    which the solution's latency exceeds the alternative's (as over a slow link), up to `LARGEST_MARGIN`. If the user
    asked for a number of stages, the solution stays.
    """
    if problem.stages is not None:
        return solution
    fewer = [
        alternative
        for alternative in solution.alternatives
        if len(alternative.machines) < len(solution.machines)
        and alternative.value_seconds <= solution.value_seconds * (1 + _margin(solution, alternative))
        and keeps_demands(problem, alternative.stages, alternative)
    ]
    if not fewer:
        return solution
    chosen = min(fewer, key=lambda alternative: (len(alternative.machines), alternative.value_seconds))
    seconds, count = solution.value_seconds, len(solution.machines)
    gain, margin = chosen.value_seconds / seconds - 1 if seconds > 0 else 0.0, _margin(solution, chosen)
    latencies = " instead of ".join(seconds_text(plan.latency_seconds) for plan in (solution, chosen))
    rejected = replace(solution, name=MORE_MACHINES, why=_compared(solution, chosen), alternatives=())
    others = (replace(other, why=_compared(other, chosen)) for other in solution.alternatives if other is not chosen)
    return replace(
        chosen.bounded(solution.lower_bound_seconds),
        method=f"fewer machines preferred; of the plan on more: {solution.method}",
        why_no_more_machines=f"{count} machines would gain {gain:.1%}, and {margin:.1%} is asked of them, since their "
        f"latency is {latencies}",
        alternatives=(rejected, *others),
        name="",
        why="",
    )


def _compared(other: Solution, chosen: Solution) -> str:
    """Return how another plan compares with the chosen one, and what limits it."""
    kind = "period" if chosen.objective == "throughput" else "latency"
    text = f"has a {kind} of {seconds_text(other.value_seconds)}, this one {seconds_text(chosen.value_seconds)}"
    if other.value_seconds < chosen.value_seconds:
        gain = chosen.value_seconds / other.value_seconds - 1 if other.value_seconds > 0 else math.inf
        return f"{text}: gains {gain:.1%} with {count_text(len(other.machines), 'machine')}"
    return f"{text}, limited by {other.evaluation.limiting}" if kind == "period" else text


def beside(solution: Solution, best: Solution, what: str) -> Solution:
    """Return a solution that was not searched, with the best one's lower bound, and the best one as an alternative.

    ``what`` says what the solution is.
    """
    if solution.stages == best.stages:
        return best
    others = (replace(best, name="the best plan found", alternatives=()), *best.alternatives)
    return replace(
        solution.bounded(best.lower_bound_seconds),
        method=f"{what}; lower bound: {best.method}",
        alternatives=tuple(
            replace(other, why=_compared(other, solution)) for other in others if other.stages != solution.stages
        ),
    )


def _margin(solution: Solution, alternative: Solution) -> float:
    shorter = alternative.latency_seconds
    latency_ratio = solution.latency_seconds / shorter if shorter > 0 else 1.0
    if solution.objective == "latency" or latency_ratio <= 1.0:
        return MARGIN
    return min(MARGIN + MARGIN_PER_DOUBLING * math.log2(latency_ratio), LARGEST_MARGIN)


def cannot_gain(whole: Solution, relaxed_seconds: float) -> bool:
    """Return whether no sharded plan can be better than ``whole`` by more than `MARGIN`: see `RELAXATION`."""
    return relaxed_seconds >= whole.value_seconds * (1 - MARGIN)


def choose(
    whole: Solution | None,
    sharded: Sequence[Solution],
    relaxed_seconds: float,
    how: str = "",
    notes: Sequence[str] = (),
) -> Solution:
    """Return the best of the plan of whole layers and sharded plans, with the reasons why the others lost.

    Args:
        whole: None if no plan of whole layers fits; then there is a sharded one.
        sharded: the best few, measured or estimated.
        relaxed_seconds: the lower bound of `RELAXATION`.
        how: how the sharded plans were found; ``notes``: what their search left out.
    """
    best = min(sharded, key=lambda plan: plan.compared_seconds, default=None)
    if best is not None and (whole is None or best.compared_seconds < whole.value_seconds * (1 - MARGIN)):
        chosen = _sharded(best, [plan for plan in sharded if plan is not best], whole, relaxed_seconds, how)
    else:
        assert whole is not None  # noqa: S101  (promised by the caller)
        chosen = _whole(whole, best, relaxed_seconds)
    return replace(chosen, method="; ".join([chosen.method, *notes]))


def _sharded(
    best: Solution, lost: Sequence[Solution], whole: Solution | None, relaxed_seconds: float, how: str
) -> Solution:
    """Return the best sharded plan, with the reasons why the others lost."""
    best_text = f"this one {seconds_text(best.compared_seconds)}"
    others = [
        replace(plan, name=sharding_of(plan), why=f"takes {seconds_text(plan.compared_seconds)}, {best_text}")
        for plan in lost
    ]
    bound = relaxed_seconds
    if whole is not None:
        bound = min(bound, whole.lower_bound_seconds)
        why = f"the best plan of whole layers has {seconds_text(whole.value_seconds)}, {best_text}"
        others.append(replace(whole, name=f"whole layers on {names_of(whole.machines)}", why=why))
        others += [other for other in whole.alternatives if other.stages != whole.stages]
    return replace(best.bounded(bound), method=f"{how}; lower bound: {RELAXATION}", alternatives=_best_first(others))


def _whole(whole: Solution, best: Solution | None, relaxed_seconds: float) -> Solution:
    """Return the plan of whole layers, with the reason why no sharded plan is better."""
    value, count = whole.value_seconds, len(whole.machines)
    whole_text = f"{'one machine' if count == 1 else f'{count} machines with whole layers'} {seconds_text(value)}"
    alternatives = whole.alternatives
    if best is not None:
        seconds, sharding = best.compared_seconds, sharding_of(best)
        pays = "no split inside layers pays" if seconds >= value else "a split inside layers gains too little"
        reason = f"{pays}: {whole_text}, best split inside layers {seconds_text(seconds)} ({sharding})"
        alternatives = (*alternatives, replace(best, name=sharding, why=f"takes {seconds_text(seconds)}"))
    elif cannot_gain(whole, relaxed_seconds):
        reason = f"no split inside layers can pay: {whole_text}, {RELAXATION} {seconds_text(relaxed_seconds)}"
    else:
        reason = f"no better split inside layers was found: {whole_text}"
    bounded = whole.bounded(min(whole.lower_bound_seconds, relaxed_seconds))
    is_relaxed = bounded.lower_bound_seconds < whole.lower_bound_seconds
    return replace(
        bounded,
        method=whole.method + (f" among whole layers; lower bound: {RELAXATION}" if is_relaxed else ""),
        why_no_more_machines="; ".join(filter(None, [whole.why_no_more_machines, reason])),
        alternatives=_best_first(alternatives),
    )


def _best_first(solutions: Sequence[Solution]) -> tuple[Solution, ...]:
    return tuple(sorted(solutions, key=lambda solution: solution.value_seconds))


def sharding_of(solution: Solution) -> str:
    """Return a description of a plan's shardings and their machines."""
    sharded = [stage for stage in solution.stages if stage.sharding]
    how = dict.fromkeys(f"{stage.sharding.axis} ({stage.sharding.exchange})" for stage in sharded if stage.sharding)
    machines = dict.fromkeys(machine for stage in sharded for machine in stage.machines)
    return f"{names_of(list(how))} sharded over {names_of(list(machines))}"
