"""A strategy that a package adds: all on the first machine, and a promise that is not kept."""

from dataclasses import replace
from typing import ClassVar

from tvm_split.placement.problem import Evaluation, Problem, Stage
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.placement.strategy import Strategy


class FirstMachine(Strategy):
    """Everything on the machine that the problem names first."""

    name: ClassVar[str] = "toy"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        stage = Stage((problem.machines[0].name,), tuple(piece.name for piece in problem.pieces))
        return replace(solution_of(problem, [stage]), evaluation=Evaluation(1e-9, 1e-9, (), "nothing"))
