"""Steps of plans, written by hand."""

from __future__ import annotations

from tvm_split.planner.evaluate import evaluate
from tvm_split.planner.problem import Evaluation, Problem, Stage
from tvm_split.planner.step_graph import Step, lower


def step(name: str, machine: str, seconds: float, contended: float | None = None, **more: float) -> Step:
    """A step on one machine; all its seconds are estimates."""
    together = seconds if contended is None else contended
    return Step(name, "stage", (machine,), (1.0,), (seconds,), (together,), (1.0,), **more)


def evaluate_stages(problem: Problem, stages: tuple[Stage, ...] | list[Stage]) -> Evaluation:
    """The evaluation of stages of pieces."""
    return evaluate(problem, lower(problem, stages))
