"""A solution of a planning problem: stages with their steps and evaluation, a lower bound, and the plans that lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_split.placement.evaluate import evaluate
from tvm_split.placement.problem import Evaluation, Objective, Problem, Stage, gap_of, objective_seconds
from tvm_split.placement.step_graph import StepGraph, lower

STAGE_SECONDS = 1e-4
"""Seconds that one more stage must gain: about the time to hand over and wake up; fewer stages are easier to read."""

ROUNDING = 1e-6
"""Relative excess of a lower bound over a value that refutes nothing: solvers of linear programs are no more exact."""


@dataclass(frozen=True)
class Solution:
    """A plan of whole or of sharded layers, in the form in which plans are compared.

    Attributes:
        stages: of pieces as a strategy returns them, in topological order; of layers as soon as the model is known.
            Replicas have the shares of their round-robin schedules.
        graph, evaluation: the steps and transfers of these stages, and their performance.
        lower_bound_seconds: no plan for this problem has a smaller period (or latency, for that objective), whatever
            shares its replicas have; 0 if no bound is known.
        method: how the plan and the bound were found, in a few words.
        why_no_more_machines: why idle machines stay idle; empty if none is.
        alternatives: the best few other plans, best first.
        name, why: of an alternative: what it is, and why it was not chosen.
    """

    objective: Objective
    stages: tuple[Stage, ...]
    graph: StepGraph
    evaluation: Evaluation
    lower_bound_seconds: float = 0.0
    method: str = ""
    why_no_more_machines: str = ""
    alternatives: tuple[Solution, ...] = ()
    name: str = ""
    why: str = ""

    @property
    def period_seconds(self) -> float:
        return self.evaluation.period_seconds

    @property
    def latency_seconds(self) -> float:
        return self.evaluation.latency_seconds

    @property
    def value_seconds(self) -> float:
        """What the objective minimises."""
        return objective_seconds(self.objective, self)

    @property
    def compared_seconds(self) -> float:
        """The seconds by which plans are compared: the objective's value and an overhead, which an evaluation lacks.

        The overhead is `STAGE_SECONDS` for every further step of the machine with the most steps.
        """
        steps = Counter(machine for step in self.graph.steps for machine in step.machines)
        return self.value_seconds + STAGE_SECONDS * (max(steps.values(), default=1) - 1)

    @property
    def gap(self) -> float:
        """The optimality gap, (value - lower bound) / value; 0 is proven optimal."""
        return gap_of(self.value_seconds, self.lower_bound_seconds)

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(machine for stage in self.stages for machine in stage.machines))

    def bounded(self, lower_bound_seconds: float) -> Solution:
        """Return the solution with a lower bound; 0, so none, if its own value refutes the bound.

        A smaller value within `ROUNDING` is only rounding, and then the bound is the value.
        """
        value = self.value_seconds
        bound = min(lower_bound_seconds, value) if lower_bound_seconds <= value * (1 + ROUNDING) else 0.0
        return replace(self, lower_bound_seconds=bound)


def solution_of(
    problem: Problem,
    stages: Sequence[Stage],
    lower_bound_seconds: float = 0.0,
    method: str = "",
    graph: StepGraph | None = None,
) -> Solution:
    """Return the solution that consists of these stages; a lower bound of 0 means that none is known.

    ``graph`` has the steps of the stages; without it they are stages of pieces, each a step.

    Raises:
        PlanError: the stages are no plan for the problem.
    """
    graph = graph or lower(problem, stages)
    solution = Solution(problem.objective, tuple(stages), graph, evaluate(problem, graph), method=method)
    return solution.bounded(lower_bound_seconds)
