"""``tvm-split run``: stream inputs through a bundle or a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.bundle_source import cluster_for, is_bundle
from tvm_split.cli.compile import compile_with_progress
from tvm_split.cli.console import STDOUT, print_json, print_note
from tvm_split.cli.deploy import deploy_with_progress
from tvm_split.cli.model_source import ModelOptions
from tvm_split.cli.planning import ClusterOptions, ClusterOrProcessOptions, PlanOptions
from tvm_split.cli.wrong_use import WrongUseError
from tvm_split.progress import step_progress

if TYPE_CHECKING:
    from tvm_split.cli.inputs import Arrays, MicroBatches
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.compiler.bundle import Bundle
    from tvm_split.deployment.deployment import Deployment
    from tvm_split.rpc_runtime.program.program import TensorSpec

BAR_STEPS = 200
SOURCE_HELP = "A folder of `tvm-split compile`, or a MODEL as for `tvm-split plan`, planned and compiled first."


def run(
    source: Annotated[str, typer.Argument(metavar="BUNDLE|MODEL", help=SOURCE_HELP, show_default=False)],
    cluster: ClusterOrProcessOptions,
    shapes: ModelOptions,
    request: PlanOptions,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="FILE.npz",
            help="One array per input, by name or as arr_0, arr_1, …; one more leading axis is several micro-batches.",
        ),
    ] = None,
    images: Annotated[Path | None, typer.Option("--images", metavar="FOLDER", help="Images as inputs.")] = None,
    size: Annotated[
        int | None, typer.Option("--size", min=1, help="Side of the images (default: the model's).")
    ] = None,
    mean: Annotated[
        str | None, typer.Option("--mean", metavar="R,G,B", help="Subtracted from pixels in 0…1 (default: ImageNet's).")
    ] = None,
    standard_deviation: Annotated[
        str | None, typer.Option("--std", metavar="R,G,B", help="Then divided by (default: ImageNet's).")
    ] = None,
    random: Annotated[
        int | None, typer.Option("--random", min=1, metavar="N", help="N random micro-batches (default: 1).")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Stream the inputs so many times.")] = 1,
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
    bundle, machines = bundle_and_cluster(source, shapes, request, cluster)
    fed = _micro_batches(bundle.program.inputs, inputs, images, size, mean, standard_deviation, random)
    if fed.about.get("padding"):
        print_note(f"the last micro-batch is filled up with {fed.about['padding']} repetitions of the last image")
    with deploy_with_progress(bundle, machines, timeout, in_flight=in_flight) as deployment:
        results, seconds = _stream(deployment, fed, repeat, keep=output is not None)
        statistics = deployment.stats()
    saved = _save(bundle, output, results)
    count = fed.count * repeat
    if json:
        from tvm_split.cli.statistics import statistics_as_json

        print_json(
            {
                "model": bundle.model,
                **fed.about,
                "micro_batches": count,
                "seconds": seconds,
                "micro_batches_per_second": count / seconds,
                "blob_bytes_sent": statistics.blob_bytes_sent,
                "stages": statistics_as_json(statistics.stages),
                "output": None if output is None else {"path": str(output), "shapes": saved},
            }
        )
        return
    from tvm_split.cli.statistics import statistics_table

    STDOUT.print(statistics_table(statistics.stages, f"{bundle.model}: {count} micro-batches"))
    STDOUT.print(f"{count} micro-batches in {seconds:.3f} s: {count / seconds:.1f} a second", highlight=False)
    if output is not None:
        print_note(f"outputs written to {output}")


def bundle_and_cluster(
    source: str, shapes: ModelOptions, request: PlanOptions, cluster: ClusterOptions
) -> tuple[Bundle, Cluster]:
    """The bundle that the argument names, or the model, planned and compiled; and where it runs."""
    if not is_bundle(source):
        if Path(source).is_dir():
            raise WrongUseError(f"{source!r} is a folder without a bundle", "BUNDLE|MODEL")
        loaded = shapes.load(source)
        machines = cluster.machines()
        planned = request.plan(source, loaded, machines)
        return compile_with_progress(loaded, planned, database=request.database), machines
    from tvm_split.compiler.bundle import Bundle

    if shapes != ModelOptions() or request != PlanOptions():
        raise WrongUseError("is planned and compiled already; leave options of the plan out", "BUNDLE")
    bundle = Bundle.load(source)
    return bundle, cluster_for(bundle, cluster)


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
    stride = max(1, count // BAR_STEPS)  # so that drawing the bar costs nothing that is measured
    with step_progress("running") as report:
        start = time.perf_counter()
        for done, outputs in enumerate(deployment.stream(fed.stream(repeat)), start=1):
            if keep:
                results.append(outputs)
            if done % stride == 0:
                report("running", done, count)
        return results, time.perf_counter() - start


def _save(bundle: Bundle, output: Path | None, results: list[Arrays]) -> dict[str, Any]:
    if output is None:
        return {}
    from tvm_split.cli.inputs import save_outputs

    return save_outputs(output, list(bundle.outputs), results)
