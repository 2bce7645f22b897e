"""``tvm-split plan``: which layers would run on which machine."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_split.cli import options
from tvm_split.cli.console import print_json, print_json_file, print_note, print_unwrapped
from tvm_split.cli.model_source import ModelOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.plan_output import PlanOutput
from tvm_split.cli.planning import SPLITTING, ClusterOptions, PlanOptions

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.model import Model
    from tvm_split.planner.micro_batches import SizedPlan
    from tvm_split.planner.problem import Problem


def plan(
    model: options.ModelArgument,
    cluster: ClusterOptions,
    shapes: ModelOptions,
    request: PlanOptions,
    shown: PlanOutput,
    batches: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Plan for each of these micro-batch sizes; take the best.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List the names of all layers instead of planning.")] = False,
    write_problem: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what is searched, for `tvm-split solve`.")
    ] = None,
) -> None:
    """Show the best split of a model over the machines: measured, proven, and compared with the obvious others."""
    shown.require_possible(model)
    request.require_possible(model)
    options.require_folder(write_problem, "--write-problem")
    if layers:
        _list_layers(shapes.load(model), shown.json)
        return
    if batches is not None:
        for given, option in ((shapes.batch, "--batch"), (write_problem, "--write-problem")):
            if given is not None:
                raise WrongUseError(
                    "every size is a batch and a problem of its own", ", ".join(sorted([option, "--batches"]))
                )
        request.require_none("sizes are compared by predictions, and a split by hand has none", SPLITTING)
        machines = cluster.machines()
        best, *others = _sizes(model, batches, shapes, request, machines)
        shown.show(model, best.model, best.plan, len(machines.machines), (best, *others))
        return
    if write_problem is not None:
        request.require_none("a split by hand leaves nothing to search, and so no problem to write", SPLITTING)
    on_problem = None if write_problem is None else partial(_write_problem, write_problem)
    machines = cluster.machines()
    loaded = shapes.load(model)
    shown.show(model, loaded, request.plan(model, loaded, machines, on_problem), len(machines.machines))


def _sizes(
    source: str, batches: str, shapes: ModelOptions, request: PlanOptions, machines: Cluster
) -> tuple[SizedPlan, ...]:
    """Plans for every micro-batch size in a list with commas, the best first."""
    from tvm_split.planner.micro_batches import plan_sizes

    try:
        wanted = [int(size) for size in batches.split(",")]
    except ValueError:
        raise WrongUseError(f"{batches!r} is no list of numbers such as 1,2,4", "--batches") from None
    found = plan_sizes(
        wanted,
        lambda size: replace(shapes, batch=size).load(source),
        lambda model: request.plan(source, model, machines),
        request.maximum_latency or math.inf,
    )
    for size in wanted:
        if size not in {each.size for each in found}:
            print_note(f"micro-batches of {size}: no plan keeps to what is demanded")
    return found


def _write_problem(path: Path, problem: Problem) -> None:
    from tvm_split.planner.problem_file import problem_to_dict

    print_json_file(path, problem_to_dict(problem))


def _list_layers(model: Model, json: bool) -> None:
    if json:
        print_json({"model": model.name, "layers": list(model.layer_names)})
    else:
        for name in model.layer_names:
            print_unwrapped(name)
