"""Plans by simple rules: one machine, or all with equal layers, equal parameters, or equal estimated cost.

They are compared with searched plans. Fewer machines are preferred if the gain of more cannot be measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import named, with_independent_layers
from tvm_split.planner.evaluate import keeps_demands
from tvm_split.planner.graph import LayerGraph
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Alternative, Problem, Solution, Stage, Timed, objective_seconds
from tvm_split.planner.strategy import solution_of
from tvm_split.units import number_text, seconds_text

if TYPE_CHECKING:
    from tvm_split.cluster.machine import Machine

ONE_MACHINE = "one machine"
EQUAL_LAYERS = "equal layers"
EQUAL_PARAMETERS = "equal parameters"
MORE_MACHINES = "the plan on more machines"
"""The name of the alternative that was rejected."""
MARGIN = 0.02
"""Approximate relative difference between two measurements of the same thing on a quiet machine."""
MARGIN_PER_DOUBLING = 0.15
"""Additional gain in throughput that more machines must bring for each doubling of the latency."""
LARGEST_MARGIN = 0.3
"""Largest gain that is required: a user who asks for throughput accepts any latency for it."""


def baseline_stages(problem: Problem, layers_of: Mapping[str, int]) -> dict[str, tuple[Stage, ...]]:
    """Map the name of each baseline to its stages. Splits use all machines, in the problem's order.

    ``layers_of`` has the number of layers of each piece. *Equal layers* is the usual split where nothing was measured,
    *equal parameters* balances the weights.
    """
    machines = [machine.name for machine in problem.machines]
    pieces = [piece.name for piece in problem.pieces]
    baselines: dict[str, tuple[Stage, ...]] = {
        f"{ONE_MACHINE}, {name}": (Stage((name,), tuple(pieces)),) for name in machines
    }
    if len(machines) == 1 or len(pieces) < len(machines):
        return baselines
    layers = [float(layers_of[piece]) for piece in pieces]
    parameters = [float(piece.weight_bytes) for piece in problem.pieces]
    for name, weights in ((EQUAL_LAYERS, layers), (EQUAL_PARAMETERS, parameters)):
        cuts = proportional_cuts(weights, [1.0] * len(machines))
        baselines[name] = tuple(
            Stage((machine,), tuple(pieces[start:end]))
            for machine, (start, end) in zip(machines, itertools.pairwise(cuts), strict=True)
        )
    return baselines


def proportional_cuts(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Cut positions, from 0 to the length, that split a sequence into parts whose sums are near ``shares``.

    Every part gets at least one element.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    cuts = [0]
    target = 0.0
    for index, share in enumerate(shares[:-1]):
        target += share / sum(shares) * sums[-1]
        first, last = cuts[-1] + 1, len(weights) - (len(shares) - 1 - index)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(sums[cut] - target)))
    return [*cuts, len(weights)]


def stages_of_equal_cost(
    graph: LayerGraph, seconds: Mapping[str, float], machines: Sequence[Machine]
) -> tuple[Stage, ...]:
    """Cut the layers, in the order of execution, into one stage per entry of ``machines``.

    ``seconds`` are the layers' estimates on one core; a machine with twice the threads is assumed to be twice as fast.

    Raises:
        PlanError: the model has fewer places to cut than the stages need.
    """
    units, count = graph.units, len(machines)
    if count > max(len(units), 1):
        raise PlanError(
            f"{count} stages were asked for, but the model can be cut into {len(units)} at most; ask for fewer"
        )
    costs = [sum(seconds[layer] for layer in unit) for unit in units]
    cuts = proportional_cuts(costs, [machine.threads for machine in machines])
    parts = [list(itertools.chain(*units[start:end])) for start, end in itertools.pairwise(cuts)]
    groups = with_independent_layers(graph, parts)
    return named(Stage((machine.name,), tuple(group)) for machine, group in zip(machines, groups, strict=True))


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
        if _machine_count(alternative.stages) < _machine_count(solution.stages)
        and objective_seconds(problem.objective, alternative)
        <= solution_seconds * (1 + _margin(problem, solution, alternative))
        and keeps_demands(problem, alternative.stages, alternative)
    ]
    if not fewer:
        return solution
    chosen = min(
        fewer,
        key=lambda alternative: (_machine_count(alternative.stages), objective_seconds(problem.objective, alternative)),
    )
    method = f"{solution.method}; fewer machines preferred"
    smaller = solution_of(problem, chosen.stages, solution.lower_bound_seconds, method)
    seconds = objective_seconds(problem.objective, smaller.evaluation)
    lost = seconds / solution_seconds - 1 if solution_seconds > 0 else 0.0
    latencies = (seconds_text(plan.evaluation.latency_seconds) for plan in (solution, smaller))
    return dataclasses.replace(
        smaller,
        why_no_more_machines=f"{_machine_count(solution.stages)} machines would gain {lost:.1%} and have a latency of "
        + " instead of ".join(latencies),
        alternatives=(
            Alternative(
                MORE_MACHINES,
                solution.stages,
                solution.evaluation.period_seconds,
                solution.evaluation.latency_seconds,
                f"gains {lost:.1%} with {_machine_count(solution.stages)} machines",
            ),
            *(alternative for alternative in solution.alternatives if alternative is not chosen),
        ),
    )


def _margin(problem: Problem, solution: Solution, alternative: Alternative) -> float:
    latency_ratio = (
        solution.evaluation.latency_seconds / alternative.latency_seconds if alternative.latency_seconds > 0 else 1.0
    )
    if problem.objective == "latency" or latency_ratio <= 1.0:
        return MARGIN
    return min(MARGIN + MARGIN_PER_DOUBLING * math.log2(latency_ratio), LARGEST_MARGIN)


def _machine_count(stages: tuple[Stage, ...]) -> int:
    return sum(len(stage.machines) for stage in stages)


def one_machine_advice(plan: Plan, machines: int) -> str | None:
    """A message if no split over a cluster of ``machines`` machines is worth it, compared with one alone; else None."""
    prediction = plan.prediction
    if prediction is None or machines < 2:
        return None
    value = partial(objective_seconds, plan.objective)

    def text(timed: Timed) -> str:
        seconds = value(timed)
        is_rate = plan.objective == "throughput"
        return f"{number_text(1 / seconds)} micro-batches/s" if is_rate else f"{number_text(seconds * 1e3)} ms"

    alone = [baseline for baseline in prediction.baselines if baseline.name.startswith(ONE_MACHINE)]
    if not alone:
        return None
    if len(prediction.machines) > 1:
        best = min(alone, key=value)
        if value(best) >= value(prediction):
            return None
        return (
            f"one machine alone would be faster: {best.stages[0][0]} does {text(best)}, this split over "
            f"{len(prediction.machines)} machines {text(prediction)}; leave out what forces the split, such as a "
            "number of stages, to let the planner choose"
        )
    single = {baseline.stages for baseline in alone}
    splits = [split for split in (*prediction.alternatives, *prediction.baselines) if split.stages not in single]
    nearest = min(splits, key=value, default=None)
    if nearest is None:
        return None
    gains, reason = "no split is faster than one machine alone", "the other machines stay idle"
    if nearest.name == MORE_MACHINES:
        gains, reason = "more machines gain too little", prediction.why_no_more_machines
    elif value(nearest) < value(prediction):
        return None  # a demand, not speed, is why the plan uses one machine
    return (
        f"{gains}: {prediction.machines[0].machine} alone does {text(prediction)}, the best split over several "
        f"machines {text(nearest)}; {reason}"
    )
