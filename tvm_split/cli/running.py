"""``tvm-split run``, ``bench`` and ``deploy``: send a bundle to its machines, run it, measure it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tvm_split
from rpc_runtime.option import option, options as options_in
from rpc_runtime.program.runner import Outputs
from rpc_runtime.program.specs import TensorSpec
from tvm_split.cli import options
from tvm_split.cli.inputs import MicroBatches, inputs_from_file, random_inputs, save_outputs
from tvm_split.cli.options import HIDDEN, WrongUseError
from tvm_split.cli.source import MachineOptions, ModelOptions, bundle_on_machines, planned_once
from tvm_split.compiler.rows import Rows
from tvm_split.deployment import options as deployment_options
from tvm_split.display.console import print_json, print_note, transfer_progress
from tvm_split.display.view import Table, print_parts, show
from tvm_split.placement.request import PlanRequest
from tvm_split.progress import step_progress
from tvm_split.units import bytes_text, count_text


@dataclasses.dataclass(frozen=True)
class DeployOptions(deployment_options.DeployOptions):
    """The options of commands that deploy a bundle."""

    rename: tuple[str, ...] = option((), "Of a bundle: its machine OLD is NEW of the cluster.", metavar="OLD=NEW")

    def deploy(
        self, bundle: tvm_split.Bundle, cluster: tvm_split.Cluster
    ) -> tuple[tvm_split.Deployment, dict[str, int]]:
        """Return the deployment, and the bytes sent to each machine; show a progress bar per machine meanwhile."""
        sent: dict[str, int] = {}
        named = {field.name: getattr(self, field.name) for field in options_in(deployment_options.DeployOptions)}
        with transfer_progress() as bars:

            def report(machine: str, done: int, total: int) -> None:
                sent[machine] = done
                bars(machine, done, total)

            return tvm_split.deploy(bundle, cluster, on_transfer=report, **named), sent


@dataclasses.dataclass(frozen=True)
class RunOptions(DeployOptions):
    """The options of commands that run a bundle or model."""

    inputs: Path | None = option(
        None,
        "One array per input, by name or as arr_0, arr_1, …, of any number of rows; one more leading axis is several "
        "micro-batches.",
        metavar="FILE.npz",
        exists=True,
        dir_okay=False,
    )
    random: int | None = option(None, "N random micro-batches (default: 1; of bench: 8).", metavar="N", minimum=1)
    trace: Path | None = options.TRACE
    kernels: int = options.KERNELS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs is not None and self.random is not None:
            raise WrongUseError("give one of them", "--inputs, --random")
        if self.kernels and self.trace is None:
            raise WrongUseError("it needs --trace, which has the kernels", "--kernels")

    @contextlib.contextmanager
    def tracing(self, deployment: tvm_split.Deployment) -> Iterator[None]:
        """Record a trace in this context and write it to the path of ``--trace``; do nothing without one."""
        if self.trace is None:
            yield
            return
        with deployment.tracing(self.trace, kernels=self.kernels):
            yield
        print_note(f"trace written to {self.trace}")

    def prepared(
        self, source: str, shapes: ModelOptions, request: PlanRequest, machines: MachineOptions, default: int
    ) -> tuple[tvm_split.Bundle, tvm_split.Cluster, MicroBatches]:
        """Return the bundle that the argument names, or the model planned and compiled, its cluster, and its inputs.

        The inputs are those of the file, else ``default`` random ones unless their number is given. They are compared
        with the model as soon as it is imported, because planning and compiling can take minutes.
        """
        if (Path(source) / "manifest.json").is_file():  # a bundle
            if shapes != ModelOptions() or request != PlanRequest():
                raise WrongUseError("is planned and compiled already; leave options of the plan out", "BUNDLE")
            bundle, cluster = bundle_on_machines(source, self.rename, machines)
            return bundle, cluster, self._micro_batches(bundle.program.inputs, bundle.rows, default)
        if Path(source).is_dir() and not (Path(source) / "saved_model.pb").exists():
            raise WrongUseError(f"{source!r} is a folder without a bundle", "BUNDLE|MODEL")
        if self.rename:
            raise WrongUseError("it renames machines of a bundle, and a model is planned for the cluster", "--rename")
        asked = machines.asked(request, deploys=True, standby=self.standby)
        model = shapes.load(source)
        from tvm_split.compiler.model_rows import rows_of  # with TVM, which bundles do not need

        batches = self._micro_batches(model.inputs, rows_of(model), default)
        bundle = tvm_split.compile(model, planned_once(model, asked, request), database=request.database)
        return bundle, asked.cluster, batches

    def _micro_batches(self, expected: Sequence[TensorSpec], rows: Rows, default: int) -> MicroBatches:
        if self.inputs is not None:
            return inputs_from_file(expected, self.inputs, rows)
        return random_inputs(expected, self.random or default)


def run(
    source: options.SourceArgument,
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    running: RunOptions,
    repeat: int = option(1, "Stream the inputs so many times.", minimum=1),
    output: Path | None = options.output(
        None, "Write the outputs, joined over rows or stacked over micro-batches.", file="FILE.npz", flag="--output -o"
    ),
    json: bool = options.JSON,
) -> None:
    """Stream inputs through the pipeline and show how fast each stage was.

    Example: tvm-split run bundle --cluster lab.yaml --inputs images.npz --output scores.npz
    """
    bundle, cluster, batches = running.prepared(source, shapes, request, machines, 1)
    with running.deploy(bundle, cluster)[0] as deployment:
        with running.tracing(deployment):
            results, seconds = _stream(deployment, batches, repeat, keep=output is not None)
        statistics, limit = deployment.stats(), deployment.report().measured_limiting
        events = [event.to_dict() for event in deployment.events]
    written = None if output is None else {"path": str(output), "shapes": save_outputs(output, results, batches.rows)}
    count = batches.count * repeat
    if json:
        print_json(
            {
                "model": bundle.model,
                "inputs": batches.source,
                "micro_batches": count,
                "seconds": seconds,
                "micro_batches_per_second": count / seconds,
                "blob_bytes_sent": statistics.blob_bytes_sent,
                "weight_bytes": dict(statistics.weight_bytes),
                "limiting": limit,
                "stages": [dataclasses.asdict(stage) for stage in statistics.stages],
                "events": events,
                "output": written,
            }
        )
    else:
        from tvm_split.display.report import statistics_table  # imported here, since it loads TVM

        title = count_text(count, "micro-batch")
        rate = f"{title} in {seconds:.3f} s: {count / seconds:.1f} micro-batches/s"
        limited = [f"Limited by {limit}"] if limit else []
        print_parts([statistics_table(statistics.stages, f"{bundle.model}: {title}"), rate, *limited])
    if output is not None:
        print_note(f"outputs written to {output}")


def _stream(
    deployment: tvm_split.Deployment, batches: MicroBatches, repeat: int, *, keep: bool
) -> tuple[list[Outputs], float]:
    """Return the outputs (none unless ``keep``), and the seconds from the first input to the last output."""
    results: list[Outputs] = []
    with step_progress("running") as report:
        start = time.perf_counter()
        for done, outputs in enumerate(deployment.stream(batches.stream(repeat)), start=1):
            if keep:
                results.append(outputs)
            report("running", done, batches.count * repeat)
        return results, time.perf_counter() - start


def bench(
    source: options.SourceArgument,
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    running: RunOptions,
    rounds: int = option(5, "Rounds to take the medians of.", minimum=1),
    micro_batches: int = option(
        100, "Micro-batches of the stream of each round; the inputs are used in turn.", minimum=3
    ),
    json: bool = options.JSON,
) -> None:
    """Measure latency, throughput, every machine and every link, and compare them with the plan's prediction.

    Example: tvm-split bench bundle --cluster lab.yaml --json > report.json
    """
    bundle, cluster, inputs = running.prepared(source, shapes, request, machines, 8)
    with (
        running.deploy(bundle, cluster)[0] as deployment,
        step_progress("warming up") as bar,
        running.tracing(deployment),
    ):
        batches = list(inputs.stream(1))
        report = tvm_split.bench(deployment, batches, rounds=rounds, micro_batches=micro_batches, on_progress=bar)
    if json:
        print_json({**report.to_dict(), "inputs": inputs.source, "digest": bundle.digest, "rounds": rounds})
    else:
        show(report)


def deploy(
    bundle: options.BundleArgument, machines: MachineOptions, deploying: DeployOptions, json: bool = options.JSON
) -> None:
    """Send a bundle's files to its machines, and check that they can run it: load each stage, and unload it again.

    Nothing keeps running. The workers keep the files by their SHA-256, so that `tvm-split run` sends nothing and starts
    at once, and misfits (versions, memory, a missing GPU) are reported here and not later. With workers on this host,
    which end with the command, it is only a check.

    Example: tvm-split deploy bundle --cluster lab.yaml
    """
    loaded, cluster = bundle_on_machines(bundle, deploying.rename, machines)
    deployment, sent = deploying.deploy(loaded, cluster)
    with deployment:
        machines_of_bundle = [_blobs_of(loaded, name, sent.get(name, 0)) for name in deployment.program.machines]
    if json:
        print_json({"model": loaded.model, "digest": loaded.digest, "machines": machines_of_bundle})
        return
    rows = [
        (row["machine"], ", ".join(row["stages"]), bytes_text(row["needed_bytes"]), bytes_text(row["sent_bytes"]))
        for row in machines_of_bundle
    ]
    title = f"{loaded.model}: its files are on its machines, which can run it"
    print_parts([Table(title, ("machine", "stages"), ("needs", "was sent"), rows)])


def _blobs_of(bundle: tvm_split.Bundle, machine: str, sent_bytes: int) -> dict[str, Any]:
    """Return the sizes of the blobs that a machine needs of a bundle, and of those that were sent to it."""
    stages = bundle.program.stages_on(machine)
    sizes = {blob.sha256: blob.size_bytes for stage in stages for blob in stage.blobs}
    return {
        "machine": machine,
        "stages": [stage.name for stage in stages],
        "needed_bytes": sum(sizes.values()),
        "sent_bytes": sent_bytes,
    }
