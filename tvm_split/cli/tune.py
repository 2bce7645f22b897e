"""``tvm-split tune``: measure better choices for a model's kernels on the machines that will run them."""

from __future__ import annotations

import dataclasses
import json as json_format
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, new_table, print_json, print_note, print_unwrapped, tuning_progress
from tvm_split.cli.model_source import ModelOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.planning import ClusterOptions, PlanOptions
from tvm_split.launchers.local import InProcess
from tvm_split.units import seconds_text

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.tuning import TuningReport

INTERRUPTED = 128 + signal.SIGINT
DEFAULT_TRIALS = 200


def tune(
    shapes: ModelOptions,
    request: PlanOptions,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=options.MODEL_HELP, show_default=False)] = None,
    cluster: options.ClusterOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Instead of a cluster: one machine of this TVM target, for example "
            '\'{"kind": "llvm", "mcpu": "cortex-a72", "mtriple": "aarch64-linux-gnu"}\' (default: this host).',
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each kernel, without a cluster (default: 1).")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="Of a cluster with different targets: tune for machines like this.")
    ] = None,
    tracker: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure on devices of this TVM RPC tracker.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The key of the devices at the tracker.")] = None,
    trials: Annotated[
        int, typer.Option(min=0, help="Measurements over all kernels, those of earlier runs included.")
    ] = DEFAULT_TRIALS,
    merge: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Take over another database; tunes nothing.")
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Only measure every kernel once, and list their shares of the time.")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Tune a model's kernels by measuring, here or on devices of a TVM RPC tracker; `compile` uses what is found."""
    if merge is not None:
        if model is not None:
            raise WrongUseError("it tunes nothing; leave the model out", "--merge")
        _merge(request.database, merge, json)
        return
    if model is None:
        raise WrongUseError("give one", "MODEL")
    machines = _cluster(cluster, target, threads)
    from tvm_split.tuning import ask_first, tune as tune_model

    ask_first(machines, tracker, key)
    loaded = shapes.load(model)
    known = request.database if request.database is not None and request.database.is_dir() else None
    planned = replace(request, database=known).plan(model, loaded, machines)
    with _stop_at_interrupt() as should_stop, tuning_progress() as report:
        found = tune_model(
            loaded,
            planned,
            database=request.database,
            trials=0 if list_only else trials,
            machine=machine,
            tracker=tracker,
            key=key,
            on_progress=report,
            should_stop=should_stop,
        )
    if json:
        print_json(_description(found))
    else:
        _print_report(found, list_only)
    if found.stopped:
        print_note("stopped; everything measured so far is kept, and the same command goes on from there")
        raise typer.Exit(INTERRUPTED)


def _cluster(file: Path | None, target: str | None, threads: int | None) -> Cluster:
    if file is not None:
        if target is not None:
            raise WrongUseError("a cluster file says this for each machine", "--target")
        return ClusterOptions(file, threads=threads).machines()
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.cluster.machine import Machine

    if target is None:
        return Cluster.in_process(1, threads or 1)
    try:
        parsed = json_format.loads(target)
    except ValueError as error:
        raise WrongUseError(f"{target!r} is not JSON: {error}", "--target") from error
    if not isinstance(parsed, dict):
        raise WrongUseError(f"{target!r} is not a JSON object", "--target")
    return Cluster((Machine("device", threads or int(parsed.get("num-cores", 1)), parsed),), launcher=InProcess())


def _merge(database: Path | None, other: Path, json: bool) -> None:
    from tvm_split.compiler.tuning_folder import usable_folder
    from tvm_split.tuning import merge_databases

    folder = usable_folder(database)
    taken = merge_databases(folder, other)
    if json:
        print_json({"database": str(folder), "merged": str(other), "records": taken})
    else:
        print_unwrapped(f"{taken} records of {other} are now in {folder}")


@contextmanager
def _stop_at_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run after the measurements under way, a second one at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)
            return
        # The handler before is not put back yet: the thread that waits for signals would take this one for its own.
        asked = True
        print_note("stopping after the measurements under way; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _description(report: TuningReport) -> dict[str, Any]:
    return {
        **dataclasses.asdict(report),
        "database": str(report.database),
        "default_seconds": report.default_seconds,
        "tuned_seconds": report.tuned_seconds,
        "kernels": [{**dataclasses.asdict(each), "gain": each.gain} for each in report.kernels],
    }


def _print_report(report: TuningReport, list_only: bool) -> None:
    title = f"{report.model}: kernels that can be tuned" if list_only else f"{report.model}: tuned kernels"
    numbers = ("calls", "share", "default", "tuned", "gain", "trials")
    rows = (
        (
            Text(f"{each.name}\n  ").append(f"{each.template}: {each.choices}", "dim"),
            str(each.count),
            f"{each.share:.1%}",
            _time(each.default_seconds),
            _time(each.tuned_seconds) if each.kept else "default",
            f"{each.gain:.2f}" if each.kept else "",
            f"{each.trials}" + (f" ({each.failures} failed)" if each.failures else ""),
        )
        for each in report.kernels
    )
    STDOUT.print(new_table(title, ("kernel, template, choices",), numbers, rows))
    print_note(
        f"all of them, one run of the model: {report.default_seconds * 1e3:.3f} ms by default, "
        f"{report.tuned_seconds * 1e3:.3f} ms tuned; records are in {report.database}"
    )


def _time(seconds: float | None) -> str:
    return "failed" if seconds is None else seconds_text(seconds)
