"""Strategies that search for a plan: built in, or from entry points `tvm_split.strategies`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from rpc_runtime.registry import PluginError, Registry
from tvm_split.errors import PlanError, required
from tvm_split.placement.evaluate import violations
from tvm_split.placement.problem import Problem, require_valid
from tvm_split.placement.solution import Solution, solution_of


class Strategy(ABC):
    """A way to place pieces on machines; a package registers a subclass."""

    name: ClassVar[str]

    @abstractmethod
    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        """The plan to use, with a lower bound if one is known: see `tvm_split.placement.solution.solution_of`.

        Raises:
            NoPlanError: no plan fits; says why.
        """


STRATEGIES: Registry[type[Strategy]] = Registry(
    "tvm_split.strategies",
    "strategy",
    {"best": "tvm_split.placement.search.search:Best", "first-fit": "tvm_split.placement.search.simple_plans:FirstFit"},
    Strategy,
    PlanError,
)


def solve_by(strategy: str, problem: Problem, time_limit_seconds: float) -> Solution:
    """The solution of the strategy of this name, evaluated and validated here, so that no strategy misreports its plan.

    A lower bound cannot be validated; the solution's ``method`` says where it comes from.

    Raises:
        NoPlanError: the strategy says that no plan fits.
        PlanError: there is no such strategy, or the strategy's plan breaks a demand.
        PluginError: the strategy returns no `Solution`.
    """
    require_valid(problem)
    plan = STRATEGIES[strategy]().solve(problem, time_limit_seconds)
    solution = required(Solution, plan, PluginError, f"strategy {strategy!r} returned it; update its package")
    checked = solution_of(problem, solution.stages)
    broken = violations(problem, checked.stages, checked.evaluation)
    if broken:
        raise PlanError(f"the plan of strategy {strategy!r} cannot be used: {'; '.join(broken)}")
    method = solution.method or f"found by strategy {strategy!r}"
    return replace(
        checked.bounded(solution.lower_bound_seconds),
        method=method,
        why_no_more_machines=solution.why_no_more_machines,
        alternatives=tuple(_usable(problem, solution.alternatives)),
    )


def _usable(problem: Problem, alternatives: Iterable[Solution]) -> Iterator[Solution]:
    """Yield the alternatives that are plans for the problem and keep to its demands, evaluated."""
    for other in alternatives:
        with suppress(PlanError):
            checked = solution_of(problem, other.stages)
            if not violations(problem, checked.stages, checked.evaluation):
                yield replace(checked, name=other.name, why=other.why)
