"""``tvm-split plan``: which layers would run on which machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options, search_options
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
from tvm_split.cli.plan_report import prediction_as_json, print_plan, print_sizes
from tvm_split.cli.planning import ClusterRequest, PlanRequest
from tvm_split.cli.problem import plan_problem, require_problem_alone
from tvm_split.cli.search_options import SearchRequest
from tvm_split.cli.search_plan import Searching
from tvm_split.cli.wrong_use import WrongUseError, given_options

if TYPE_CHECKING:
    from tvm_split.model import Model
    from tvm_split.planner.micro_batches import SizedPlan
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
    pin: search_options.PinOption = None,
    keep_off: search_options.KeepOffOption = None,
    replicas: search_options.ReplicasOption = False,
    maximum_machines: search_options.MaximumMachinesOption = None,
    maximum_latency: search_options.MaximumLatencyOption = None,
    minimum_throughput: search_options.MinimumThroughputOption = None,
    estimate: search_options.EstimateOption = False,
    refresh: search_options.RefreshOption = False,
    time_limit: search_options.TimeLimitOption = None,
    batch: options.BatchOption = None,
    batches: Annotated[
        str | None,
        typer.Option("--batches", metavar="1,2,4", help="Plan for each of these micro-batch sizes; take the best."),
    ] = None,
    dimension: options.DimensionOption = None,
    input_shape: options.InputShapeOption = None,
    replan: search_options.ReplanOption = None,
    measured: search_options.MeasuredOption = None,
    threshold: search_options.ThresholdOption = 0.05,
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
    write_problem: search_options.WriteProblemOption = None,
    problem: Annotated[
        Path | None,
        typer.Option("--problem", metavar="FILE", help="Instead of a model: plan the numbers in this file (JSON)."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Show the best split of a model over the machines: measured, proven, and compared with the obvious others."""
    if problem is not None:
        require_problem_alone(context)
        plan_problem(problem, json, time_limit)
        return
    if model is None:
        raise WrongUseError("Missing argument: give a model, or a problem file with --problem", "MODEL")
    if write_annotations is not None:
        require_onnx(model, "--write-annotations")
    if picture is not None and picture.suffix.lower() != ".svg":
        raise WrongUseError(f"the picture is an SVG file; {str(picture)!r} does not end in .svg", "--picture")
    _require_no_contradiction({name for name, _ in given_options(context)})
    by_hand = PlanRequest(split or (), stages, objective.value, annotated_model(model, split_from_model, configuration))
    search = SearchRequest(
        stages, pin or (), keep_off or (), replicas, maximum_machines, maximum_latency, minimum_throughput
    )
    if by_hand.is_split:
        _require_no_search(context, "a split by hand leaves nothing to search")

    def load(size: int | None) -> Model:
        return ModelRequest(model, size, dimension or (), input_shape or ()).load()

    if layers:
        _list_layers(load(batch), json)
        return
    machines = ClusterRequest(cluster, workers, threads).cluster()
    searching = Searching(machines, objective.value, search, not estimate, refresh, time_limit, write_problem)
    sizes: tuple[SizedPlan, ...] = ()
    if batches is not None:
        sizes = searching.sizes(batches, load)
        loaded, planned = sizes[0].model, sizes[0].plan
    else:
        loaded = load(batch)
        if replan is not None and measured is not None:
            planned = searching.improve(loaded, replan, measured, threshold)
        elif by_hand.is_split or (stages or 1) > len(machines.machines):
            if not by_hand.is_split:
                _require_no_search(context, f"{stages} stages go round {len(machines.machines)} machines, unsearched")
            planned = by_hand.plan(loaded, machines)
        else:
            planned = searching.plan(loaded)
    if output is not None:
        planned.save(output)
        print_note(f"written to {output}")
    if write_annotations is not None:
        write_annotated(model, planned, write_annotations)
        print_note(f"annotated model written to {write_annotations}")
    if picture is not None:
        _draw(loaded, planned, picture)
    if json:
        print_json(_description(loaded, planned, sizes))
    else:
        _print(loaded, planned, sizes, len(machines.machines))


SEARCH_OPTIONS = (
    "pin",
    "keep_off",
    "replicas",
    "maximum_machines",
    "maximum_latency",
    "minimum_throughput",
    "estimate",
    "refresh",
    "time_limit",
    "batches",
    "replan",
    "write_problem",
)


CONTRADICTIONS = (
    ("batch", "batches", "give one of them"),
    ("estimate", "refresh", "an estimate measures nothing"),
    ("replan", "batches", "a plan that has run has its micro-batch size"),
    ("replan", "refresh", "new measurements need no correction; make a plan without --replan"),
    ("batches", "write_problem", "every size is a problem of its own; give one with --batch"),
)


def _require_no_contradiction(given: set[str]) -> None:
    for one, other, why in CONTRADICTIONS:
        if {one, other} <= given:
            raise WrongUseError(why, f"{_option(one)}, {_option(other)}")
    if ("replan" in given) != ("measured" in given):
        raise WrongUseError("give both: a plan, and what `tvm-split bench --json` said", "--replan, --measured")
    if "threshold" in given and "replan" not in given:
        raise WrongUseError("this belongs to --replan", "--threshold")


def _require_no_search(context: typer.Context, why: str) -> None:
    for name, option in given_options(context):
        if name in SEARCH_OPTIONS:
            raise WrongUseError(why, option)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _print(model: Model, plan: Plan, sizes: Sequence[SizedPlan], machines: int) -> None:
    from tvm_split.planner.advice import one_machine_advice

    print_plan(plan, stage_shares(model, plan), time.time(), STDOUT)
    if sizes:
        print_sizes(sizes, STDOUT)
    advice = one_machine_advice(plan, machines)
    if advice is not None:
        STDOUT.print(advice, markup=False, highlight=False, soft_wrap=True)


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
    from tvm_split.pictures.plan_picture import draw_plan

    draw_plan(model, plan, path)
    print_note(f"drawn to {path}")


def _description(model: Model, plan: Plan, sizes: Sequence[SizedPlan]) -> dict[str, Any]:
    shares = stage_shares(model, plan)
    return {
        "model": model.name,
        "framework": model.framework,
        "inputs": [{"name": each.name, "shape": each.shape, "dtype": each.dtype} for each in model.inputs],
        "outputs": [{"name": each.name, "shape": each.shape, "dtype": each.dtype} for each in model.outputs],
        "stages": [
            {
                "name": stage.name,
                "machine": stage.machine,
                "machines": stage.machines,
                "layers": stage.layers,
                "estimated_share": share,
            }
            for stage, share in zip(plan.stages, shares, strict=True)
        ],
        "prediction": prediction_as_json(plan),
        "sizes": [
            {
                "size": each.size,
                "samples_per_second": each.samples_per_second,
                "latency_seconds": each.prediction.latency_seconds,
                "stages": len(each.plan.stages),
            }
            for each in sizes
        ],
        "plan": plan.to_dict(),
    }
