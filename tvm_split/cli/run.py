"""``tvm-split run``: stream inputs through a bundle or a model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_split.cli import options
from tvm_split.cli.bundle_source import SOURCE_HELP, bundle_and_cluster
from tvm_split.cli.console import STDOUT, print_json, print_note
from tvm_split.cli.deploy import deploy_with_progress
from tvm_split.cli.model_source import ModelOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.planning import ClusterOrProcessOptions, PlanOptions
from tvm_split.progress import step_progress

if TYPE_CHECKING:
    from rpc_runtime.program.program import TensorSpec
    from tvm_split.cli.inputs import Arrays, MicroBatches
    from tvm_split.deployment.deployment import Deployment


def run(
    source: Annotated[str, typer.Argument(metavar="BUNDLE|MODEL", help=SOURCE_HELP, show_default=False)],
    cluster: ClusterOrProcessOptions,
    shapes: ModelOptions,
    request: PlanOptions,
    inputs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="One array per input, by name or as arr_0, arr_1, …; one more leading axis is several micro-batches.",
        ),
    ] = None,
    images: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Images as inputs.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Side of the images (default: the model's).")] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Subtracted from pixels in 0…1 (default: ImageNet's).")
    ] = None,
    standard_deviation: Annotated[
        str | None, typer.Option("--std", metavar="R,G,B", help="Then divided by (default: ImageNet's).")
    ] = None,
    random: Annotated[int | None, typer.Option(min=1, metavar="N", help="N random micro-batches (default: 1).")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Stream the inputs so many times.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.npz", help="Write the outputs, stacked over the micro-batches."),
    ] = None,
    in_flight: options.InFlightOption = None,
    timeout: options.TimeoutOption = 60.0,
    json: options.JsonOption = False,
) -> None:
    """Stream inputs through the pipeline and say how fast each stage was."""
    if sum(given is not None for given in (inputs, images, random)) > 1:
        raise WrongUseError("give one of them", "--inputs, --images, --random")
    from tvm_split.cli.inputs import save_outputs

    bundle, machines = bundle_and_cluster(source, shapes, request, cluster)
    fed = _micro_batches(bundle.program.inputs, inputs, images, size, mean, standard_deviation, random)
    if fed.about.get("padding"):
        print_note(f"the last micro-batch is filled up with {fed.about['padding']} repetitions of the last image")
    with deploy_with_progress(bundle, machines, timeout, in_flight=in_flight) as deployment:
        results, seconds = _stream(deployment, fed, repeat, keep=output is not None)
        statistics = deployment.stats()
    saved = {} if output is None else save_outputs(output, bundle.outputs, results)
    count = fed.count * repeat
    if json:
        print_json(
            {
                "model": bundle.model,
                **fed.about,
                "micro_batches": count,
                "seconds": seconds,
                "micro_batches_per_second": count / seconds,
                "blob_bytes_sent": statistics.blob_bytes_sent,
                "weight_bytes": dict(statistics.weight_bytes),
                "stages": [dataclasses.asdict(each) for each in statistics.stages],
                "output": None if output is None else {"path": str(output), "shapes": saved},
            }
        )
        return
    from tvm_split.cli.report_table import statistics_table

    STDOUT.print(statistics_table(statistics.stages, f"{bundle.model}: {count} micro-batches"))
    STDOUT.print(f"{count} micro-batches in {seconds:.3f} s: {count / seconds:.1f} a second", highlight=False)
    if output is not None:
        print_note(f"outputs written to {output}")


def _micro_batches(
    expected: Sequence[TensorSpec],
    inputs: Path | None,
    images: Path | None,
    size: int | None,
    mean: str | None,
    standard_deviation: str | None,
    random: int | None,
) -> MicroBatches:
    from tvm_split.cli.images import IMAGENET_MEAN, IMAGENET_STANDARD_DEVIATION, images_of_folder
    from tvm_split.cli.inputs import inputs_from_file, random_inputs

    if images is not None:
        centre = _three_numbers(mean, "--mean") or IMAGENET_MEAN
        spread = _three_numbers(standard_deviation, "--std") or IMAGENET_STANDARD_DEVIATION
        return images_of_folder(expected, images, size, centre, spread)
    for given, option in ((size, "--size"), (mean, "--mean"), (standard_deviation, "--std")):
        if given is not None:
            raise WrongUseError("is for --images", option)
    return random_inputs(expected, random or 1) if inputs is None else inputs_from_file(expected, inputs)


def _three_numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 3:
        raise WrongUseError(f"{text!r} is not three numbers with commas between them", option)
    return numbers


def _stream(deployment: Deployment, fed: MicroBatches, repeat: int, *, keep: bool) -> tuple[list[Arrays], float]:
    """The outputs (none unless they are to be kept), and the seconds from the first input to the last output."""
    results: list[Arrays] = []
    count = fed.count * repeat
    with step_progress("running") as report:
        start = time.perf_counter()
        for done, outputs in enumerate(deployment.stream(fed.stream(repeat)), start=1):
            if keep:
                results.append(outputs)
            report("running", done, count)
        return results, time.perf_counter() - start
