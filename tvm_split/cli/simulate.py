"""``tvm-split simulate`` and ``solve``: simulate a plan without machines, and plan numbers instead of a model."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.deployment.deployment_report import read_computing
from tvm_split.display.console import STDOUT, print_json, print_note
from tvm_split.display.simulate import SimulatedPlan, solution_parts
from tvm_split.display.view import print_parts, write
from tvm_split.errors import PlanError
from tvm_split.pictures.timeline import columns_in, drawn_timeline
from tvm_split.placement.prediction import predict
from tvm_split.placement.problem import DEFAULT_TIME_LIMIT_SECONDS
from tvm_split.placement.read_problem import read_problem_file, read_solution_file, solution_to_dict
from tvm_split.placement.search.candidate import with_schedule_shares
from tvm_split.placement.solution import solution_of
from tvm_split.progress import step_progress
from tvm_split.simulation.scenario import (
    Loss,
    Scenario,
    Slowdown,
    WhatIf,
    scenario_of,
    scenario_of_plan,
    with_measured_compute,
)
from tvm_split.simulation.simulate import MOST_MICRO_BATCHES, SHOWN_MICRO_BATCHES

SHARE = "a share of the mean, like 0.05"


def simulate(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            help="A plan file with a prediction; with --problem, what `tvm-split solve --json` answered.",
            show_default=False,
        ),
    ],
    problem: Path | None = option(None, "The planning problem (JSON) that PLAN is for.", metavar="FILE"),
    measured: Path | None = option(
        None, "Take what machines compute from a report of `tvm-split bench --json`.", metavar="REPORT"
    ),
    micro_batches: int | None = option(
        None, "Results of the simulated stream (default: 300, or more for replicas).", minimum=2
    ),
    in_flight: int | None = options.IN_FLIGHT,
    scatter: float = option(0.0, f"Standard deviation of computing times: {SHARE}.", metavar="SHARE", minimum=0.0),
    link_scatter: float = option(0.0, f"Standard deviation of times on links: {SHARE}.", metavar="SHARE", minimum=0.0),
    seed: int = option(0, "Decides how times scatter."),
    slow: list[str] | None = option(
        None, "A machine takes so many times as long, from then on.", metavar="MACHINE=FACTOR[@SECONDS]"
    ),
    lose: list[str] | None = option(None, "A machine stands still from then on.", metavar="MACHINE@SECONDS"),
    timeline: bool = option(False, "Draw the first micro-batches as text: who does what when."),
    trace: Path | None = options.TRACE,
    json: bool = options.JSON,
) -> None:
    """Simulate a plan without machines, by the runtime's own rules.

    Exit code 1 if results of the stream are missing because a machine is lost.

    Example: tvm-split simulate plan.json --slow box=2
    """
    slower = r"(.*)=([^=@]+)(?:@([^=@]+))?", "--slow", "MACHINE=FACTOR[@SECONDS], like box=2"
    lost = r"(.*)@([^@]+)()", "--lose", "MACHINE@SECONDS"
    slowdowns = tuple(Slowdown(*_parsed(text, *slower)) for text in slow or ())
    losses = tuple(Loss(*_parsed(text, *lost)[:2]) for text in lose or ())
    what_if = WhatIf(slowdowns, losses, scatter, link_scatter, seed)
    title, scenario, predicted, planned = _scenario(plan, problem, measured)
    with step_progress("simulating") as report:
        simulation = tvm_split.simulate(
            scenario,
            what_if,
            micro_batches=micro_batches,
            in_flight=in_flight or planned,
            shown=SHOWN_MICRO_BATCHES if timeline else 0 if trace is None else MOST_MICRO_BATCHES,
            on_progress=report,
        )
    machines = scenario.program.machines
    if trace is not None:
        replace(simulation.trace, model=f"{title}, simulated").save(trace)
        print_note(f"trace written to {trace}")
    write(SimulatedPlan(title, simulation, what_if, *predicted), json=json)
    if timeline and not json:
        first = [event for event in simulation.trace if event.sequence < SHOWN_MICRO_BATCHES]
        drawn = drawn_timeline(first, machines, columns_in(STDOUT.width, machines))
        STDOUT.print(drawn, no_wrap=True, overflow="crop")
    if simulation.results < simulation.wanted:
        raise typer.Exit(1)


def _scenario(
    plan: Path, problem: Path | None, measured: Path | None
) -> tuple[str, Scenario, tuple[float, float], int | None]:
    """Return title, scenario, predicted period and latency (seconds), and the plan's micro-batches in flight."""
    if problem is not None:
        if measured is not None:
            raise WrongUseError("reports are of plans for a model, not for a problem", "--measured")
        read, stages = read_problem_file(problem), read_solution_file(plan)
        expected = predict(read, solution_of(read, with_schedule_shares(stages)))
        return plan.name, scenario_of(expected), (expected.period_seconds, expected.latency_seconds), None
    loaded = tvm_split.Plan.load(plan)
    scenario = scenario_of_plan(loaded)
    if measured is not None:
        scenario = with_measured_compute(scenario, read_computing(measured, loaded.model))
    prediction = loaded.prediction
    predicted = (0.0, 0.0) if prediction is None else (prediction.period_seconds, prediction.latency_seconds)
    return loaded.model, scenario, predicted, loaded.in_flight


def _parsed(text: str, pattern: str, flag: str, form: str) -> tuple[str, float, float]:
    """Return a machine's name and two finite numbers, at least 0, by the groups of ``pattern``; an empty one is 0."""
    parts = re.fullmatch(pattern, text)
    with suppress(ValueError):
        if parts is not None:
            first, second = float(parts[2]), float(parts[3] or 0)
            if 0 <= first < math.inf and 0 <= second < math.inf:
                return parts[1], first, second
    raise WrongUseError(f"{text!r} is not {form}", flag)


def solve(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM", help="A planning problem (JSON).", show_default=False)],
    time_limit: float = option(DEFAULT_TIME_LIMIT_SECONDS, "Search so long at most.", metavar="SECONDS", minimum=0.1),
    json: bool = options.JSON,
) -> None:
    """Plan numbers instead of a model: what `tvm-split plan --write-problem` wrote, or a question of your own.

    Exit code 1 if no plan fits the problem.

    Example: tvm-split solve problem.json
    """
    read = read_problem_file(problem)
    try:
        with step_progress("searching for the best plan"):
            solution = tvm_split.solve(read, time_limit_seconds=time_limit)
    except PlanError as error:
        raise type(error)(f"{problem}: {error}") from error
    if json:
        print_json(solution_to_dict(read, solution))
    else:
        print_parts(solution_parts(problem.name, read, solution))
