"""``tvm-split plan`` and ``replan``: show which layers run on which machine, and improve a plan that has run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tvm_split
from rpc_runtime.option import option
from tvm_split import values
from tvm_split.cli import options
from tvm_split.cli.options import HIDDEN, WrongUseError, flags_named
from tvm_split.cli.source import AskedMachines, MachineOptions, ModelOptions, load_tvm, planned
from tvm_split.deployment.deployment_report import read_measured
from tvm_split.display.console import print_json, print_note, print_unwrapped
from tvm_split.display.view import write
from tvm_split.placement.problem import Problem
from tvm_split.placement.read_problem import problem_to_dict
from tvm_split.placement.request import SPLITTING, PlanRequest

MORE: dict[str, Any] = {"rich_help_panel": PlanRequest.PANEL}


@dataclasses.dataclass(frozen=True)
class PlanOutput:
    """The options for the output of a plan: print it, write it to a file or into a model, or draw it."""

    PANEL: ClassVar[str] = "Output"

    output: Path | None = options.output(
        None, "Write the plan to this file, to edit it and compile by it.", file="FILE", flag="--output -o"
    )
    write_annotations: Path | None = options.output(
        None, "Write the model with the plan as multi-device annotations.", file="FILE.onnx"
    )
    picture: Path | None = options.output(None, "Draw the graph of layers, coloured by machine.", file="FILE.svg")
    details: bool = option(False, "Also show every stage, how sure the plan is, and what it beats.")
    json: bool = options.JSON

    def require_possible(self, source: str) -> None:
        """Raise a `WrongUseError` if annotations or a picture cannot be written for the model that ``source`` names."""
        if self.write_annotations is not None and Path(source).suffix.lower() != ".onnx":
            text = f"only ONNX files have annotations of devices; {source!r} is not one"
            raise WrongUseError(text, "--write-annotations")
        if self.picture is not None and self.picture.suffix.lower() != ".svg":
            raise WrongUseError(f"the picture is an SVG file; {str(self.picture)!r} does not end in .svg", "--picture")

    def show(
        self, source: str, model: tvm_split.Model, plan: tvm_split.Plan, machines: int, sizes: Sequence[Any] = ()
    ) -> None:
        """Write the requested files, then print the plan; ``machines`` is the cluster's number of machines."""
        from tvm_split.display.plan import PlanResult  # imported here, since it loads TVM

        if self.output is not None:
            plan.save(self.output)
            print_note(f"written to {self.output}")
        if self.write_annotations is not None:
            from tvm_split.frontends.onnx.annotations import read_model, save_model, write_annotations

            save_model(write_annotations(read_model(source), plan), source, self.write_annotations)
            print_note(f"annotated model written to {self.write_annotations}")
        if self.picture is not None:
            from tvm_split.pictures.plan_picture import draw_plan

            draw_plan(model, plan, self.picture)
            print_note(f"drawn to {self.picture}")
        write(PlanResult(model, plan, machines, sizes), json=self.json, details=self.details)


def plan(
    model: options.ModelArgument,
    machines: MachineOptions,
    shapes: ModelOptions,
    request: PlanRequest,
    shown: PlanOutput,
    batches: str | None = option(
        None, "Plan for each of these micro-batch sizes; take the best.", metavar="1,2,4", **MORE
    ),
    layers: bool = option(False, "List the names of all layers instead of planning.", **MORE),
    write_problem: Path | None = options.output(
        None, "Write what is searched, for `tvm-split solve`.", file="FILE", **MORE
    ),
) -> None:
    """Show the best split of a model over the machines, from measurements, with a lower bound and simpler splits.

    Example: tvm-split plan net.onnx --cluster lab.yaml --output plan.json
    """
    shown.require_possible(model)
    if layers:
        _list_layers(shapes.load(model), shown.json)
        return
    if (batches or write_problem) and request.is_by_hand:
        text = "a split by hand leaves nothing to search"
        raise WrongUseError(text, "--split" if request.split else "--shard")
    asked = machines.asked(request)
    if batches is not None:
        for value, flag in ((shapes.batch, "--batch"), (write_problem, "--write-problem")):
            if value is not None:
                both = ", ".join(sorted([flag, "--batches"]))
                raise WrongUseError("each micro-batch size has its own batch and problem", both)
        best, *other_results = _sizes(model, batches, shapes, request, asked)
        shown.show(model, best.model, best.plan, len(asked.cluster.planned.machines), (best, *other_results))
        return

    def write_out(problem: Problem) -> None:
        if write_problem is not None:
            values.write(problem_to_dict(problem), write_problem)
            print_note(f"written to {write_problem}")

    loaded = shapes.load(model)
    new_plan = planned(loaded, asked, request, on_problem=write_out if write_problem else None)
    shown.show(model, loaded, new_plan, len(asked.cluster.planned.machines))


def _sizes(
    source: str, batches: str, shapes: ModelOptions, request: PlanRequest, machines: AskedMachines
) -> Sequence[Any]:
    """Return plans for every micro-batch size in a comma-separated list, the best first."""
    load_tvm()
    from tvm_split.planning.sizes import plan_sizes

    try:
        sizes = [int(size) for size in batches.split(",")]
    except ValueError:
        raise WrongUseError(f"{batches!r} is not a list of numbers such as 1,2,4", "--batches") from None
    results = plan_sizes(
        sizes,
        lambda size: replace(shapes, batch=size).load(source),
        lambda model: planned(model, machines, request),
    )
    for size in sizes:
        if size not in {result.size for result in results}:
            print_note(f"micro-batches of {size}: no plan fits the constraints")
    return results


def _list_layers(model: tvm_split.Model, json: bool) -> None:
    if json:
        print_json({"model": model.name, "layers": list(model.layer_names)})
    else:
        for name in model.layer_names:
            print_unwrapped(name)


def replan(
    model: options.ModelArgument,
    *,
    plan: Path = option(..., "The plan that has run.", dir_okay=False),
    measured: Path = option(..., "Of `tvm-split bench --json`.", metavar="REPORT", dir_okay=False),
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    shown: PlanOutput,
    threshold: float = option(0.05, "The least gain that changes the plan.", minimum=0.0, max=1.0),
) -> None:
    """Improve a plan with the measurements of its run, if that gains enough or if the plan breaks its constraints.

    The planning options of the plan apply again; options given here override them.

    Example: tvm-split replan net.onnx --plan plan.json --measured report.json --cluster lab.yaml
    """
    shown.require_possible(model)
    with flags_named(PlanRequest):
        request.require_default("new measurements need no correction; use `tvm-split plan`", ["refresh"])
        request.require_default("a plan that has run is improved by searching", SPLITTING)
        request.require_default("it is that of the plan; use `tvm-split plan` for another one", ["precision"])
    current = tvm_split.Plan.load(plan)
    new_request = replace(current.request.searched(refresh=False), **request.given)
    cluster, described = machines.asked(new_request)
    loaded = shapes.load(model, current.inputs)
    measurements = read_measured(measured, current.model)
    better, change = tvm_split.replan(
        loaded, cluster, current, measurements, threshold, new_request, described=described
    )
    if not change.changed:
        print_note(
            f"the plan stays: another one gains {change.gain:.1%}, which is not above the threshold of {threshold:.1%}"
        )
    elif change.gain > threshold:
        print_note(f"the plan changes: it gains {change.gain:.1%}, more than the threshold of {threshold:.1%}")
    else:
        print_note(f"the plan changes: the old one breaks its constraints (gain: {change.gain:.1%})")
    shown.show(model, loaded, better, len(cluster.planned.machines))
