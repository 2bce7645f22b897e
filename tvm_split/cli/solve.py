"""``tvm-split solve``: the planner by itself, on numbers from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_split.cli import options
from tvm_split.display.console import STDOUT, new_table, print_error, print_json, print_line
from tvm_split.units import bytes_text, seconds_text, short_list

if TYPE_CHECKING:
    from tvm_split.planner.problem import MachineLoad, Problem, Solution


def solve(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM", help="A planning problem (JSON).", show_default=False)],
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Search so long at most (default: 10).")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Plan numbers instead of a model: what `tvm-split plan --write-problem` wrote, or a question of your own.

    Exit code 1 if no plan fits the problem.
    """
    from tvm_split.errors import PlanError
    from tvm_split.planner.problem_file import read_problem_file, solution_to_dict
    from tvm_split.planner.search import DEFAULT_TIME_LIMIT_SECONDS, solve as search

    read = read_problem_file(problem)
    try:
        solution = search(read, time_limit_seconds=time_limit or DEFAULT_TIME_LIMIT_SECONDS)
    except PlanError as error:
        print_error(f"{problem}: {error}")
        raise typer.Exit(1) from error
    if json:
        print_json(solution_to_dict(read, solution))
    else:
        _print_solution(problem, read, solution)


def _print_solution(path: Path, problem: Problem, solution: Solution) -> None:
    evaluation = solution.evaluation
    loads = {load.machine: load for load in evaluation.loads}
    limits = {machine.name: machine.memory_bytes for machine in problem.machines}
    rows = []
    for stage in solution.stages:
        for machine, share in zip(stage.machines, stage.shares, strict=True):
            load = loads[machine]
            times = map(seconds_text, (load.compute_seconds, load.receive_seconds, load.send_seconds))
            memory = _memory_text(load, limits[machine])
            rows.append((machine, short_list(stage.layers), str(len(stage.layers)), f"{share:.0%}", *times, memory))
    title = f"{path.name}: {len(solution.stages)} stages for {problem.objective}"
    numbers = ("pieces", "share", "compute", "receive", "send", "memory")
    STDOUT.print(new_table(title, ("machine", "names"), numbers, rows))
    kind = "period" if problem.objective == "throughput" else "latency"
    lines = [
        f"period {seconds_text(evaluation.period_seconds)}, latency {seconds_text(evaluation.latency_seconds)}, "
        f"limited by {evaluation.limiting}",
        f"no plan has a {kind} below {seconds_text(solution.lower_bound_seconds)} (gap {solution.gap:.2%}); "
        f"{solution.method}",
        *filter(None, solution.why_no_more_machines.split("; ")),
        *(f"instead, {other.name}: {other.why}" for other in solution.alternatives),
    ]
    for line in lines:
        print_line(line)


def _memory_text(load: MachineLoad, limit: float) -> str:
    return bytes_text(load.memory_bytes) + ("" if limit == float("inf") else f" of {bytes_text(limit)}")
