"""The search as a strategy."""

from __future__ import annotations

from typing import ClassVar

from tvm_split.planner.problem import Problem, Solution
from tvm_split.planner.search.solve import solve
from tvm_split.planner.strategy import Strategy


class Best(Strategy):
    """The best plan that can be found in the time, and how far from the best it can be at most."""

    name: ClassVar[str] = "best"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        return solve(problem, time_limit_seconds=time_limit_seconds)
