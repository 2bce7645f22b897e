"""``tvm-split plan``: which layers would run on which machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.annotations import (
    ConfigurationOption,
    SplitFromModelOption,
    WriteAnnotationsOption,
    annotated_model,
    require_onnx,
    write_annotated,
)
from tvm_split.cli.console import STDOUT, print_json, print_note
from tvm_split.cli.model_source import ModelRequest
from tvm_split.cli.plan_report import prediction_as_json, print_plan
from tvm_split.cli.planning import ClusterRequest, PlanRequest
from tvm_split.cli.wrong_use import WrongUseError

if TYPE_CHECKING:
    from tvm_split.model import Model
    from tvm_split.planner.plan import Plan


def plan(
    model: options.ModelArgument,
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
    split_from_model: SplitFromModelOption = False,
    configuration: ConfigurationOption = None,
    write_annotations: WriteAnnotationsOption = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.svg", help="Draw the graph of layers, coloured by machine."),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List the names of all layers instead of planning.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Show how a model would be split: stages, their machines, layers and estimated shares of the work."""
    if write_annotations is not None:
        require_onnx(model, "--write-annotations")
    if picture is not None and picture.suffix.lower() != ".svg":
        raise WrongUseError(f"the picture is an SVG file; {str(picture)!r} does not end in .svg", "--picture")
    annotated = annotated_model(model, split_from_model, configuration)
    request = PlanRequest(split or (), stages, objective.value, annotated)
    loaded = ModelRequest(model, batch, dimension or (), input_shape or ()).load()
    if layers:
        _list_layers(loaded, json)
        return
    planned = request.plan(loaded, ClusterRequest(cluster, workers, threads).cluster())
    if output is not None:
        planned.save(output)
        print_note(f"written to {output}")
    if write_annotations is not None:
        write_annotated(model, planned, write_annotations)
        print_note(f"annotated model written to {write_annotations}")
    if picture is not None:
        _draw(loaded, planned, picture)
    if json:
        print_json(_description(loaded, planned))
    else:
        print_plan(planned, stage_shares(loaded, planned), time.time(), STDOUT)


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


def _draw(model: Model, plan: Plan, path: Path) -> None:
    from tvm_split.plan_picture import draw_plan

    draw_plan(model, plan, path)
    print_note(f"drawn to {path}")


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
        "prediction": prediction_as_json(plan),
        "plan": plan.to_dict(),
    }
