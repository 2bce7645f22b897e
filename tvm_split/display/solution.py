"""Show a solved planning problem: each machine's pieces, and the lower bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm_split.display.view import Table, View, view
from tvm_split.planner.problem import MachineLoad, Problem, Solution
from tvm_split.units import bytes_text, count_text, seconds_text, short_list


@dataclass(frozen=True)
class SolvedProblem:
    """A planning problem with its solution and a name."""

    name: str
    problem: Problem
    solution: Solution


@view.register
def view_of_solution(solved: SolvedProblem, *, details: bool = False) -> View:
    """Return a table with a row for each machine of each stage, and the lower bound."""
    problem, solution = solved.problem, solved.solution
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
    title = f"{solved.name}: {count_text(len(solution.stages), 'stage')} for {problem.objective}"
    numbers = ("pieces", "share", "compute", "receive", "send", "memory")
    kind = "period" if problem.objective == "throughput" else "latency"
    return [
        Table(title, ("machine", "names"), numbers, rows),
        f"period {seconds_text(evaluation.period_seconds)}, latency {seconds_text(evaluation.latency_seconds)}, "
        f"limited by {evaluation.limiting}",
        f"no plan has a {kind} below {seconds_text(solution.lower_bound_seconds)} (gap {solution.gap:.2%}); "
        f"{solution.method}",
        *filter(None, solution.why_no_more_machines.split("; ")),
        *(f"instead, {alternative.name}: {alternative.why}" for alternative in solution.alternatives),
    ]


def _memory_text(load: MachineLoad, limit: float) -> str:
    return bytes_text(load.memory_bytes) + ("" if limit == math.inf else f" of {bytes_text(limit)}")
