"""``tvm-split plan``: which layers would run on which machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, print_json, print_note, short_list
from tvm_split.cli.model_source import ModelRequest
from tvm_split.cli.planning import ClusterRequest, PlanRequest
from tvm_split.cli.problem import plan_problem, require_problem_alone
from tvm_split.cli.wrong_use import WrongUseError

if TYPE_CHECKING:
    from tvm_split.model import Model
    from tvm_split.planner.plan import Plan


def plan(
    context: typer.Context,
    model: options.OptionalModelArgument = None,
    cluster: options.ClusterOption = None,
    workers: options.WorkersOption = None,
    threads: options.ThreadsOption = None,
    split: options.SplitOption = None,
    stages: options.StagesOption = None,
    objective: options.ObjectiveOption = options.Objective.THROUGHPUT,
    batch: options.BatchOption = None,
    dimension: options.DimensionOption = None,
    input_shape: options.InputShapeOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file, to edit it and compile by it.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List the names of all layers instead of planning.")] = False,
    problem: Annotated[
        Path | None,
        typer.Option("--problem", metavar="FILE", help="Instead of a model: plan the numbers in this file (JSON)."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=0.1, metavar="SECONDS", help="With --problem: search so long (default: 10)."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Show how a model would be split: stages, their machines, layers and estimated shares of the work."""
    if problem is not None:
        require_problem_alone(context)
        plan_problem(problem, json, time_limit)
        return
    if model is None:
        raise WrongUseError("Missing argument: give a model, or a problem file with --problem", "MODEL")
    if time_limit is not None:
        raise WrongUseError("it limits the search of --problem", "--time-limit")
    loaded = ModelRequest(model, batch, dimension or (), input_shape or ()).load()
    if layers:
        _list_layers(loaded, json)
        return
    planned = PlanRequest(split or (), stages, objective.value).plan(
        loaded, ClusterRequest(cluster, workers, threads).cluster()
    )
    if output is not None:
        planned.save(output)
        print_note(f"written to {output}")
    if json:
        print_json(_description(loaded, planned))
    else:
        _print_plan(loaded, planned)


def stage_shares(model: Model, plan: Plan) -> list[float]:
    """Each stage's share of the model's estimated time on one core, between 0 and 1."""
    from tvm_split.planner.cost import estimated_seconds

    seconds = estimated_seconds(model)
    whole = sum(seconds.values()) or 1.0
    return [sum(seconds[layer] for layer in stage.layers) / whole for stage in plan.stages]


def _list_layers(model: Model, json: bool) -> None:
    if json:
        print_json({"model": model.name, "layers": list(model.layer_names)})
    else:
        for name in model.layer_names:
            print(name)


def _description(model: Model, plan: Plan) -> dict[str, Any]:
    shares = stage_shares(model, plan)
    return {
        "model": model.name,
        "framework": model.framework,
        "inputs": [{"name": each.name, "shape": each.shape, "dtype": each.dtype} for each in model.inputs],
        "outputs": [{"name": each.name, "shape": each.shape, "dtype": each.dtype} for each in model.outputs],
        "stages": [
            {"name": stage.name, "machine": stage.machine, "layers": stage.layers, "estimated_share": share}
            for stage, share in zip(plan.stages, shares, strict=True)
        ],
        "plan": plan.to_dict(),
    }


def _print_plan(model: Model, plan: Plan) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{model.name}: {len(plan.stages)} stages for {plan.objective}, {plan.origin}"))
    for heading in ("stage", "machine", "layers", "names"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "layers" else "left")
    table.add_column("estimated share", justify="right")
    for stage, share in zip(plan.stages, stage_shares(model, plan), strict=True):
        names = Text(short_list(stage.layers))
        table.add_row(stage.name, Text(stage.machine), str(len(stage.layers)), names, f"{share:.1%}")
    STDOUT.print(table)
