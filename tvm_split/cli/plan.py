"""``tvm-split plan``: show which layers would run on which machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import tvm_split
from tvm_split import values
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.plan_output import PlanOutput
from tvm_split.cli.source import ModelOptions, load_tvm, planned
from tvm_split.display.console import print_json, print_note, print_unwrapped
from tvm_split.planner.problem import Problem
from tvm_split.planner.problem_file import problem_to_dict
from tvm_split.planner.request import PlanRequest


def plan(
    model: options.ModelArgument,
    machines: MachineOptions,
    shapes: ModelOptions,
    request: PlanRequest,
    shown: PlanOutput,
    batches: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Plan for each of these micro-batch sizes; take the best.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List the names of all layers instead of planning.")] = False,
    write_problem: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what is searched, for `tvm-split solve`.")
    ] = None,
) -> None:
    """Show the best split of a model over the machines, from measurements, with a lower bound and simpler splits.

    Example: tvm-split plan net.onnx --cluster lab.yaml --output plan.json
    """
    shown.require_possible(model)
    options.require_folder(write_problem, "--write-problem")
    if layers:
        _list_layers(shapes.load(model), shown.json)
        return
    if (batches or write_problem) and request.is_by_hand:
        text = "a split by hand leaves nothing to search"
        raise WrongUseError(text, "--split" if request.split else "--shard")
    cluster = machines.machines()
    if batches is not None:
        for value, option in ((shapes.batch, "--batch"), (write_problem, "--write-problem")):
            if value is not None:
                both = ", ".join(sorted([option, "--batches"]))
                raise WrongUseError("every size is a batch and a problem of its own", both)
        best, *other_results = _sizes(model, batches, shapes, request, cluster)
        shown.show(model, best.model, best.plan, len(cluster.machines), (best, *other_results))
        return
    on_problem = None if write_problem is None else partial(_write_problem, write_problem)
    loaded = shapes.load(model)
    new_plan = planned(loaded, cluster, request, on_problem=on_problem)
    shown.show(model, loaded, new_plan, len(cluster.machines))


def _sizes(
    source: str, batches: str, shapes: ModelOptions, request: PlanRequest, cluster: tvm_split.Cluster
) -> Sequence[Any]:
    """Return plans for every micro-batch size in a comma-separated list, the best first."""
    load_tvm()
    from tvm_split.planner.micro_batches import plan_sizes

    try:
        sizes = [int(size) for size in batches.split(",")]
    except ValueError:
        raise WrongUseError(f"{batches!r} is no list of numbers such as 1,2,4", "--batches") from None
    results = plan_sizes(
        sizes,
        lambda size: replace(shapes, batch=size).load(source),
        lambda model: planned(model, cluster, request),
    )
    for size in sizes:
        if size not in {result.size for result in results}:
            print_note(f"micro-batches of {size}: no plan keeps to what is demanded")
    return results


def _write_problem(path: Path, problem: Problem) -> None:
    values.write(problem_to_dict(problem), path)
    print_note(f"written to {path}")


def _list_layers(model: tvm_split.Model, json: bool) -> None:
    if json:
        print_json({"model": model.name, "layers": list(model.layer_names)})
    else:
        for name in model.layer_names:
            print_unwrapped(name)
