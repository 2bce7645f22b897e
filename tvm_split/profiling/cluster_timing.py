"""Times kernels on the machines of a cluster: validates cached times with a check, and measures the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.execution.kernel_timer import InProcessKernels
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.compiler.machine_targets import resolve_targets
from tvm_split.errors import ProfileError
from tvm_split.planner.profile import SHORTEST_SECONDS, PieceTime
from tvm_split.profiling.host_timing import HostTiming, KernelSession, Libraries
from tvm_split.profiling.kernels import KernelCall, TargetCode
from tvm_split.profiling.machine_times import MachineTimes
from tvm_split.profiling.machines import MachineFacts, machine_facts
from tvm_split.profiling.peaks import CeilingCode, Ceilings, ceiling_code
from tvm_split.profiling.store import Store, default_folder
from tvm_split.steps import StepProgress, Steps

DEFAULT_TIMEOUT_SECONDS = 60.0


class ClusterTiming:
    """Times code on clusters. Keeps compiled code, so that a second measurement does not compile.

    ``code_of`` returns the code to time on a machine; it is called once per distinct target. ``name`` names the code in
    progress messages.
    """

    def __init__(self, name: str, code_of: Callable[[MachineFacts], TargetCode]) -> None:
        self._name = name
        self._code_of = code_of
        self._codes: dict[str, TargetCode] = {}
        self._ceilings: dict[tuple[str, int], CeilingCode | None] = {}
        self._libraries = Libraries()

    def measure(
        self,
        cluster: Cluster,
        *,
        refresh: bool = False,
        cache_folder: str | Path | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        on_progress: StepProgress | None = None,
    ) -> list[MachineTimes]:
        """Measure the time of each kernel on each machine, alone and under contention from others of its host.

        Args:
            refresh: measure everything again, whatever is cached.
            cache_folder: where times are kept; by default `tvm_split.profiling.store.default_folder`.
            timeout_seconds: the longest wait for a worker; also limits how long a machine's kernels are timed.

        Raises:
            WorkerError: a worker cannot be reached, or cannot run its machine's target.
            CompileError: a target cannot be compiled for.
            ProfileError: a machine's kernels cannot be timed in this process.
        """
        with cluster.start() as workers:
            steps = Steps(on_progress)
            machines = machine_facts(workers, resolve_targets(workers, workers.machine_names))
            _require_runnable(workers, machines)
            self._compile(machines, steps)
            times = self._times(machines, Path(cache_folder) if cache_folder is not None else default_folder())
            hosts: dict[str, list[MachineTimes]] = {}
            for machine_times in times:
                hosts.setdefault(machine_times.machine.host, []).append(machine_times)
            opened = partial(open_session, workers, timeout_seconds)
            timings = [
                HostTiming(group, opened, self._libraries, timeout_seconds, steps.begin) for group in hosts.values()
            ]
            if not refresh:
                for machine_times in times:
                    machine_times.recall()
                steps.total += sum(machine_times.checked_kernel is not None for machine_times in times)
                for timing in timings:
                    timing.check()
            steps.total += sum(timing.steps for timing in timings)
            with ThreadPoolExecutor(len(timings)) as pool:  # different hosts at the same time
                list((map if cluster.launcher.in_process else pool.map)(HostTiming.measure, timings))
            steps.done()
            return times

    def _compile(self, machines: Sequence[MachineFacts], steps: Steps) -> None:
        """Compile the kernels for each distinct target, by `_target_key`."""
        missing = {_target_key(machine): machine for machine in machines if _target_key(machine) not in self._codes}
        steps.total = len(missing)
        for key, machine in missing.items():
            steps.begin(f"compiling {self._name} for {machine.name}")
            self._codes[key] = self._code_of(machine)

    def _times(self, machines: Sequence[MachineFacts], folder: Path) -> list[MachineTimes]:
        all_times = []
        for machine in machines:
            key = (_target_key(machine), machine.threads)
            if key not in self._ceilings:
                self._ceilings[key] = None if machine.has_gpu else ceiling_code(machine.target, machine.threads)
            neighbours = [
                neighbour for neighbour in machines if neighbour.host == machine.host and neighbour is not machine
            ]
            companions = tuple(sorted(f"{neighbour.name} with {neighbour.threads} threads" for neighbour in neighbours))
            cache = Store(folder, machine.identity)
            all_times.append(MachineTimes(machine, self._codes[key[0]], self._ceilings[key], cache, companions))
        return all_times


def open_session(cluster: Workers, timeout_seconds: float, machine: MachineFacts) -> KernelSession:
    """Open a session that times kernels, in this process or on the worker. Errors are those of `RemoteKernels`."""
    if cluster.launcher.in_process:
        return InProcessKernels(machine.threads)
    return RemoteKernels(cluster.endpoints()[machine.name], timeout_seconds)


class CallSeconds:
    """Seconds of kernel calls on a machine, alone and under contention: measured, else from a roofline of its peaks.

    They include the network's overhead per weight.

    Raises:
        ProfileError: nothing could be measured on the machine.
    """

    def __init__(self, times: MachineTimes) -> None:
        self._times = times
        self.ceilings = _ceilings(times)
        known_digests = [digest for digest in times.code.distinct if digest in times.known]
        alone = sum(times.alone[digest].seconds for digest in known_digests)
        self._slower = (
            sum(times.contended[digest].seconds for digest in known_digests) / alone if known_digests else 1.0
        )

    def of(self, calls: Sequence[KernelCall]) -> PieceTime:
        """Return the time of calls that run one after the other."""
        call_times = [self._of_call(call) for call in calls]
        by_itself, in_company = (
            max(sum(call_time[place] for call_time in call_times), SHORTEST_SECONDS) for place in (0, 1)
        )
        all_known = all(call.digest in self._times.known for call in calls)
        # Contention never makes kernels faster: a longer time alone was disturbed.
        return PieceTime(min(by_itself, in_company), in_company, "measured" if all_known else "estimated")

    def _of_call(self, call: KernelCall) -> tuple[float, float]:
        weight_seconds = len(call.weights) * self.ceilings.seconds_per_weight
        if call.digest in self._times.known:
            alone, contended = (times[call.digest].seconds for times in (self._times.alone, self._times.contended))
            return alone + weight_seconds, contended + weight_seconds * self._slower
        roofline = weight_seconds + max(
            call.kernel.operations / self.ceilings.operations_per_second,
            call.kernel.moved_bytes / self.ceilings.bytes_per_second,
        )
        return roofline, roofline * self._slower


def _require_runnable(cluster: Cluster, machines: Sequence[MachineFacts]) -> None:
    for machine in machines:
        if cluster.launcher.in_process and machine.target["kind"] != "llvm":
            raise ProfileError(
                f"machine {machine.name!r} has the target {dict(machine.target)}, and in one process only the CPU can "
                "be timed; start a worker on the machine and name it in a cluster file"
            )


def _target_key(machine: MachineFacts) -> str:
    return json.dumps(dict(machine.target), sort_keys=True)


def _ceilings(times: MachineTimes) -> Ceilings:
    """Return peak operations and bytes per second: measured, or else the best that any kernel reached."""
    code = times.ceilings
    if code is not None and not times.lacks_ceilings:
        return code.ceilings({digest: times.alone[digest].seconds for digest in code.kernels})
    measured_rates = [
        (call.kernel.operations / times.alone[digest].seconds, call.kernel.moved_bytes / seconds)
        for digest, call in times.code.distinct.items()
        if digest in times.alone and (seconds := times.alone[digest].seconds)
    ]
    if not measured_rates:
        reasons = "; ".join(sorted(set(times.problems.values()))) or "none of its kernels can be timed"
        raise ProfileError(f"nothing could be measured on machine {times.machine.name!r}: {reasons}")
    return Ceilings(*(max(rates) for rates in zip(*measured_rates, strict=True)))
