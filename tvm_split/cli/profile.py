"""``tvm-split profile``: time the kernels of a model here, or its pieces on a cluster."""

from pathlib import Path

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.source import MachineOptions, ModelOptions
from tvm_split.display.view import write
from tvm_split.placement.request import PlanRequest
from tvm_split.progress import step_progress


def profile(
    model: options.ModelArgument,
    shapes: ModelOptions,
    machines: MachineOptions,
    rounds: int | None = option(None, "Runs to take the medians of (default: 10).", minimum=1),
    calls: bool = option(False, "Every call in its order, instead of equal kernels together."),
    refresh: bool = option(False, "On a cluster: measure again what is known already."),
    database: Path | None = option(
        None,
        "The folder of tuned kernels (default: $TVM_SPLIT_DATABASE, else tvm-split/tuning in the user's cache).",
        metavar="FOLDER",
        file_okay=False,
    ),
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
