"""``tvm-split tune``: measure better choices for the kernels of a model."""

from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.options import HIDDEN, WrongUseError
from tvm_split.cli.source import AskedMachines, MachineOptions, ModelOptions, load_tvm, planned
from tvm_split.display.console import print_json, print_unwrapped, tuning_progress
from tvm_split.display.view import write
from tvm_split.launchers.local import InProcess
from tvm_split.placement.request import PlanRequest


def tune(
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=options.MODEL_HELP, show_default=False)] = None,
    cluster: Path | None = option(None, "A cluster file (YAML) whose machines the kernels are for.", metavar="FILE"),
    target: str | None = option(
        None,
        "Instead of a cluster: one machine of this TVM target, for example "
        '\'{"kind": "llvm", "mcpu": "cortex-a72", "mtriple": "aarch64-linux-gnu"}\' (default: this host).',
        metavar="JSON",
    ),
    threads: int | None = option(None, "Threads of each kernel, without a cluster (default: 1).", minimum=1),
    machine: str | None = option(None, "Of a cluster with different targets: tune for machines like this."),
    tracker: str | None = option(None, "Measure on devices of this TVM RPC tracker.", metavar="HOST:PORT"),
    key: str | None = option(None, "The key of the devices at the tracker."),
    trials: int = option(
        200, "Measurements over all kernels, those of earlier runs included; 0: the default of each.", minimum=0
    ),
    merge: Path | None = option(None, "Take over another database; tunes nothing.", metavar="FOLDER"),
    json: bool = options.JSON,
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
        raise WrongUseError("name a model, or --merge FOLDER", "MODEL")
    machines = _machines(cluster, target, threads, request)
    load_tvm()
    from tvm_split.compiler.tuning_folder import usable_folder
    from tvm_split.tuning import ask_first

    folder = usable_folder(request.database)
    ask_first(machines.cluster, folder, tracker, key)
    loaded = shapes.load(model)
    chosen_plan = planned(loaded, machines, request)
    with tuning_progress() as report:
        result = tvm_split.tune(
            loaded,
            chosen_plan,
            database=folder,
            trials=trials,
            machine=machine,
            tracker=tracker,
            key=key,
            on_progress=report,
        )
    write(result, json=json)


def _machines(file: Path | None, target: str | None, threads: int | None, request: PlanRequest) -> AskedMachines:
    if file is not None:
        if target is not None:
            raise WrongUseError("a cluster file says this for each machine", "--target")
        return MachineOptions(str(file), threads=threads).asked(request)
    from tvm_split.cluster.machine import Machine

    if target is None:
        return AskedMachines(tvm_split.Cluster.in_process(1, threads or 1), {})
    parsed = _target(target)
    device = Machine("device", threads or int(parsed.get("num-cores", 1)), parsed)
    return AskedMachines(tvm_split.Cluster((device,), launcher=InProcess()), {})


def _target(text: str) -> dict[str, Any]:
    """Return the TVM target of ``--target``: a JSON object, or only the name of a kind.

    Raises:
        WrongUseError: the text begins with a brace and is not valid JSON.
    """
    if not text.lstrip().startswith("{"):
        return {"kind": text}
    try:
        return dict(loads(text))
    except ValueError as error:
        raise WrongUseError(f"{text!r} is not JSON: {error}", "--target") from error


def _merge(database: Path | None, other_folder: Path, json: bool) -> None:
    from tvm_split.compiler.tuning_folder import usable_folder

    folder = usable_folder(database)
    record_count = tvm_split.merge_databases(folder, other_folder)
    if json:
        print_json({"database": str(folder), "merged": str(other_folder), "records": record_count})
    else:
        print_unwrapped(f"{record_count} records of {other_folder} are now in {folder}")
