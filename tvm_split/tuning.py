"""Tunes the kernels of a model's parts on the machines that will run them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import InstanceOf
from tvm import tirx
from tvm_ffi.structural import StructuralKey

from relay_passes.ir import bindings_of, main_function, operator_name
from rpc_runtime.errors import InputError, TvmSplitError
from rpc_runtime.hardware import own_cores
from rpc_runtime.processes import before_end, cleared
from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.tracker import listed_servers
from schedules import machine_of, templates_of
from schedules.blocks import without_symbol
from schedules.tuning import errors
from schedules.tuning.database import DatabaseWriter
from schedules.tuning.devices import Tracker
from schedules.tuning.measuring import Effort, Measurer
from schedules.tuning.tuner import FixedKernel, KernelResult, TunableKernel, Tuner, TuningProgress
from tvm_split.arguments import ClusterLike, ModelLike, as_cluster, as_model
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.cuda_code import tuning_needs
from tvm_split.compiler.linking import link_command
from tvm_split.compiler.precision import in_precision
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import runs_here, tvm_target
from tvm_split.compiler.tuning_folder import usable_folder
from tvm_split.errors import TuningError, TuningUseError
from tvm_split.model import Model
from tvm_split.parameters import Natural, Seconds, Whole
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.planning.plan import plan as make_plan
from tvm_split.profiling.kernels import is_safe_to_time
from tvm_split.units import Shown


@dataclass(frozen=True, repr=False)
class TuningReport(Shown):
    """The result of a tuning run: one result per kernel with choices, by decreasing share of the time.

    ``fixed_seconds`` is the time of all other kernels in one run of the model. ``unmeasured`` of these could not be
    timed, and are not in it. ``trials`` is the number of trials in the database now, with those of earlier runs;
    ``devices`` is the number of devices at the end.
    """

    model: str
    database: Path
    machines: tuple[str, ...]
    target: Mapping[str, Any]
    kernels: tuple[KernelResult, ...]
    fixed_seconds: float
    unmeasured: int
    trials: int
    devices: int

    @property
    def default_seconds(self) -> float:
        """Seconds of all measured kernels in one run of the model, with the default choices."""
        return self.fixed_seconds + sum(kernel.count * (kernel.default_seconds or 0.0) for kernel in self.kernels)

    @property
    def tuned_seconds(self) -> float:
        """Seconds of all measured kernels in one run of the model, with the fastest choices."""
        return self.fixed_seconds + sum(kernel.count * (kernel.tuned_seconds or 0.0) for kernel in self.kernels)


def tune(
    model: ModelLike,
    where: Plan | ClusterLike,
    *,
    database: str | Path | None = None,
    trials: Natural = 200,
    machine: str | None = None,
    tracker: str | None = None,
    key: str | None = None,
    seed: Whole = 0,
    effort: InstanceOf[Effort] | None = None,
    device_timeout_seconds: Seconds = 30.0,
    on_progress: Callable[[TuningProgress], None] | None = None,
) -> TuningReport:
    """Search better choices for the kernels of a plan's parts, and keep those that are faster than the default.

    Args:
        model: what `load_model` returned.
        where: a plan, or a cluster (or its location) for which a plan is made automatically. The machines to tune must
            have one target; if they have several, ``machine`` selects one.
        database: the folder for records, shared with `compile`; by default that of `tuning_folder`.
        trials: the number of candidates to measure over all kernels, including those already in the database; it is
            divided by the kernels' share of the time. 0 measures the defaults only.
        tracker: ``"host:port"`` of a TVM RPC tracker, to measure on all its devices of ``key``; without it kernels
            are measured on this machine.
        seed: makes the search repeatable.
        device_timeout_seconds: the longest wait for a device that answers.
        on_progress: called after every batch of measurements. An exception that it raises ends the run. Whatever ends
            a run, the same call resumes it.

    Raises:
        TuningUseError: the arguments do not fit together.
        TuningError: a target cannot be tuned, there is no device, or the database cannot be used.
    """
    model, where = as_model(model), where if isinstance(where, Plan) else as_cluster(where)
    folder = usable_folder(database)
    where_measured = _tracker(tracker, key, device_timeout_seconds)
    if isinstance(where, Plan):
        planned = where
    else:  # planning takes long
        ask_first(where, folder, tracker, key, device_timeout_seconds)
        planned = make_plan(model, where)
    machines = _machines_to_tune(planned, machine)
    target = machines[0].target
    built_for = tvm_target(target)
    with _errors():
        if where_measured is None:
            _require_measurable_here(target)
        linker = link_command(target, "a kernel")
        gpu = tuning_needs(target)
        with (
            DatabaseWriter(folder) as writer,
            ScratchFolder("tuning") as scratch,
            Measurer(built_for, scratch.path, where_measured, effort, linker, gpu, own_cores().count) as measurer,
            ExitStack() as until_end,
        ):
            before_end(measurer, measurer.close)
            until_end.callback(cleared, measurer)
            # Prepare the kernels only after a device of the right kind was found, because it takes long.
            kernels, fixed = kernels_to_tune(model, planned, [tuned.name for tuned in machines], target)
            run = Tuner(kernels, fixed, built_for, measurer, writer, seed=seed, on_progress=on_progress)
            results = run.run(trials)
            return TuningReport(
                model=model.name,
                database=folder,
                machines=tuple(tuned_machine.name for tuned_machine in machines),
                target=target,
                kernels=results,
                fixed_seconds=run.fixed_seconds,
                unmeasured=run.unmeasured,
                trials=sum(kernel.trials for kernel in results),
                devices=measurer.devices,
            )


def ask_first(
    cluster: Cluster, folder: Path, tracker: str | None, key: str | None, device_timeout_seconds: float = 30.0
) -> None:
    """Check before planning whether `tune` can measure kernels for the cluster and write them.

    Raises:
        TuningUseError: a tracker is given without a key, a key without a tracker, or the address is invalid.
        TuningError: the tracker has no device of the key, the common CUDA target of the machines cannot be tuned, or
            the database folder cannot be written now.
    """
    measured = _tracker(tracker, key, device_timeout_seconds)
    targets = [machine.target for machine in cluster.machines]
    first = targets[0]
    # With several targets, the plan decides which one is tuned, and there may be no plan yet.
    with _errors():
        if first is not None and first["kind"] == "cuda" and all(target == first for target in targets):
            if measured is None:
                _require_measurable_here(first)
            tuning_needs(first)
        DatabaseWriter(folder).close()
        if measured is not None:
            measured.wait_for_devices()


def _require_measurable_here(target: Mapping[str, Any]) -> None:
    if target["kind"] == "cuda":
        raise TuningError(
            f"kernels for CUDA ({dict(target)}) are measured through a tracker alone: start one (`tvm-split tracker "
            "--listen 0.0.0.0:9190`), start `tvm-split worker --tracker HOST:9190 --key KEY --insecure-tuning` on "
            f"a machine with a GPU of {target.get('arch')}, and give both: --tracker HOST:9190 --key KEY"
        )
    if not runs_here(target):
        raise TuningError(
            f"this machine cannot run kernels for {dict(target)}; start a TVM RPC server on such a machine and "
            "give its tracker and key"
        )


def merge_databases(into: str | Path, other: str | Path) -> int:
    """Copy the records of another tuning folder that ``into`` lacks; return their number.

    Raises:
        TuningError: one of the two folders cannot be used.
    """
    with _errors(), DatabaseWriter(into) as writer:
        return writer.merge(other)


def kernels_to_tune(
    model: Model, plan: Plan, machines: Sequence[str], target: Mapping[str, Any]
) -> tuple[tuple[TunableKernel, ...], tuple[FixedKernel, ...]]:
    """Return the distinct kernels of these machines' stages: those with choices, and those without.

    Kernels without choices that may not terminate on random data are left out.
    """
    whole = partition(in_precision(model, plan.precision), plan)
    compiler, built_for = StageCompiler(target), tvm_target(target)
    templates, machine = templates_of(built_for), machine_of(built_for)
    counts: Counter[StructuralKey] = Counter()
    called: dict[StructuralKey, tuple[str, tirx.PrimFunc]] = {}
    for stage, computation in whole.parts:
        if set(stage.machines) & set(machines):
            modules = compiler.lower(computation.function)
            bound = (binding.value for binding in bindings_of(main_function(modules["fuse"])))
            calls = (str(value.args[0].name_hint) for value in bound if operator_name(value) == "relax.call_tir")
            for name, count in Counter(calls).items():
                workload = StructuralKey(without_symbol(modules["fuse"][name]))
                counts[workload] += count
                called.setdefault(workload, (name, modules["schedule"][name]))
    tunable: list[TunableKernel] = []
    fixed: list[FixedKernel] = []
    for workload, (name, scheduled) in called.items():
        function, count = workload.key, counts[workload]
        template = next((known for known in templates if known.space(function, machine) is not None), None)
        if template is not None:
            tunable.append(TunableKernel(name, function, template, count))
        elif is_safe_to_time(function):
            fixed.append(FixedKernel(function, scheduled, count))
    return tuple(tunable), tuple(fixed)


def _machines_to_tune(plan: Plan, machine: str | None) -> list[PlannedMachine]:
    """Return the machines to tune, all of one target: those of the plan, or those with the named machine's target."""
    used = [planned for planned in plan.machines if any(planned.name in stage.machines for stage in plan.stages)]
    if machine is not None:
        named = plan.machine(machine)
        return [planned for planned in used if dict(planned.target) == dict(named.target)]
    targets = {str(sorted(planned.target.items(), key=str)): planned for planned in used}
    if len(targets) > 1:
        listed = "; ".join(f"{planned.name}: {dict(planned.target)}" for planned in targets.values())
        raise TuningUseError(f"the machines have different targets ({listed}); tune one after the other, by its name")
    return used


def _tracker(address: str | None, key: str | None, device_timeout_seconds: float) -> Tracker | None:
    if address is None:
        if key is not None:
            raise TuningUseError(f"key {key!r} was given without a tracker; give both or none")
        return None
    if not key:
        raise TuningUseError(f"tracker {address!r} was given without a key; give the one its servers were started with")
    try:
        where = Address.callable(address)
    except InputError as error:
        raise TuningUseError(f"tracker {address!r}: {error}") from None
    return tracker_at(where, key, device_timeout_seconds=device_timeout_seconds)


def tracker_at(address: Address, key: str, **options: float) -> Tracker:
    """Return the devices of one key at a tracker; ``options`` are timeouts of `schedules.tuning.devices.Tracker`."""

    def list_servers() -> list[tuple[str, bool, str]]:
        try:
            servers = listed_servers(address)
        except TvmSplitError as error:
            raise errors.DeviceError(str(error)) from error
        # TVM's own servers do not report a state as this project's workers do.
        return [
            (server.key, server.registration.tunes, server.registration.state)
            if server.registration
            else (server.key, not server.is_invalid, "ready")
            for server in servers
        ]

    return Tracker(address.host, address.port, key, list_servers, **options)  # type: ignore[arg-type]


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of ``schedules.tuning`` to `tvm_split.errors.TuningError`."""
    try:
        yield
    except errors.TuningError as error:
        raise TuningError(str(error)) from error
