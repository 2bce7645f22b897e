"""Profiles a model's pieces on the machines of a cluster, with the kernels that would run there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.shared_cores import shared_cores
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.model import Model
from tvm_split.planner.graph import piece_edges, pieces_of, pieces_of_kernels
from tvm_split.planner.profile import ClusterProfile, MachineProfile, ModelPiece, StreamingCost
from tvm_split.profiling.cluster_timing import DEFAULT_TIMEOUT_SECONDS, CallSeconds, ClusterTiming
from tvm_split.profiling.kernels import KernelCall, TargetCode, shared_weight_bytes, target_code
from tvm_split.profiling.link_probing import probe_links
from tvm_split.profiling.machine_times import MachineTimes
from tvm_split.profiling.store import default_folder
from tvm_split.steps import StepProgress


def profile_model(
    model: Model,
    cluster: Cluster,
    *,
    database: str | Path | None = None,
    refresh: bool = False,
    cache_folder: str | Path | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    on_progress: StepProgress | None = None,
) -> MeasuredCluster:
    """Measure the pieces of a model on every machine, then the links, with the tensor sizes of this model's cuts.

    Arguments and errors are those of `ClusterTiming.measure` and `probe_links`. Measurements are kept in
    ``cache_folder``, by default in the user's cache. ``database`` is the folder of tuned kernels.
    """
    folder = default_folder() if cache_folder is None else Path(cache_folder)
    with cluster.start() as workers:
        measured = measured_pieces(
            model,
            workers,
            model_timing(model, database),
            refresh=refresh,
            cache_folder=folder,
            timeout_seconds=timeout_seconds,
            on_progress=on_progress,
        )
        profile = measured.profile
        edges = piece_edges(model.graph, [piece.layers for piece in profile.pieces])
        probe = probe_links(
            workers,
            sorted({int(edge.bytes) for edge in edges}),
            timeout_seconds=timeout_seconds,
            on_progress=on_progress,
            cache_folder=folder,
            refresh=refresh,
        )
    machines = tuple(replace(machine, streaming=probe.streaming[machine.machine]) for machine in profile.machines)
    return replace(measured, profile=replace(profile, machines=machines, links=probe.links))


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


@dataclass(frozen=True)
class MeasuredCluster:
    """A profile, and how each machine's times were obtained."""

    profile: ClusterProfile
    reports: tuple[MachineReport, ...]


def model_timing(model: Model, database: str | Path | None = None) -> ClusterTiming:
    """Return what times a model's kernels on clusters. It compiles once, with the tuned kernels of ``database``."""
    tuned = open_database(database)
    return ClusterTiming(model.name, lambda machine: target_code(model, machine.target, tuned))


def measured_pieces(model: Model, cluster: Cluster, timing: ClusterTiming, **how: Any) -> MeasuredCluster:
    """Measure the time of each piece on each machine, alone and under contention from others of its host.

    Links and transfer costs are not measured here: ``links`` is empty and ``streaming`` costs nothing. The arguments
    ``how``, and errors, are those of `ClusterTiming.measure`.
    """
    return _measured_cluster(model, cluster, timing.measure(cluster, **how))


def _measured_cluster(model: Model, cluster: Cluster, times: Sequence[MachineTimes]) -> MeasuredCluster:
    codes = {id(machine_times.code): machine_times.code for machine_times in times}
    pieces = pieces_of(model.graph, [call.kernel.layers for code in codes.values() for call in code.calls])
    payers = {
        key: pieces_of_kernels(
            pieces, [call.kernel.layers for call in code.calls], [call.consumers for call in code.calls]
        )
        for key, code in codes.items()
    }
    calls = {key: _calls_of_pieces(len(pieces), code, payers[key]) for key, code in codes.items()}
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
            _machine_profile(machine_times, pieces, calls[id(machine_times.code)]) for machine_times in times
        ),
        links=(),
        doubts=tuple(dict.fromkeys(machine_times.doubt for machine_times in times if machine_times.doubt)),
        shared_cores=shared_cores(
            cluster,
            {
                machine_times.machine.name: replace(machine_times.machine.cores, host=machine_times.machine.host)
                for machine_times in times
            },
        ),
    )
    return MeasuredCluster(profile, tuple(_report(machine_times) for machine_times in times))


def _calls_of_pieces(count: int, code: TargetCode, payers: Sequence[int]) -> list[list[KernelCall]]:
    piece_calls: list[list[KernelCall]] = [[] for _ in range(count)]
    for call, payer in zip(code.calls, payers, strict=True):
        piece_calls[payer].append(call)
    return piece_calls


def _machine_profile(
    times: MachineTimes, pieces: Sequence[Sequence[str]], calls: Sequence[Sequence[KernelCall]]
) -> MachineProfile:
    seconds = CallSeconds(times)
    machine = times.machine
    return MachineProfile(
        machine=machine.name,
        target=machine.target,
        threads=machine.threads,
        hostname=machine.hostname,
        memory_free_bytes=machine.memory_free_bytes,
        operations_per_second=seconds.ceilings.operations_per_second,
        bytes_per_second=seconds.ceilings.bytes_per_second,
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
