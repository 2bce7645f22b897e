"""Profiles of a model's pieces on the machines of a cluster, measured on each with the kernels that would run."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.targets import resolve_targets
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.errors import ProfileError
from tvm_split.measuring.ceilings import CeilingCode, Ceilings, ceiling_code
from tvm_split.measuring.kernel_calls import KernelCall, shared_weight_bytes
from tvm_split.measuring.machine_facts import MachineFacts, machine_facts
from tvm_split.measuring.machine_timing import HostTiming, MachineTimes
from tvm_split.measuring.store import Store, default_folder
from tvm_split.measuring.target_code import TargetCode, target_code
from tvm_split.model import Model
from tvm_split.planner.pieces import pieces_of, pieces_of_kernels
from tvm_split.planner.profile import (
    SHORTEST_SECONDS,
    ClusterProfile,
    MachineProfile,
    ModelPiece,
    PieceTime,
    StreamingCost,
)
from tvm_split.rpc_runtime.program.program import BlobSpec
from tvm_split.steps import StepProgress, Steps

DEFAULT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class MachineReport:
    """How many of a machine's distinct kernels were measured now, known from the cache, or are only estimated.

    ``problems`` says of estimated ones why; ``oldest_seconds`` is the age of the oldest time that was used.
    """

    machine: str
    measured: int
    cached: int
    estimated: int
    problems: tuple[str, ...]
    oldest_seconds: float


@dataclass(frozen=True)
class MeasuredCluster:
    """A profile, and how it came about. ``notes`` are about caches that could not be read."""

    profile: ClusterProfile
    reports: tuple[MachineReport, ...]
    notes: tuple[str, ...]


class ModelProfiler:
    """Times a model's pieces on clusters. What it compiles it keeps, so measuring again takes the measuring only.

    ``database`` are tuned kernels, as for `tvm_split.compile`.
    """

    def __init__(self, model: Model, database: str | Path | None = None) -> None:
        self._model = model
        self._tuned = open_database(database)
        self._codes: dict[str, TargetCode] = {}
        self._ceilings: dict[tuple[str, int], CeilingCode | None] = {}
        self._blobs = BlobFolder.temporary()
        self._libraries: dict[tuple[int, frozenset[str]], BlobSpec] = {}

    def measure(
        self,
        cluster: Cluster,
        *,
        refresh: bool = False,
        cache_folder: str | Path | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        on_progress: StepProgress | None = None,
    ) -> MeasuredCluster:
        """What each piece takes on each machine, by itself and while its host's others compute.

        The links and the cost of transfers are not measured here: ``links`` is empty, ``streaming`` costs nothing.

        Args:
            refresh: measure everything again, whatever is cached.
            cache_folder: where times are kept; by default `tvm_split.measuring.store.default_folder`.
            timeout_seconds: the longest wait for a worker; also limits how long a machine's kernels are timed.

        Raises:
            WorkerError: a worker cannot be reached, or cannot run its machine's target.
            CompileError: a target cannot be compiled for.
            ProfileError: a machine's kernels cannot be timed in this process.
        """
        try:
            steps = Steps(on_progress)
            targets = resolve_targets(cluster, cluster.machine_names)
            machines = machine_facts(cluster, targets, timeout_seconds)
            _require_runnable(cluster, machines)
            self._compile(machines, steps)
            times = self._times(machines, Path(cache_folder) if cache_folder is not None else default_folder())
            if not refresh:
                self._recall(times, cluster, timeout_seconds, steps)
            self._measure(times, cluster, timeout_seconds, steps)
            steps.done()
            return _measured_cluster(self._model, times)
        finally:
            cluster.release()

    def _compile(self, machines: Sequence[MachineFacts], steps: Steps) -> None:
        """The model's kernels for each distinct target, by `_target_key`."""
        missing = {_target_key(each): each for each in machines if _target_key(each) not in self._codes}
        steps.total = len(missing)
        for key, machine in missing.items():
            steps.begin(f"compiling {self._model.name} for {machine.name}")
            self._codes[key] = target_code(self._model, machine.target, self._tuned)

    def _times(self, machines: Sequence[MachineFacts], folder: Path) -> list[MachineTimes]:
        found = []
        for machine in machines:
            key = (_target_key(machine), machine.threads)
            if key not in self._ceilings:
                self._ceilings[key] = None if machine.has_gpu else ceiling_code(machine.target, machine.threads)
            others = [each for each in machines if each.host == machine.host and each is not machine]
            companions = tuple(sorted(f"{each.name} with {each.threads} threads" for each in others))
            cache = Store(folder, machine.identity)
            found.append(MachineTimes(machine, self._codes[key[0]], self._ceilings[key], cache, companions))
        return found

    def _recall(self, times: Sequence[MachineTimes], cluster: Cluster, timeout_seconds: float, steps: Steps) -> None:
        """Take from the caches what one fresh measurement of each machine does not contradict."""

        def library_of(each: MachineTimes, digest: str) -> BlobSpec:
            return self._library(id(each.code), {digest}, partial(each.code.build, {digest}))

        for each in times:
            each.recall()
        known = [each for each in times if each.checked_kernel is not None]
        steps.total += len(known)
        if known:
            HostTiming(known, cluster, timeout_seconds, steps.begin).check(library_of, self._blobs)

    def _measure(self, times: Sequence[MachineTimes], cluster: Cluster, timeout_seconds: float, steps: Steps) -> None:
        """Time what is lacking; hosts at the same time."""
        hosts: dict[str, list[MachineTimes]] = {}
        for each in times:
            hosts.setdefault(each.machine.host, []).append(each)
        timings = [HostTiming(group, cluster, timeout_seconds, steps.begin) for group in hosts.values()]
        wanted: dict[int, set[str]] = {}
        for timing, group in zip(timings, hosts.values(), strict=True):
            for each in group:
                wanted.setdefault(id(each.code), set()).update(timing.wanted[each.machine.name])
        to_build = {id(each.code): each.code for each in times if wanted[id(each.code)]}
        ceilings = {id(each.ceilings): each.ceilings for each in times if each.lacks_ceilings and each.ceilings}
        steps.total += bool(to_build or ceilings) + sum(timing.steps for timing in timings)
        if not to_build and not ceilings:
            return
        steps.begin("building kernels")
        libraries = {
            key: self._library(key, wanted[key], partial(code.build, wanted[key])) for key, code in to_build.items()
        }
        ceiling_libraries = {key: self._library(key, (), code.build) for key, code in ceilings.items()}
        if cluster.kind != "in_process":
            cluster.endpoints()  # starts local workers, once
            with ThreadPoolExecutor(len(timings)) as pool:
                list(pool.map(lambda timing: timing.measure(libraries, ceiling_libraries, self._blobs), timings))
        else:
            for timing in timings:
                timing.measure(libraries, ceiling_libraries, self._blobs)

    def _library(self, code: int, wanted: Collection[str], build: Callable[[BlobFolder], BlobSpec]) -> BlobSpec:
        key = (code, frozenset(wanted))
        if key not in self._libraries:
            self._libraries[key] = build(self._blobs)
        return self._libraries[key]


def model_digest(model: Model) -> str:
    """The SHA-256 of a model's graph and shapes, without the values of its weights."""
    content = {
        "inputs": [asdict(each) for each in model.inputs],
        "outputs": [asdict(each) for each in model.outputs],
        "layers": dict(model.layers),
        "graph": model.module.script(show_meta=False),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _require_runnable(cluster: Cluster, machines: Sequence[MachineFacts]) -> None:
    for machine in machines:
        if cluster.kind == "in_process" and machine.target["kind"] != "llvm":
            raise ProfileError(
                f"machine {machine.name!r} has the target {dict(machine.target)}, and in one process only the CPU can "
                "be timed; start a worker on the machine and name it in a cluster file"
            )


def _target_key(machine: MachineFacts) -> str:
    return json.dumps(dict(machine.target), sort_keys=True)


def _measured_cluster(model: Model, times: Sequence[MachineTimes]) -> MeasuredCluster:
    codes = {id(each.code): each.code for each in times}
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
        model_digest=model_digest(model),
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
        machines=tuple(_machine_profile(each, pieces, calls[id(each.code)]) for each in times),
        links=(),
        doubts=tuple(dict.fromkeys(each.doubt for each in times if each.doubt)),
    )
    notes = tuple(dict.fromkeys(note for each in times for note in each.cache.notes))
    return MeasuredCluster(profile, tuple(_report(each) for each in times), notes)


def _calls_of_pieces(count: int, code: TargetCode, payers: Sequence[int]) -> list[list[KernelCall]]:
    found: list[list[KernelCall]] = [[] for _ in range(count)]
    for call, payer in zip(code.calls, payers, strict=True):
        found[payer].append(call)
    return found


def _machine_profile(
    times: MachineTimes, pieces: Sequence[Sequence[str]], calls: Sequence[Sequence[KernelCall]]
) -> MachineProfile:
    ceilings = _ceilings(times)
    known = [digest for digest in times.code.distinct if digest in times.known]
    alone = sum(times.alone[digest].seconds for digest in known)
    slower = sum(times.contended[digest].seconds for digest in known) / alone if known else 1.0

    def seconds(call: KernelCall) -> tuple[float, float]:
        if call.digest in times.known:
            return times.alone[call.digest].seconds, times.contended[call.digest].seconds
        roofline = max(
            call.kernel.operations / ceilings.operations_per_second, call.kernel.moved_bytes / ceilings.bytes_per_second
        )
        return roofline, roofline * slower

    def piece_time(own: Sequence[KernelCall]) -> PieceTime:
        found = [seconds(call) for call in own]
        by_itself, in_company = (max(sum(each[place] for each in found), SHORTEST_SECONDS) for place in (0, 1))
        all_known = all(call.digest in times.known for call in own)
        # Company never helps: what took longer alone was disturbed then.
        return PieceTime(min(by_itself, in_company), in_company, "measured" if all_known else "estimated")

    machine = times.machine
    return MachineProfile(
        machine=machine.name,
        target=machine.target,
        threads=machine.threads,
        hostname=machine.hostname,
        memory_free_bytes=machine.memory_free_bytes,
        operations_per_second=ceilings.operations_per_second,
        bytes_per_second=ceilings.bytes_per_second,
        streaming=StreamingCost(),
        pieces={piece[0]: piece_time(own) for piece, own in zip(pieces, calls, strict=True)},
        measured_at=_oldest(times),
    )


def _ceilings(times: MachineTimes) -> Ceilings:
    """Operations and bytes a second: measured, or where there is no measure what the best kernel reached."""
    code = times.ceilings
    if code is not None and not times.lacks_ceilings:
        return code.ceilings({digest: each.best_seconds for digest, each in times.ceiling_times.items()})
    reached = [
        (call.kernel.operations / times.alone[digest].best_seconds, call.kernel.moved_bytes / seconds)
        for digest, call in times.code.distinct.items()
        if digest in times.alone and (seconds := times.alone[digest].best_seconds)
    ]
    if not reached:
        reasons = "; ".join(sorted(set(times.problems.values()))) or "none of its kernels can be timed"
        raise ProfileError(f"nothing could be measured on machine {times.machine.name!r}: {reasons}")
    return Ceilings(*(max(rates) for rates in zip(*reached, strict=True)))


def _oldest(times: MachineTimes) -> float:
    used: list[dict[str, Any]] = [times.alone, times.contended, times.ceiling_times]
    return min((each.measured_at for found in used for each in found.values()), default=time.time())


def _report(times: MachineTimes) -> MachineReport:
    return MachineReport(
        machine=times.machine.name,
        measured=len(times.known & times.measured),
        cached=len(times.known - times.measured),
        estimated=len(times.code.distinct) - len(times.known),
        problems=tuple(sorted(set(times.problems.values()))),
        oldest_seconds=max(0.0, time.time() - _oldest(times)),
    )
