"""``tvm-split simulate``: simulate a plan without machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.deployment.deployment_report import read_computing
from tvm_split.display.console import STDOUT, print_note
from tvm_split.display.simulate import SimulatedPlan
from tvm_split.display.view import write
from tvm_split.pictures.timeline_picture import SUFFIXES, draw_picture, require_matplotlib
from tvm_split.pictures.timeline_text import columns_in, drawn_timeline
from tvm_split.planner.predict import Certificate, predict
from tvm_split.planner.problem_file import read_problem_file, read_solution_file
from tvm_split.planner.round_robin import with_turns
from tvm_split.planner.step_graph import lower
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
from tvm_split.simulation.simulate import SHOWN_MICRO_BATCHES

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
    problem: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The planning problem (JSON) that PLAN is for.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="REPORT", help="Take what machines compute from a report of `tvm-split bench --json`."),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=2, help="Results of the simulated stream (default: 300, or what turns need).")
    ] = None,
    in_flight: options.InFlightOption = None,
    scatter: Annotated[
        float, typer.Option(min=0.0, metavar="SHARE", help=f"Standard deviation of computing times: {SHARE}.")
    ] = 0.0,
    link_scatter: Annotated[
        float, typer.Option(min=0.0, metavar="SHARE", help=f"Standard deviation of times on links: {SHARE}.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides how times scatter.")] = 0,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MACHINE=FACTOR[@SECONDS]", help="A machine takes so many times as long, from then on. Repeatable."
        ),
    ] = None,
    lose: Annotated[
        list[str] | None,
        typer.Option(metavar="MACHINE@SECONDS", help="A machine stands still from then on. Repeatable."),
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw the first micro-batches as text: who does what when.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them as a picture (.png, .svg, .pdf).")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Simulate a plan without machines, by the runtime's own rules.

    Exit code 1 if results of the stream are missing because a machine is lost.

    Example: tvm-split simulate plan.json --slow box=2
    """
    if picture is not None:
        _require_drawable(picture)
    slowdowns, losses = tuple(map(_slowdown, slow or ())), tuple(map(_loss, lose or ()))
    what_if = WhatIf(slowdowns, losses, scatter, link_scatter, seed)
    title, scenario, predicted, planned = _scenario(plan, problem, measured)
    with step_progress("simulating") as report:
        simulation = tvm_split.simulate(
            scenario,
            what_if,
            micro_batches=micro_batches,
            in_flight=in_flight or planned,
            shown=SHOWN_MICRO_BATCHES if timeline or picture else 0,
            on_progress=report,
        )
    machines = scenario.program.machines
    if picture is not None:
        draw_picture(simulation.events, machines, f"{title}, simulated", [picture])
        print_note(f"picture written to {picture}")
    write(SimulatedPlan(title, simulation, what_if, *predicted), json=json)
    if timeline and not json:
        drawn = drawn_timeline(simulation.events, machines, columns_in(STDOUT.width, machines))
        STDOUT.print(drawn, no_wrap=True, overflow="crop")
    if simulation.results < simulation.wanted:
        raise typer.Exit(1)


def _require_drawable(picture: Path) -> None:
    """Raise an error if the picture cannot be drawn, before anything is simulated."""
    if picture.suffix.lower() not in SUFFIXES:
        raise WrongUseError(f"{str(picture)!r} does not end in one of {', '.join(SUFFIXES)}", "--picture")
    options.require_folder(picture, "--picture")
    require_matplotlib()


def _scenario(
    plan: Path, problem: Path | None, measured: Path | None
) -> tuple[str, Scenario, tuple[float, float], int | None]:
    """Return title, scenario, predicted period and latency (seconds), and the plan's micro-batches in flight."""
    if problem is not None:
        if measured is not None:
            raise WrongUseError("reports are of plans for a model, not for a problem", "--measured")
        read, stages = read_problem_file(problem), read_solution_file(plan)
        expected = predict(read, lower(read, with_turns(stages)), Certificate())
        return plan.name, scenario_of(expected), (expected.period_seconds, expected.latency_seconds), None
    loaded = tvm_split.Plan.load(plan)
    scenario = scenario_of_plan(loaded)
    if measured is not None:
        scenario = with_measured_compute(scenario, read_computing(measured, loaded.model))
    prediction = loaded.prediction
    predicted = (0.0, 0.0) if prediction is None else (prediction.period_seconds, prediction.latency_seconds)
    return loaded.model, scenario, predicted, loaded.in_flight


def _slowdown(text: str) -> Slowdown:
    machine, _, rest = text.rpartition("=")
    factor, _, since = rest.partition("@")
    return Slowdown(machine, _number(factor, text, "--slow"), _number(since or "0", text, "--slow"))


def _loss(text: str) -> Loss:
    machine, _, moment = text.rpartition("@")
    return Loss(machine, _number(moment, text, "--lose"))


def _number(text: str, argument: str, option: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        form = "MACHINE=FACTOR[@SECONDS], like box=2 or box=2@1.5" if option == "--slow" else "MACHINE@SECONDS"
        raise WrongUseError(f"{argument!r} is not {form}", option)
    return number
