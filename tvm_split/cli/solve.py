"""``tvm-split solve``: run the planner alone, on a planning problem from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from tvm_split.cli import options
from tvm_split.display.console import print_error, print_json
from tvm_split.display.solution import SolvedProblem
from tvm_split.display.view import show
from tvm_split.errors import PlanError
from tvm_split.planner.problem import DEFAULT_TIME_LIMIT_SECONDS
from tvm_split.planner.problem_file import read_problem_file, solution_to_dict


def solve(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM", help="A planning problem (JSON).", show_default=False)],
    time_limit: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Search so long at most.")
    ] = DEFAULT_TIME_LIMIT_SECONDS,
    json: options.JsonOption = False,
) -> None:
    """Plan numbers instead of a model: what `tvm-split plan --write-problem` wrote, or a question of your own.

    Exit code 1 if no plan fits the problem.

    Example: tvm-split solve problem.json
    """
    read = read_problem_file(problem)
    try:
        solution = tvm_split.solve(read, time_limit_seconds=time_limit)
    except PlanError as error:
        print_error(f"{problem}: {error}")
        raise typer.Exit(1) from error
    if json:
        print_json(solution_to_dict(read, solution))
    else:
        show(SolvedProblem(problem.name, read, solution))
