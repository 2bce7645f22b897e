"""Whether more machines are worth it: prefer fewer if the gain cannot be measured, and say what one alone does."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

from tvm_split.planner.baselines import ONE_MACHINE
from tvm_split.planner.evaluate import evaluate, keeps_demands
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Alternative, Problem, Solution, Stage, Timed, gap_of, objective_seconds
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
    solution_seconds = objective_seconds(problem.objective, solution.evaluation)
    fewer = [
        alternative
        for alternative in solution.alternatives
        if _machines(alternative.stages) < _machines(solution.stages)
        and objective_seconds(problem.objective, alternative)
        <= solution_seconds * (1 + _margin(problem, solution, alternative))
        and keeps_demands(problem, alternative.stages, alternative)
    ]
    if not fewer:
        return solution
    chosen = min(
        fewer,
        key=lambda alternative: (_machines(alternative.stages), objective_seconds(problem.objective, alternative)),
    )
    evaluation = evaluate(problem, lower(problem, chosen.stages))
    value = objective_seconds(problem.objective, evaluation)
    lost = value / solution_seconds - 1 if solution_seconds > 0 else 0.0
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
            *(alternative for alternative in solution.alternatives if alternative is not chosen),
        ),
    )


def _margin(problem: Problem, solution: Solution, alternative: Alternative) -> float:
    later = (
        solution.evaluation.latency_seconds / alternative.latency_seconds if alternative.latency_seconds > 0 else 1.0
    )
    if problem.objective == "latency" or later <= 1.0:
        return MARGIN
    return min(MARGIN + MARGIN_PER_DOUBLING * math.log2(later), LARGEST_MARGIN)


def _machines(stages: tuple[Stage, ...]) -> int:
    return sum(len(stage.machines) for stage in stages)


def one_machine_advice(plan: Plan, machines: int) -> str | None:
    """A message if no split over a cluster of ``machines`` machines is worth it, compared with one alone; else None."""
    prediction = plan.prediction
    if prediction is None or machines < 2:
        return None
    value = partial(objective_seconds, plan.objective)

    def text(timed: Timed) -> str:
        seconds = value(timed)
        return (
            f"{1 / seconds:.4g} micro-batches a second" if plan.objective == "throughput" else f"{seconds * 1e3:.4g} ms"
        )

    alone = [baseline for baseline in prediction.baselines if baseline.name.startswith(ONE_MACHINE)]
    if not alone:
        return None
    best, machine = min(alone, key=value), prediction.machines[0].machine
    if len(prediction.machines) > 1:
        if value(best) >= value(prediction):
            return None
        return (
            f"one machine alone would be faster: {best.stages[0][0]} does {text(best)}, this split over "
            f"{len(prediction.machines)} machines {text(prediction)}; leave out what forces the split, such as a "
            "number of stages, to let the planner choose"
        )
    given_up = next((alternative for alternative in prediction.alternatives if alternative.name == MORE_MACHINES), None)
    if given_up is not None:
        return (
            f"more machines gain too little: {machine} alone does {text(prediction)}, the best plan over several "
            f"machines {text(given_up)}; {prediction.why_no_more_machines}"
        )
    single = {baseline.stages[0][0] for baseline in alone}
    splits = [
        split
        for split in (*prediction.alternatives, *prediction.baselines)
        if not {name for name, _ in split.stages} <= single or len(split.stages) > 1
    ]
    nearest = min(splits, key=value, default=None)
    if nearest is None or value(nearest) < value(prediction):
        return None  # a demand, not speed, is why the plan uses one machine
    return (
        f"no split is faster than one machine alone: {machine} does {text(prediction)}, the best split over several "
        f"machines {text(nearest)}; the other machines stay idle"
    )
