"""``tvm-split run``: stream inputs through a bundle or a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from rpc_runtime.program.runner import Outputs
from tvm_split.cli import options
from tvm_split.cli.deploy import deploy_with_progress
from tvm_split.cli.inputs import MicroBatches, inputs_from_file, random_inputs, save_outputs
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import HIDDEN, WrongUseError
from tvm_split.cli.source import ModelOptions, bundle_and_cluster
from tvm_split.display.console import print_note
from tvm_split.display.report import RunResult
from tvm_split.display.view import write
from tvm_split.planner.request import PlanRequest
from tvm_split.progress import step_progress


def run(
    source: options.SourceArgument,
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    inputs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="One array per input, by name or as arr_0, arr_1, …; one more leading axis is several micro-batches.",
        ),
    ] = None,
    random: Annotated[int | None, typer.Option(min=1, metavar="N", help="N random micro-batches (default: 1).")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Stream the inputs so many times.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.npz", help="Write the outputs, stacked over the micro-batches."),
    ] = None,
    rename: options.RenameOption = None,
    in_flight: options.InFlightOption = None,
    timeout: options.TimeoutOption = 60.0,
    json: options.JsonOption = False,
) -> None:
    """Stream inputs through the pipeline and say how fast each stage was.

    Example: tvm-split run bundle --cluster lab.yaml --inputs images.npz --output scores.npz
    """
    if inputs is not None and random is not None:
        raise WrongUseError("give one of them", "--inputs, --random")
    bundle, cluster = bundle_and_cluster(source, shapes, request, machines, rename)
    expected = bundle.program.inputs
    fed = random_inputs(expected, random or 1) if inputs is None else inputs_from_file(expected, inputs)
    with deploy_with_progress(bundle, cluster, timeout, in_flight=in_flight) as deployment:
        results, seconds = _stream(deployment, fed, repeat, keep=output is not None)
        statistics = deployment.stats()
    saved = {} if output is None else save_outputs(output, results)
    count = fed.count * repeat
    result = RunResult(
        bundle.model,
        fed.source,
        count,
        seconds,
        count / seconds,
        statistics.blob_bytes_sent,
        dict(statistics.weight_bytes),
        statistics.stages,
        None if output is None else {"path": str(output), "shapes": saved},
    )
    write(result, json=json)
    if output is not None:
        print_note(f"outputs written to {output}")


def _stream(
    deployment: tvm_split.Deployment, fed: MicroBatches, repeat: int, *, keep: bool
) -> tuple[list[Outputs], float]:
    """Return the outputs (none unless ``keep``), and the seconds from the first input to the last output."""
    results: list[Outputs] = []
    count = fed.count * repeat
    with step_progress("running") as report:
        start = time.perf_counter()
        for done, outputs in enumerate(deployment.stream(fed.stream(repeat)), start=1):
            if keep:
                results.append(outputs)
            report("running", done, count)
        return results, time.perf_counter() - start
