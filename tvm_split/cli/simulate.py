"""``tvm-split simulate``: what a plan would do, in simulated time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, new_table, print_json, print_line, print_note
from tvm_split.cli.options import WrongUseError
from tvm_split.progress import step_progress
from tvm_split.units import seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_split.simulation.scenario import Loss, Scenario, Slowdown, WhatIf
    from tvm_split.simulation.simulate import Latencies, Simulation

MOST_ROWS = 12
"""Of machines; of more, those that compute most."""
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
    """Say what a plan would do, without machines: the runtime's own rules in simulated time.

    Exit code 1 if a machine that is lost leaves the stream without all of its results.
    """
    from tvm_split.simulation.scenario import WhatIf
    from tvm_split.simulation.simulate import SHOWN_MICRO_BATCHES, simulate as run

    if picture is not None:
        _require_drawable(picture)
    slowdowns, losses = tuple(map(_slowdown, slow or ())), tuple(map(_loss, lose or ()))
    what_if = WhatIf(slowdowns, losses, scatter, link_scatter, seed)
    title, scenario, predicted, planned = _scenario(plan, problem, measured)
    with step_progress("simulating") as report:
        found = run(
            scenario,
            what_if,
            micro_batches=micro_batches,
            in_flight=in_flight or planned,
            shown=SHOWN_MICRO_BATCHES if timeline or picture else 0,
            on_progress=report,
        )
    if picture is not None:
        from tvm_split.pictures.timeline_picture import draw_picture

        draw_picture(found.events, scenario.program.machines, f"{title}, simulated", [picture])
        print_note(f"picture written to {picture}")
    if json:
        print_json(_as_json(title, found, what_if, predicted))
    else:
        _print(title, found, what_if, predicted)
        if timeline:
            from tvm_split.deployment.timeline import columns_in, draw, timeline as lanes

            machines = scenario.program.machines
            drawn = draw(lanes(found.events, machines, columns_in(STDOUT.width, machines)))
            STDOUT.print(drawn, markup=False, highlight=False, no_wrap=True, overflow="crop")
    if found.results < found.wanted:
        raise typer.Exit(1)


def _require_drawable(picture: Path) -> None:
    """Before anything is simulated."""
    from tvm_split.pictures.timeline_picture import SUFFIXES, require_matplotlib

    if picture.suffix.lower() not in SUFFIXES:
        raise WrongUseError(f"{str(picture)!r} does not end in one of {', '.join(SUFFIXES)}", "--picture")
    options.require_folder(picture, "--picture")
    require_matplotlib()


def _scenario(
    plan: Path, problem: Path | None, measured: Path | None
) -> tuple[str, Scenario, tuple[float, float], int | None]:
    """Title, scenario, the predicted period and latency, and how many micro-batches the plan wants under way."""
    from tvm_split.planner.plan import Plan
    from tvm_split.simulation.of_prediction import scenario_of, scenario_of_plan, with_measured_compute

    if problem is not None:
        if measured is not None:
            raise WrongUseError("reports are of plans for a model, not for a problem", "--measured")
        from tvm_split.planner.prediction import Certificate, predict
        from tvm_split.planner.problem_file import read_problem_file, read_solution_file
        from tvm_split.planner.round_robin import with_turns
        from tvm_split.planner.step_graph import lower

        read, stages = read_problem_file(problem), read_solution_file(plan)
        expected = predict(read, lower(read, with_turns(stages)), Certificate())
        return plan.name, scenario_of(expected), (expected.period_seconds, expected.latency_seconds), None
    loaded = Plan.load(plan)
    scenario = scenario_of_plan(loaded)
    if measured is not None:
        from tvm_split.deployment.measured_file import read_computing

        scenario = with_measured_compute(scenario, read_computing(measured, loaded.model))
    prediction = loaded.prediction
    predicted = (0.0, 0.0) if prediction is None else (prediction.period_seconds, prediction.latency_seconds)
    return loaded.model, scenario, predicted, loaded.in_flight


def _slowdown(text: str) -> Slowdown:
    from tvm_split.simulation.scenario import Slowdown

    machine, _, rest = text.rpartition("=")
    factor, _, since = rest.partition("@")
    return Slowdown(machine, _number(factor, text, "--slow"), _number(since or "0", text, "--slow"))


def _loss(text: str) -> Loss:
    from tvm_split.simulation.scenario import Loss

    machine, _, moment = text.rpartition("@")
    return Loss(machine, _number(moment, text, "--lose"))


def _number(text: str, given: str, option: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        form = "MACHINE=FACTOR[@SECONDS], like box=2 or box=2@1.5" if option == "--slow" else "MACHINE@SECONDS"
        raise WrongUseError(f"{given!r} is not {form}", option)
    return number


def _as_json(title: str, found: Simulation, what_if: WhatIf, predicted: tuple[float, float]) -> dict[str, Any]:
    content = dataclasses.asdict(found)
    del content["events"]
    return {
        "model": title,
        **content,
        "samples_per_second": found.samples_per_second,
        "predicted": {"period_seconds": predicted[0], "latency_seconds": predicted[1]},
        "what_if": dataclasses.asdict(what_if),
    }


def _print(title: str, found: Simulation, what_if: WhatIf, predicted: tuple[float, float]) -> None:
    rows = [
        (each.machine, *(f"{share:.0%}" for share in (each.computing, each.waits_for_inputs, each.waits_for_room)))
        for each in sorted(found.machines, key=lambda each: -each.computing)[:MOST_ROWS]
    ]
    headings = ("computes", "waits for inputs", "waits for room")
    STDOUT.print(new_table(f"{title}, simulated: {found.results} results", ("machine",), headings, rows))
    if len(found.machines) > MOST_ROWS:
        print_line(f"{len(found.machines) - MOST_ROWS} more machines compute less: --json")
    if found.samples_per_second is not None and found.period_seconds is not None:
        beside = f" (predicted: {1 / predicted[0]:.4g})" if predicted[0] > 0 else ""
        every = seconds_text(found.period_seconds)
        print_line(f"{found.samples_per_second:.4g} micro-batches a second{beside}, one every {every}")
    elif found.period_seconds is not None:
        print_line("Nothing takes any time")
    elif found.results == found.wanted:
        print_line(
            f"Replicas have had all their turns after {found.turns} results: a throughput needs --micro-batches "
            f"{2 * found.turns}"
        )
    if found.single is not None:
        print_line(f"Alone: {_latency_text(found.single)} (predicted: {seconds_text(predicted[1])})")
    if found.streamed is not None:
        print_line(f"In the stream, at most {found.under_way} under way: {_latency_text(found.streamed)}")
    for line in _loss_lines(what_if.losses, found):
        print_line(line)


def _latency_text(latencies: Latencies) -> str:
    percentiles = [f"{each}% in {seconds_text(value)}" for each, value in latencies.percentiles_seconds.items()]
    if len(set(percentiles)) == 1 or latencies.largest_seconds - latencies.mean_seconds < 1e-9 * latencies.mean_seconds:
        return seconds_text(latencies.mean_seconds)
    return f"{seconds_text(latencies.mean_seconds)} on average, {', '.join(percentiles)}"


def _loss_lines(losses: Sequence[Loss], found: Simulation) -> list[str]:
    """When machines are lost, and what that does: all results that were asked for may have come before or in spite."""
    lost = [
        f"{each.machine} is lost at {seconds_text(each.at_seconds)}"
        for each in sorted(losses, key=lambda each: each.at_seconds)
    ]
    if not lost:
        return []
    last = seconds_text(found.seconds)
    if found.results >= found.wanted:
        return [*lost, f"All {found.wanted} results came, the last at {last}: of later ones this says nothing"]
    came = f"{found.results} results came, the last at {last}" if found.results else "No result came"
    left = found.submitted - found.results
    return [*lost, f"{came}; {left} micro-batches are under way and lost, since turns do not change"]
