"""``tvm-split compile``, ``profile`` and ``tune``: compile the kernels of a model, time them, and improve them."""

from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.options import HIDDEN, WrongUseError, flags_named
from tvm_split.cli.source import AskedMachines, MachineOptions, ModelOptions, load_tvm, planned_once
from tvm_split.display.console import print_json, print_note, print_unwrapped, tuning_progress
from tvm_split.display.view import as_json, print_parts, view, write
from tvm_split.launchers.local import InProcess
from tvm_split.placement.request import DATABASE, PlanRequest
from tvm_split.progress import step_progress


def compile(
    model: options.ModelArgument,
    *,
    output: Path = options.output(..., "The folder for the bundle.", flag="--output -o"),
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    plan: Path | None = option(
        None, "A plan that `tvm-split plan --output` wrote; no worker is asked for it.", dir_okay=False
    ),
    no_verify: bool = option(False, "Do not compare the compiled stages with the source framework."),
    dump: Path | None = options.output(None, "Write the IR after every phase to this folder."),
    details: bool = option(False, "Also list the kernels of each stage."),
    json: bool = options.JSON,
) -> None:
    """Plan a model, compile each stage for its machine, verify the result, and write everything to a folder.

    Example: tvm-split compile net.onnx --plan plan.json --output bundle
    """
    tvm_split.Bundle.require_replaceable(output)
    if plan is not None:
        if machines != MachineOptions():
            raise WrongUseError("it says this already; leave the machines out", "--plan")
        with flags_named(PlanRequest):
            request.require_default("--plan says this already", [name for name in request.given if name != "database"])
        chosen_plan = tvm_split.Plan.load(plan)
        loaded = shapes.load(model, chosen_plan.inputs)
    else:
        asked = machines.asked(request)
        loaded = shapes.load(model)
        chosen_plan = planned_once(loaded, asked, request)
    database = request.database or chosen_plan.request.database
    bundle = tvm_split.compile(loaded, chosen_plan, verify=not no_verify, dump_folder=dump, database=database)
    bundle.save(output)
    if json:
        print_json({"folder": str(output), **as_json(bundle)})
    else:
        table, *notes = view(bundle, details=details)
        print_parts([table])
        for note in notes:
            print_note(str(note))
        elsewhere = any(machine.address is not None for machine in chosen_plan.machines)
        where = f" {machines.words}" if elsewhere else ""
        if plan is not None and elsewhere:
            check = f"`tvm-split deploy {output}{where}`"
            print_note(f"no worker was asked whether it is what the plan says: {check} does that, and runs nothing")
        print_note(f"written to {output}; `tvm-split run {output}{where}` runs it")


def profile(
    model: options.ModelArgument,
    shapes: ModelOptions,
    machines: MachineOptions,
    rounds: int | None = option(None, "Runs to take the medians of (default: 10).", minimum=1),
    calls: bool = option(False, "Every call in its order, instead of equal kernels together."),
    refresh: bool = option(False, "On a cluster: measure again what is known already."),
    database: Path | None = DATABASE,
    timeout: float = options.TIMEOUT,
    json: bool = options.JSON,
) -> None:
    """Time every kernel of a model on this machine, beside the machine's peak performance.

    With --cluster, --tracker or --workers: time the pieces of the model on each of these machines, alone and together.

    Example: tvm-split profile net.onnx --threads 4
    """
    if machines.is_elsewhere or machines.workers is not None:
        for is_given, flag in ((rounds is not None, "--rounds"), (calls, "--calls")):
            if is_given:
                raise WrongUseError("this is for one machine, without a cluster or --workers", flag)
        cluster = machines.asked(PlanRequest()).cluster
        loaded = shapes.load(model)
        from tvm_split.display.profile import ShownProfile
        from tvm_split.profiling.cluster_profile import profile_model

        with step_progress("profiling") as report:
            profiled, reports = profile_model(
                loaded, cluster, database=database, refresh=refresh, timeout_seconds=timeout, on_progress=report
            )
        write(ShownProfile(profiled, reports), json=json)
        return
    if refresh:
        raise WrongUseError("only what a cluster's machines took is kept; give --cluster or --workers", "--refresh")
    loaded = shapes.load(model)
    from tvm_split.profiling.cluster_profile import ROUNDS  # imported here, since it loads TVM

    this_host = tvm_split.Cluster.in_process(1, machines.threads)
    chosen_plan = tvm_split.plan(loaded, this_host, database=database)
    bundle = tvm_split.compile(loaded, chosen_plan, verify=False, database=database)
    with step_progress("timing") as report:
        threads = this_host.machines[0].threads
        times = tvm_split.profile(
            loaded, bundle, threads, database=database, rounds=rounds or ROUNDS, on_progress=report
        )
    write(times, json=json, details=calls)


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
    chosen_plan = planned_once(loaded, machines, request)
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
