"""The planner strategy that runs the full search."""

from __future__ import annotations

from typing import ClassVar

from tvm_split.planner.problem import Problem, Solution
from tvm_split.planner.search.solve import solve
from tvm_split.planner.strategy import Strategy


class Best(Strategy):
    """Strategy that returns the best plan found within the time limit, with its optimality gap."""

    name: ClassVar[str] = "best"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        return solve(problem, time_limit_seconds=time_limit_seconds)
