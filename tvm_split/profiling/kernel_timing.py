"""Times kernels on the machines of a cluster, in rounds: each machine of a host alone, then all at the same time.

Machines of one host share memory, caches and the power budget of the cores, so each is slower while the others compute.
The speed of a machine drifts by more than that within seconds, so measurements alone and together alternate. Cached
times are not measured again. But if one machine lacks a time under contention, the others compute too.

Of identical machines, the first and the last are timed; the others get the times of the faster one. Only as many
machines compute at the same time as have cores of their own: waiting for a core is not a property of a kernel.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from operator import attrgetter
from pathlib import Path

from relay_passes.one_at_a_time import ONE_AT_A_TIME
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.execution.kernel_timer import KernelTimer
from rpc_runtime.hardware import usable_together
from rpc_runtime.program.measurements import MAXIMUM_LIMIT_SECONDS, KernelTime, TimingEffort
from rpc_runtime.program.specs import BlobSpec
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.machine_targets import resolve_targets
from tvm_split.errors import ProfileError
from tvm_split.profiling.kernels import TargetCode
from tvm_split.profiling.machine_facts import MachineFacts, machine_facts
from tvm_split.profiling.machine_times import MachineTimes
from tvm_split.profiling.peaks import PEAK_EFFORT, peak_code
from tvm_split.profiling.rounds import ROUNDS, WITHIN, confirmed_fastest, first_and_last
from tvm_split.profiling.store import Store, default_folder
from tvm_split.progress import StepProgress, Steps

ROUND_EFFORT = TimingEffort(minimum_rounds=2, minimum_seconds=0.12)
CHECK_EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.05)
TOGETHER = ""
"""The key of the measurement of all machines at the same time; no machine has this name."""
DEFAULT_TIMEOUT_SECONDS = 60.0
COMPILING_SHARE = 0.6
"""Share of the measuring time in which kernels are compiled: ResNet-50's take twice as long to compile as to time."""
LEAST_SECONDS = 2.0
"""Time for rounds of measurements even after the deadline, since a single one is not confirmed by a second one."""
OVERLAP = 1.25
"""Length of a round under contention relative to a round alone.

It is longer, so that faster machines still compute while the slowest finishes.
"""

DEVICE_CLASS = attrgetter("device_class")
KernelSession = KernelTimer | RemoteKernels
Times = Mapping[str, tuple[KernelTime, ...]]
"""Times of kernels by machine."""


@dataclass(eq=False)
class HostTiming:
    """Measures the missing times of the machines of one host.

    ``library`` returns the library of some kernels, a blob in ``blobs``. ``on_step`` is called with the name of each
    step. All rounds after the first end within ``timeout_seconds`` × (number of timed machines + 1), and before
    ``deadline``, but `LEAST_SECONDS` are always given.
    """

    machines: Sequence[MachineTimes]
    open_session: Callable[[MachineFacts], KernelSession]
    library: Callable[[TargetCode, frozenset[str]], BlobSpec]
    blobs: BlobFolder
    timeout_seconds: float
    deadline: float
    on_step: Callable[[str], None]
    _round_seconds: dict[str, float] = field(default_factory=dict, init=False)

    @cached_property
    def wanted(self) -> dict[str, frozenset[str]]:
        """Digests of the kernels to measure, by machine: the same for machines of one target, for equal contention."""
        machines = self.machines
        wanted = {
            machine.name: frozenset().union(*(peer.missing for peer in machines if peer.code is machine.code))
            & machine.timeable
            for machine in machines
        }
        if len(machines) > 1 and any(wanted.values()):
            wanted = {machine.name: wanted[machine.name] or machine.timeable for machine in machines}
        return wanted

    @property
    def steps(self) -> int:
        count = sum(bool(self.wanted[machine.name]) for machine in first_and_last(self.machines, DEVICE_CLASS))
        return ROUNDS[0] * (count + 1 if count > 1 else count)

    def check(self) -> None:
        """Time one cached kernel on two machines of each device class; discard the times of classes that changed."""
        kernels = {machine: digest for machine in self.machines if (digest := machine.checked_kernel) is not None}
        checked, changed = first_and_last(list(kernels), DEVICE_CLASS), set()
        with self._sessions(checked) as sessions:
            self._load(sessions, {machine: (machine.code, frozenset({kernels[machine]})) for machine in checked})
            for machine in checked:
                self.on_step(f"checking cached times of {machine.name}")
                digest, session = kernels[machine], sessions[machine.name]
                is_consistent = machine.is_consistent(digest, session.measure(CHECK_EFFORT)[0])
                if not is_consistent and self._has_changed(machine, digest, session):
                    changed.add(machine.device_class)
        for machine in kernels:
            if machine.device_class in changed:
                machine.forget()

    @contextlib.contextmanager
    def _sessions(self, machines: Iterable[MachineTimes]) -> Iterator[Mapping[str, KernelSession]]:
        with contextlib.ExitStack() as stack:
            yield {
                machine.name: stack.enter_context(contextlib.closing(self.open_session(machine.machine)))
                for machine in machines
            }

    def _load(
        self,
        sessions: Mapping[str, KernelSession],
        kernels: Mapping[MachineTimes, tuple[TargetCode, frozenset[str]]],
    ) -> None:
        """Load kernels on all machines at the same time: before its first library, a worker starts a process."""

        def load(machine: MachineTimes) -> None:
            code, digests = kernels[machine]
            sessions[machine.name].load(machine.kernel_set(code, digests, self.library(code, digests)), self.blobs.path)

        with ThreadPoolExecutor(max(len(kernels), 1), thread_name_prefix="load") as pool:
            list(pool.map(load, kernels))

    def _has_changed(self, times: MachineTimes, digest: str, session: KernelSession) -> bool:
        """Whether a kernel is now faster than its cached time, or is confirmed to be slower."""
        now, is_confirmed = confirmed_fastest(
            {times.name: lambda: session.measure(CHECK_EFFORT)}, seconds_of, limit_seconds=self.timeout_seconds
        )[times.name]
        is_faster = now[0].seconds < times.alone[digest].seconds
        return not times.is_consistent(digest, now[0]) and (is_confirmed or is_faster)

    def measure(self) -> None:
        """Measure the missing times; identical machines that are not timed get the times of the fastest one."""
        lacking = [machine for machine in self.machines if self.wanted[machine.name] or machine.lacks_peaks]
        timed = first_and_last(lacking, DEVICE_CLASS)
        self._time(timed)
        for machine in lacking:
            if machine not in timed:
                identical = (candidate for candidate in timed if candidate.device_class == machine.device_class)
                machine.copy_from(min(identical, key=lambda candidate: candidate.whole_seconds))

    def _time(self, machines: Sequence[MachineTimes]) -> None:
        timed = [machine for machine in machines if self.wanted[machine.name]]
        together = self._with_own_cores(timed)
        with self._sessions(dict.fromkeys((*machines, *together))) as sessions:
            self._time_peaks([machine for machine in machines if machine.lacks_peaks], sessions)
            wanted = {machine: (machine.code, self.wanted[machine.name]) for machine in (*timed, *together)}
            self._load(sessions, wanted)
            measures: dict[str, Callable[[], Times]] = {
                machine.name: partial(self._measure_alone, machine, sessions[machine.name]) for machine in timed
            }
            if len(together) > 1:
                measures[TOGETHER] = partial(self._measure_together, together, sessions)
            limit = min(self.timeout_seconds * (len(timed) + 1), self.deadline - time.monotonic())
            limit = max(limit, LEAST_SECONDS)
            confirmed = confirmed_fastest(measures, _all_seconds, limit_seconds=limit)
        for machine in timed:
            alone = confirmed[machine.name]
            contended = confirmed.get(TOGETHER, alone)
            if machine not in together:
                contended = alone
            if not alone.is_confirmed:
                machine.doubt = _doubt(machine.name)
            elif not contended.is_confirmed:
                machine.doubt = _doubt(f"{machine.name} and others at the same time")
            machine.add_measured(alone.fastest[machine.name], (), is_confirmed=alone.is_confirmed)
            if machine.companions:
                machine.add_measured(
                    contended.fastest[machine.name], machine.companions, is_confirmed=contended.is_confirmed
                )

    def _time_peaks(self, machines: Sequence[MachineTimes], sessions: Mapping[str, KernelSession]) -> None:
        self._load(sessions, {machine: (machine.peaks, frozenset(machine.peaks.distinct)) for machine in machines})
        for machine in machines:
            machine.add_measured(sessions[machine.name].measure(PEAK_EFFORT), (), is_confirmed=True)

    def _with_own_cores(self, timed: Sequence[MachineTimes]) -> list[MachineTimes]:
        """Return as many machines to run at the same time as have cores of their own; first those of ``timed``."""
        cores = usable_together(machine.machine.cores for machine in self.machines)
        together: list[MachineTimes] = []
        for machine in dict.fromkeys((*timed, *self.machines)) if timed else ():
            threads = sum(chosen.machine.threads for chosen in (*together, machine))
            if self.wanted[machine.name] and (not cores or threads <= cores):
                together.append(machine)
        return together

    def _measure_alone(self, times: MachineTimes, session: KernelSession) -> Times:
        self.on_step(f"timing {len(self.wanted[times.name])} kernels on {times.name}")
        kernel_times = session.measure(self._limited(ROUND_EFFORT.minimum_seconds))
        self._round_seconds[times.name] = seconds_of(kernel_times)
        return {times.name: kernel_times}

    def _measure_together(self, machines: Sequence[MachineTimes], sessions: Mapping[str, KernelSession]) -> Times:
        names = [machine.name for machine in machines]
        self.on_step(f"timing {' and '.join(names)} at the same time")
        slowest = max(self._round_seconds.values())
        whole = OVERLAP * (1 + ROUND_EFFORT.minimum_rounds) * slowest

        def measured(name: str) -> tuple[KernelTime, ...]:
            after_warming_up = whole - self._round_seconds.get(name, slowest)
            return sessions[name].measure(self._limited(max(ROUND_EFFORT.minimum_seconds, after_warming_up)))

        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(measured, names), strict=True))

    def _limited(self, minimum_seconds: float) -> TimingEffort:
        seconds = min(self.timeout_seconds, self.deadline - time.monotonic())
        limit = min(max(seconds, 2 * minimum_seconds), MAXIMUM_LIMIT_SECONDS)
        return TimingEffort(ROUND_EFFORT.minimum_rounds, min(minimum_seconds, limit), limit)


def seconds_of(times: Sequence[KernelTime]) -> float:
    """Return the total seconds of all kernels, each once."""
    return sum(time.seconds for time in times)


def _all_seconds(times: Times) -> float:
    return sum(map(seconds_of, times.values()))


def _doubt(what: str) -> str:
    return (
        f"no two measurements of {what} came within {WITHIN:.0%} of each other: other programs probably run there; "
        "plan again when the machine is quieter"
    )


def time_kernels(
    name: str,
    code_of: Callable[[MachineFacts], TargetCode],
    cluster: Cluster,
    *,
    refresh: bool = False,
    measures: bool = True,
    cache_folder: str | Path | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    deadline: float = math.inf,
    on_progress: StepProgress | None = None,
) -> list[MachineTimes]:
    """Measure the time of each kernel on each machine, alone and under contention from others of its host.

    Cached times are validated by a check, and the rest is measured.

    Args:
        name: the name of the code in progress messages.
        code_of: returns the code to time on a machine; it is called once per distinct target.
        refresh: measure everything again, whatever is cached.
        measures: whether kernels without a cached time are measured; cached times are checked in any case.
        cache_folder: where times are kept; by default `store.default_folder`.
        timeout_seconds: the longest wait for a worker; also limits how long a machine's kernels are timed.
        deadline: in seconds of `time.monotonic`. The kernels that take most of the network's time are compiled first,
            those that are not compiled in `COMPILING_SHARE` of the time are not timed, and no round but the first is
            begun that would end later.

    Raises:
        WorkerError: a worker cannot be reached, or cannot run its machine's target.
        CompileError: a target cannot be compiled for.
        ProfileError: a machine's kernels cannot be timed in this process.
    """
    with cluster.start() as workers:
        steps = Steps(on_progress)
        machines = machine_facts(workers, resolve_targets(workers, workers.machine_names))
        _require_runnable(workers, machines)
        by_target = {_target_key(machine): machine for machine in machines}
        steps.total = len(by_target)
        codes = {}
        for key, machine in by_target.items():
            steps.begin(f"compiling {name} for {machine.name}")
            codes[key] = code_of(machine)
        times = _machine_times(machines, codes, default_folder() if cache_folder is None else Path(cache_folder))
        open_worker_session, blobs = partial(open_session, workers, timeout_seconds), BlobFolder.temporary()
        library = ONE_AT_A_TIME(cache(lambda code, digests: code.build(digests, blobs)))  # for the hosts' threads
        timings = [
            HostTiming(
                [time for time in times if time.machine.host == host],
                open_worker_session,
                library,
                blobs,
                timeout_seconds,
                deadline,
                steps.begin,
            )
            for host in dict.fromkeys(machine.host for machine in machines)
        ]
        if not refresh:
            for machine_times in times:
                machine_times.recall()
            steps.total += sum(machine_times.checked_kernel is not None for machine_times in times)
            for timing in timings:
                timing.check()
        if measures:
            _compile(times, time.monotonic() + COMPILING_SHARE * (deadline - time.monotonic()))
        else:
            for machine_times in times:
                machine_times.late = machine_times.missing
        steps.total += sum(timing.steps for timing in timings)
        if cluster.launcher.in_process:
            for timing in timings:
                timing.measure()
        else:
            with ThreadPoolExecutor(len(timings)) as pool:  # different hosts at the same time, progress shown as here
                contexts = [copy_context() for _ in timings]
                list(pool.map(lambda context, timing: context.run(timing.measure), contexts, timings))
        steps.done()
        return times


def _compile(times: Sequence[MachineTimes], deadline: float) -> None:
    """Compile the missing kernels of each target until the deadline; the rest is late."""
    for code in {id(machine.code): machine.code for machine in times}.values():
        sharing = [machine for machine in times if machine.code is code]
        missing = frozenset().union(*(machine.missing for machine in sharing))
        late = missing - code.compiled(missing, deadline)
        for machine in sharing:
            machine.late = late


def _machine_times(
    machines: Sequence[MachineFacts], codes: Mapping[str, TargetCode], folder: Path
) -> list[MachineTimes]:
    """Return empty times of each machine. Machines of one target and number of threads share their peaks."""
    peaks: dict[tuple[str, int], TargetCode] = {}
    all_times = []
    for machine in machines:
        key = _target_key(machine), machine.threads
        if key not in peaks:
            peaks[key] = peak_code(machine.target, machine.threads)
        companions = sorted(
            f"{peer.name} with {peer.threads} threads"
            for peer in machines
            if peer.host == machine.host and peer is not machine
        )
        cache = Store(folder, machine.identity)
        all_times.append(MachineTimes(machine, codes[key[0]], peaks[key], cache, tuple(companions)))
    return all_times


def open_session(cluster: Workers, timeout_seconds: float, machine: MachineFacts) -> KernelSession:
    """Open a session that times kernels, in this process or on the worker. Errors are those of `RemoteKernels`."""
    if cluster.launcher.in_process:
        return KernelTimer(machine.threads)
    return RemoteKernels(cluster.endpoints()[machine.name], timeout_seconds)


def _require_runnable(cluster: Cluster, machines: Sequence[MachineFacts]) -> None:
    for machine in machines:
        if cluster.launcher.in_process and machine.target["kind"] != "llvm":
            raise ProfileError(
                f"machine {machine.name!r} has the target {dict(machine.target)}, and in one process only the CPU can "
                "be timed; start a worker on the machine and name it in a cluster file"
            )


def _target_key(machine: MachineFacts) -> str:
    return json.dumps(dict(machine.target), sort_keys=True)
