"""``tvm-split bench``: compare prediction and measurement for every machine and link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from tvm_split.cli import options
from tvm_split.cli.deploy import deploy_with_progress
from tvm_split.cli.inputs import inputs_from_file, random_inputs
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import HIDDEN, WrongUseError
from tvm_split.cli.source import ModelOptions, bundle_and_cluster
from tvm_split.display.console import print_json
from tvm_split.display.view import show
from tvm_split.planner.request import PlanRequest
from tvm_split.progress import step_progress

RANDOM_MICRO_BATCHES = 8


def bench(
    source: options.SourceArgument,
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    inputs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Micro-batches, as for `tvm-split run`; used in turn.")
    ] = None,
    random: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"N random micro-batches (default: {RANDOM_MICRO_BATCHES}).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take the medians of.")] = 5,
    micro_batches: Annotated[int, typer.Option(min=3, help="Micro-batches of the stream of each round.")] = 100,
    rename: options.RenameOption = None,
    in_flight: options.InFlightOption = None,
    timeout: options.TimeoutOption = 60.0,
    json: options.JsonOption = False,
) -> None:
    """Measure latency, throughput, every machine and every link, and compare them with the plan's prediction.

    Example: tvm-split bench bundle --cluster lab.yaml --json > report.json
    """
    if inputs is not None and random is not None:
        raise WrongUseError("give one of them", "--inputs, --random")
    bundle, cluster = bundle_and_cluster(source, shapes, request, machines, rename)
    expected = bundle.program.inputs
    if inputs is None:
        fed = random_inputs(expected, random or RANDOM_MICRO_BATCHES)
    else:
        fed = inputs_from_file(expected, inputs)
    with (
        deploy_with_progress(bundle, cluster, timeout, in_flight=in_flight) as deployment,
        step_progress("warming up") as bar,
    ):
        batches = list(fed.stream(1))
        report = tvm_split.bench(deployment, batches, rounds=rounds, micro_batches=micro_batches, on_progress=bar)
    if json:
        print_json({**report.to_dict(), "inputs": fed.source, "digest": bundle.digest, "rounds": rounds})
    else:
        show(report)
