"""Options for the output of a plan: print it, write it to a file or into a model, or draw it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.display.console import print_note
from tvm_split.display.view import write


@dataclasses.dataclass(frozen=True)
class PlanOutput:
    """The options for the output of a plan."""

    output: Path | None = option(
        None, "Write the plan to this file, to edit it and compile by it.", metavar="FILE", flag="--output -o"
    )
    write_annotations: Path | None = option(
        None, "Write the model with the plan as multi-device annotations.", metavar="FILE.onnx"
    )
    picture: Path | None = option(None, "Draw the graph of layers, coloured by machine.", metavar="FILE.svg")
    details: bool = option(False, "Also show every stage, how sure the plan is, and what it beats.")
    json: bool = option(False, "Write the result as JSON, and nothing else, to stdout.")

    def require_possible(self, source: str) -> None:
        """Raise a `WrongUseError` for an output that cannot be written, or not for the model that ``source`` names."""
        files = {"--output": self.output, "--write-annotations": self.write_annotations, "--picture": self.picture}
        for name, path in files.items():
            options.require_folder(path, name)
        if self.write_annotations is not None and Path(source).suffix.lower() != ".onnx":
            text = f"only ONNX files have annotations of devices; {source!r} is none"
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
