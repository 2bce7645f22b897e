"""Prefer a plan with fewer machines if using more gains too little to be measured."""

from __future__ import annotations

import dataclasses
import math

from tvm_split.planner.evaluate import evaluate, keeps_demands
from tvm_split.planner.problem import Alternative, Problem, Solution, Stage, gap_of, objective_seconds
from tvm_split.planner.step_graph import lower
from tvm_split.units import seconds_text

MORE_MACHINES = "the plan on more machines"
"""The name of the alternative that was rejected."""
MARGIN = 0.02
"""Approximate relative difference between two measurements of the same thing on a quiet machine."""
MARGIN_PER_DOUBLING = 0.15
"""Additional gain in throughput that more machines must bring for each doubling of the latency."""
LARGEST_MARGIN = 0.3
"""Largest gain that is required: a user who asks for throughput accepts any latency for it."""


def with_fewest_machines(problem: Problem, solution: Solution) -> Solution:
    """The alternative with the fewest machines among those that are almost as good; else the solution itself.

    Almost as good is within `MARGIN`. For throughput the limit grows by `MARGIN_PER_DOUBLING` for each factor of two by
    which the solution's latency exceeds the alternative's (as over a slow link), up to `LARGEST_MARGIN`. If the user
    asked for a number of stages, the solution stays.
    """
    if problem.stages is not None:
        return solution
    own = objective_seconds(problem.objective, solution.evaluation)
    fewer = [
        each
        for each in solution.alternatives
        if _machines(each.stages) < _machines(solution.stages)
        and objective_seconds(problem.objective, each) <= own * (1 + _margin(problem, solution, each))
        and keeps_demands(problem, each.stages, each)
    ]
    if not fewer:
        return solution
    chosen = min(fewer, key=lambda each: (_machines(each.stages), objective_seconds(problem.objective, each)))
    evaluation = evaluate(problem, lower(problem, chosen.stages))
    value = objective_seconds(problem.objective, evaluation)
    lost = value / own - 1 if own > 0 else 0.0
    return dataclasses.replace(
        solution,
        stages=chosen.stages,
        evaluation=evaluation,
        gap=gap_of(value, solution.lower_bound_seconds),
        method=f"{solution.method}; machines were spared",
        why_no_more_machines=f"{_machines(solution.stages)} machines would gain {lost:.1%} and have a latency of "
        f"{seconds_text(solution.evaluation.latency_seconds)} instead of {seconds_text(evaluation.latency_seconds)}",
        alternatives=(
            Alternative(
                MORE_MACHINES,
                solution.stages,
                solution.evaluation.period_seconds,
                solution.evaluation.latency_seconds,
                f"gains {lost:.1%} with {_machines(solution.stages)} machines",
            ),
            *(each for each in solution.alternatives if each is not chosen),
        ),
    )


def _margin(problem: Problem, solution: Solution, other: Alternative) -> float:
    later = solution.evaluation.latency_seconds / other.latency_seconds if other.latency_seconds > 0 else 1.0
    if problem.objective == "latency" or later <= 1.0:
        return MARGIN
    return min(MARGIN + MARGIN_PER_DOUBLING * math.log2(later), LARGEST_MARGIN)


def _machines(stages: tuple[Stage, ...]) -> int:
    return sum(len(stage.machines) for stage in stages)
