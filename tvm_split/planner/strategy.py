"""Strategies that search for a plan: built-in ones, and those that packages add (`tvm_split.strategies`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rpc_runtime.registry import Registry
from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import evaluate, violations
from tvm_split.planner.faults import require_sense
from tvm_split.planner.problem import Problem, Solution, Stage, gap_of, objective_seconds
from tvm_split.planner.step_graph import lower


class Strategy(ABC):
    """A way to place pieces on machines; a package registers a subclass."""

    name: ClassVar[str]

    @abstractmethod
    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        """The plan to use, with a lower bound if one is known: see `solution_of`.

        Raises:
            PlanError: no plan fits; says why.
        """


STRATEGIES: Registry[type[Strategy]] = Registry(
    "tvm_split.strategies",
    "strategy",
    {"best": "tvm_split.planner.search.solve:Best", "first-fit": "tvm_split.planner.search.simple_plans:FirstFit"},
    Strategy,
    PlanError,
)


def require_strategy(name: str) -> None:
    """Raise a `PlanError` if there is no strategy of this name, and a `PluginError` if its package is broken."""
    STRATEGIES[name]


def solution_of(
    problem: Problem, stages: Sequence[Stage], lower_bound_seconds: float = 0.0, method: str = ""
) -> Solution:
    """The solution that consists of these stages of pieces; a lower bound of 0 means that none is known.

    Raises:
        PlanError: the stages are no plan for the problem.
    """
    evaluation = evaluate(problem, lower(problem, stages))
    value = objective_seconds(problem.objective, evaluation)
    bound = min(lower_bound_seconds, value)
    return Solution(tuple(stages), evaluation, bound, gap_of(value, bound), method)


def solve_by(strategy: str, problem: Problem, time_limit_seconds: float) -> Solution:
    """The solution of the strategy of this name, evaluated and validated here, so that no strategy misreports its plan.

    A lower bound cannot be validated; the solution's ``method`` says where it comes from.

    Raises:
        PlanError: there is no such strategy, no plan fits, or the strategy's plan breaks a demand.
    """
    require_sense(problem)
    solution = STRATEGIES[strategy]().solve(problem, time_limit_seconds)
    checked = solution_of(problem, solution.stages, solution.lower_bound_seconds)
    broken = violations(problem, solution.stages, checked.evaluation)
    if broken:
        raise PlanError(f"the plan of strategy {strategy!r} cannot be used: {'; '.join(broken)}")
    method = solution.method or f"found by strategy {strategy!r}"
    return replace(
        solution,
        evaluation=checked.evaluation,
        lower_bound_seconds=checked.lower_bound_seconds,
        gap=checked.gap,
        method=method,
    )
