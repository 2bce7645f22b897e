"""Profiles a model: its pieces on the machines of a cluster, or every kernel of a compiled bundle on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.execution.kernel_timer import undisturbed_seconds
from tvm_split.arguments import BundleLike, ModelLike, as_bundle, as_model
from tvm_split.cluster.cluster import Cluster, shared_cores
from tvm_split.compiler.stage import Kernel
from tvm_split.compiler.targets import runs_here
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.compiler.verification import verification_inputs
from tvm_split.errors import ProfileError
from tvm_split.model import Model
from tvm_split.parameters import Count
from tvm_split.placement.estimate import Roofline
from tvm_split.placement.graph import piece_edges, pieces_of, pieces_of_kernels
from tvm_split.placement.profile import ClusterProfile, MachineProfile, ModelPiece, StreamingCost
from tvm_split.profiling.kernel_timing import DEFAULT_TIMEOUT_SECONDS, time_kernels
from tvm_split.profiling.kernels import KernelCall, TargetCode, shared_weight_bytes, target_code
from tvm_split.profiling.link_probing import probe_links
from tvm_split.profiling.machine_times import CallSeconds, MachineTimes
from tvm_split.profiling.store import default_folder, entry_key
from tvm_split.progress import StepProgress, Steps
from tvm_split.units import Shown

LINKS = "links"
"""The key of what identifies the links in `ClusterProfile.kept`."""


def profile_model(
    model: Model,
    cluster: Cluster,
    *,
    database: str | Path | None = None,
    refresh: bool = False,
    measures: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    deadline: float = math.inf,
    on_progress: StepProgress | None = None,
) -> Measured:
    """Measure the pieces of a model on every machine, then the links, with the tensor sizes of this model's cuts.

    Arguments and errors are those of `time_kernels` and `probe_links`; ``database`` is the folder of tuned kernels.
    Links that are not known are measured in any case.
    """
    with cluster.start() as workers:
        how: dict[str, Any] = {
            "refresh": refresh,
            "cache_folder": default_folder(),
            "timeout_seconds": timeout_seconds,
            "on_progress": on_progress,
        }
        profile, reports = measured_pieces(model, workers, database, measures=measures, deadline=deadline, **how)
        edges = piece_edges(model.graph, [piece.layers for piece in profile.pieces])
        probe = probe_links(workers, sorted({int(edge.bytes) for edge in edges}), **how)
    machines = tuple(replace(machine, streaming=probe.streaming[machine.machine]) for machine in profile.machines)
    links = entry_key(links=[asdict(replace(link, measured_at=0.0)) for link in probe.links])
    return replace(profile, machines=machines, links=probe.links, kept={**profile.kept, LINKS: links}), reports


@dataclass(frozen=True)
class MachineReport:
    """Number of a machine's distinct kernels that were measured now, known from the cache, or only estimated.

    ``problems`` says why kernels were estimated; ``oldest_seconds`` is the age of the oldest time that was used.
    """

    machine: str
    measured: int
    cached: int
    estimated: int
    problems: tuple[str, ...]
    oldest_seconds: float


Measured = tuple[ClusterProfile, tuple[MachineReport, ...]]
"""A profile, and how each machine's times were obtained."""


def measured_pieces(model: Model, cluster: Cluster, database: str | Path | None = None, **how: Any) -> Measured:
    """Measure the time of each piece on each machine, alone and under contention from others of its host.

    Links and transfer costs are not measured here: ``links`` is empty and ``streaming`` costs nothing. ``database`` is
    the folder of tuned kernels. The arguments ``how``, and errors, are those of `time_kernels`.
    """
    tuned = open_database(database)
    times = time_kernels(model.name, lambda machine: target_code(model, machine.target, tuned), cluster, **how)
    codes = {id(machine_times.code): machine_times.code for machine_times in times}
    pieces = pieces_of(model.graph, [call.kernel.layers for code in codes.values() for call in code.calls])
    calls = {key: _calls_of_pieces(pieces, code) for key, code in codes.items()}
    seconds = [CallSeconds(machine_times) for machine_times in times]
    cores = {one.machine.name: replace(one.machine.cores, host=one.machine.host) for one in times}
    shared = shared_cores(cluster, cores)
    kept: dict[str, float | str] = {"shared_cores": entry_key(shared_cores=[asdict(group) for group in shared])}
    for one in times:
        kept[one.name] = entry_key(identity=dict(one.machine.identity))
        kept.update({f"{one.name} {key}": kept_seconds for key, kept_seconds in one.kept.items()})
    profile = ClusterProfile(
        model=model.name,
        model_digest=model.graph_digest,
        pieces=tuple(
            ModelPiece(
                name=piece[0],
                layers=piece,
                weight_bytes=max(shared_weight_bytes(by_piece[index]) for by_piece in calls.values()),
                activation_bytes=max(
                    (call.activation_bytes for by_piece in calls.values() for call in by_piece[index]), default=0
                ),
            )
            for index, piece in enumerate(pieces)
        ),
        machines=tuple(
            _machine_profile(machine_times, machine_seconds, pieces, calls[id(machine_times.code)])
            for machine_times, machine_seconds in zip(times, seconds, strict=True)
        ),
        links=(),
        doubts=tuple(filter(None, dict.fromkeys((*(one.doubt for one in times), *(one.estimates for one in seconds))))),
        shared_cores=shared,
        kept=kept,
    )
    return profile, tuple(_report(machine_times) for machine_times in times)


def _calls_of_pieces(pieces: Sequence[Sequence[str]], code: TargetCode) -> list[list[KernelCall]]:
    layers, consumers = [call.kernel.layers for call in code.calls], [call.consumers for call in code.calls]
    piece_calls: list[list[KernelCall]] = [[] for _ in pieces]
    for call, piece in zip(code.calls, pieces_of_kernels(pieces, layers, consumers), strict=True):
        piece_calls[piece].append(call)
    return piece_calls


def _machine_profile(
    times: MachineTimes, seconds: CallSeconds, pieces: Sequence[Sequence[str]], calls: Sequence[Sequence[KernelCall]]
) -> MachineProfile:
    machine = times.machine
    return MachineProfile(
        machine=machine.name,
        target=machine.target,
        threads=machine.threads,
        hostname=machine.hostname,
        memory_free_bytes=machine.memory_free_bytes,
        operations_per_second=seconds.peaks.operations_per_second,
        bytes_per_second=seconds.peaks.bytes_per_second,
        streaming=StreamingCost(),
        pieces={piece[0]: seconds.of(piece_calls) for piece, piece_calls in zip(pieces, calls, strict=True)},
        measured_at=_oldest(times),
        cores=0 if machine.has_gpu else min(machine.threads, machine.cores.count or machine.threads),
        bus=machine.bus,
    )


def _oldest(times: MachineTimes) -> float:
    used = (*times.alone.values(), *times.contended.values())
    return min((cached.measured_at for cached in used), default=time.time())


def _report(times: MachineTimes) -> MachineReport:
    return MachineReport(
        machine=times.machine.name,
        measured=len(times.known & times.measured),
        cached=len(times.known - times.measured),
        estimated=len(times.code.distinct) - len(times.known),
        problems=tuple(sorted(set(times.problems.values()))),
        oldest_seconds=max(0.0, time.time() - _oldest(times)),
    )


ROUNDS = 10
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class KernelProfile:
    """Time of one kernel call."""

    kernel: Kernel
    seconds: float


@dataclass(frozen=True, repr=False)
class ModelProfile(Shown):
    """Times of every kernel of a model on one machine with ``threads`` threads, one input at a time.

    ``seconds`` is the time of a whole run; ``untimed`` is the number of kernel calls that could not be timed.
    """

    model: str
    threads: int
    seconds: float
    kernels: tuple[KernelProfile, ...]
    untimed: int
    peaks: Roofline

    @property
    def kernel_seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def other_seconds(self) -> float:
        """Seconds of a run besides the timed kernels: calls, checks, untimed kernels.

        0 if the kernels, timed one by one, took longer than the whole.
        """
        return max(0.0, self.seconds - self.kernel_seconds)

    def share_of_time(self, seconds: float) -> float:
        """Return ``seconds`` as a share of a run, or of the sum of all kernels if that is longer."""
        return seconds / max(self.seconds, self.kernel_seconds)

    @property
    def operations(self) -> float:
        return sum(kernel.kernel.operations for kernel in self.kernels)

    def share_of_peak(self, operations: float, seconds: float) -> float:
        """Return the share of the measured multiply-add peak; over 1 if an algorithm saves operations."""
        return operations / seconds / self.peaks.operations_per_second


def profile(
    model: ModelLike,
    bundle: BundleLike,
    threads: Count,
    *,
    database: str | Path | None = None,
    rounds: Count = ROUNDS,
    on_progress: StepProgress | None = None,
) -> ModelProfile:
    """Run a bundle of one stage in this process, and time each of the model's kernels, as planning does.

    Kernels that fail, or may not end on made-up values, are counted in ``untimed``.

    Args:
        database: the tuned kernels with which the bundle was compiled.

    Raises:
        ProfileError: the bundle has several stages or is for another kind of machine, or the model has no inputs to
            run on.
    """
    model, bundle = as_model(model), as_bundle(bundle)
    if len(bundle.program.stages) != 1:
        raise ProfileError(f"the bundle has {len(bundle.program.stages)} stages; profile one that has the whole model")
    (stage,) = bundle.program.stages
    target = bundle.plan.machine(stage.machine).target
    if not runs_here(target):
        raise ProfileError(
            f"{stage.name} is compiled for {dict(target)}, which this machine cannot run; profile it on its machine"
        )
    inputs = verification_inputs(model)
    if inputs is None:
        raise ProfileError(
            f"model {model.name!r} takes integers or booleans, for which random values may be out of range; give "
            "example inputs"
        )
    steps = Steps(on_progress)
    steps.total = WARM_UP_ROUNDS + rounds
    wholes: list[float] = []
    with InProcessRunner(bundle.program, bundle.blob_path, threads) as pipeline:
        for _ in range(WARM_UP_ROUNDS + rounds):
            steps.begin("timing the whole")
            before = pipeline.statistics()[0].compute_seconds
            pipeline.run(inputs)
            wholes.append(pipeline.statistics()[0].compute_seconds - before)
    steps.done()
    tuned, this_process = open_database(database), Cluster.in_process(1, threads)
    code = target_code(model, target, tuned)
    (times,) = time_kernels(model.name, lambda _: code, this_process, refresh=True, on_progress=on_progress)
    calls = times.code.calls
    timed = [call for call in calls if call.digest in times.alone]
    return ModelProfile(
        model.name,
        threads,
        undisturbed_seconds([(seconds, seconds) for seconds in wholes[WARM_UP_ROUNDS:]]),
        tuple(KernelProfile(call.kernel, times.alone[call.digest].seconds) for call in timed),
        len(calls) - len(timed),
        CallSeconds(times).peaks,
    )
