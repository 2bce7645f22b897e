"""``tvm-split tune``: measure better choices for a model's kernels on the machines that will run them."""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import HIDDEN, WrongUseError
from tvm_split.cli.source import ModelOptions, load_tvm, planned
from tvm_split.display.console import print_json, print_unwrapped, tuning_progress
from tvm_split.display.view import write
from tvm_split.launchers.local import InProcess
from tvm_split.planner.request import PlanRequest

DEFAULT_TRIALS = 200


def tune(
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=options.MODEL_HELP, show_default=False)] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A cluster file (YAML) whose machines the kernels are for."),
    ] = None,
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
    """Tune a model's kernels by measuring, here or on devices of a TVM RPC tracker; `compile` uses what is found.

    Ctrl-C keeps everything that was measured; the same command goes on from there.

    Example: tvm-split tune net.onnx --trials 500
    """
    if merge is not None:
        if model is not None:
            raise WrongUseError("it tunes nothing; leave the model out", "--merge")
        _merge(request.database, merge, json)
        return
    if model is None:
        raise WrongUseError("give one", "MODEL")
    machines = _cluster(cluster, target, threads)
    load_tvm()
    from tvm_split.tuning import ask_first

    ask_first(machines, tracker, key)
    loaded = shapes.load(model)
    existing_database = request.database if request.database is not None and request.database.is_dir() else None
    chosen_plan = planned(loaded, machines, replace(request, database=existing_database))
    with tuning_progress() as report:
        result = tvm_split.tune(
            loaded,
            chosen_plan,
            database=request.database,
            trials=0 if list_only else trials,
            machine=machine,
            tracker=tracker,
            key=key,
            on_progress=report,
        )
    write(result, json=json)


def _cluster(file: Path | None, target: str | None, threads: int | None) -> tvm_split.Cluster:
    if file is not None:
        if target is not None:
            raise WrongUseError("a cluster file says this for each machine", "--target")
        return MachineOptions(str(file), threads=threads).machines()
    from tvm_split.cluster.machine import Machine

    if target is None:
        return tvm_split.Cluster.in_process(1, threads or 1)
    try:
        parsed = json_format.loads(target)
    except ValueError as error:
        raise WrongUseError(f"{target!r} is not JSON: {error}", "--target") from error
    if not isinstance(parsed, dict):
        raise WrongUseError(f"{target!r} is not a JSON object", "--target")
    return tvm_split.Cluster(
        (Machine("device", threads or int(parsed.get("num-cores", 1)), parsed),), launcher=InProcess()
    )


def _merge(database: Path | None, other_folder: Path, json: bool) -> None:
    from tvm_split.compiler.tuning_folder import usable_folder

    folder = usable_folder(database)
    record_count = tvm_split.merge_databases(folder, other_folder)
    if json:
        print_json({"database": str(folder), "merged": str(other_folder), "records": record_count})
    else:
        print_unwrapped(f"{record_count} records of {other_folder} are now in {folder}")
