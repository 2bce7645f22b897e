"""What becomes of a plan on the command line: shown, written to a file, into a model, or drawn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, print_json, print_line, print_note
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.plan_report import prediction_as_json, print_plan, print_sizes
from tvm_split.cli.planning import require_onnx

if TYPE_CHECKING:
    from tvm_split.model import Model
    from tvm_split.planner.micro_batches import SizedPlan
    from tvm_split.planner.plan import Plan


@dataclasses.dataclass(frozen=True)
class PlanOutput:
    """What the command line wants to have of a plan."""

    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file, to edit it and compile by it.")
    ] = None
    write_annotations: Annotated[
        Path | None,
        typer.Option(metavar="FILE.onnx", help="Write the model with the plan as multi-device annotations."),
    ] = None
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the graph of layers, coloured by machine.")
    ] = None
    details: Annotated[
        bool,
        typer.Option("--details", help="Also show every stage, how sure the plan is, and what it beats."),
    ] = False
    json: options.JsonOption = False

    def require_possible(self, source: str) -> None:
        """Raise a `WrongUseError` for what cannot be written of the model that ``source`` names."""
        files = {"--output": self.output, "--write-annotations": self.write_annotations, "--picture": self.picture}
        for option, path in files.items():
            options.require_folder(path, option)
        if self.write_annotations is not None:
            require_onnx(source, "--write-annotations")
        if self.picture is not None and self.picture.suffix.lower() != ".svg":
            raise WrongUseError(f"the picture is an SVG file; {str(self.picture)!r} does not end in .svg", "--picture")

    def show(self, source: str, model: Model, plan: Plan, machines: int, sizes: Sequence[SizedPlan] = ()) -> None:
        """Write what is to be written, then print the plan for a cluster of so many machines."""
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
        if self.json:
            print_json(_description(model, plan, sizes))
            return
        from tvm_split.planner.explain import one_machine_advice

        print_plan(plan, stage_shares(model, plan), time.time(), STDOUT, details=self.details)
        if sizes:
            print_sizes(sizes, STDOUT)
        advice = one_machine_advice(plan, machines)
        if advice is not None:
            print_line(advice)


def stage_shares(model: Model, plan: Plan) -> list[float]:
    """Each stage's share of the model's estimated time on one core, between 0 and 1."""
    from tvm_split.planner.estimate import estimated_seconds

    seconds = estimated_seconds(model.description)
    whole = sum(seconds.values()) or 1.0
    return [sum(seconds[layer] for layer in stage.layers) / whole for stage in plan.stages]


def _description(model: Model, plan: Plan, sizes: Sequence[SizedPlan]) -> dict[str, Any]:
    return {
        "model": model.name,
        "framework": model.framework,
        "inputs": [dataclasses.asdict(each) for each in model.inputs],
        "outputs": [dataclasses.asdict(each) for each in model.outputs],
        "stages": [
            {
                "name": stage.name,
                "machine": stage.machine,
                "machines": stage.machines,
                "shares": stage.shares,
                "sharding": dataclasses.asdict(stage.sharding) if stage.sharding else None,
                "layers": stage.layers,
                "estimated_share": share,
            }
            for stage, share in zip(plan.stages, stage_shares(model, plan), strict=True)
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
