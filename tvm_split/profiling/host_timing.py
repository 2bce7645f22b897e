"""Times kernels on the machines of one host, in rounds: each machine alone, then all at the same time.

Machines of one host share memory, caches and the power budget of the cores, so each is slower while the others compute.
The speed of a machine drifts by more than that within seconds, so measurements alone and together alternate. Cached
times are not measured again. But if one machine lacks a time under contention, the others compute too.

Of identical machines, the first and the last are timed; the others get the times of the faster one. Only as many
machines compute at the same time as have cores of their own: waiting for a core is not a property of a kernel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from rpc_runtime.hardware import usable_together
from rpc_runtime.program.kernel_times import MAXIMUM_LIMIT_SECONDS, KernelSet, KernelTime, TimingEffort
from rpc_runtime.program.program import BlobSpec
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.profiling.kernels import TargetCode
from tvm_split.profiling.machine_times import MachineTimes
from tvm_split.profiling.machines import MachineFacts
from tvm_split.profiling.peaks import EFFORT as PEAK_EFFORT, CeilingCode
from tvm_split.profiling.rounds import ROUNDS, WITHIN, confirmed_fastest, first_of

ROUND_EFFORT = TimingEffort(minimum_rounds=2, minimum_seconds=0.12)
CHECK_EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.05)
TOGETHER = ""
"""The key of the measurement of all machines at the same time; no machine has this name."""
OVERLAP = 1.25
"""Length of a round under contention relative to a round alone, so that all compute while the slowest one does."""

Times = Mapping[str, tuple[KernelTime, ...]]
"""Times of kernels by machine."""


class KernelSession(Protocol):
    """A session in which kernels are loaded and timed."""

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int: ...

    def measure(self, effort: TimingEffort) -> tuple[KernelTime, ...]: ...

    def close(self) -> None: ...


class Libraries:
    """Builds libraries of kernels, each once. Thread-safe."""

    def __init__(self) -> None:
        self.blobs = BlobFolder.temporary()
        self._built: dict[tuple[int, frozenset[str]], BlobSpec] = {}
        self._lock = threading.Lock()

    def of_kernels(self, code: TargetCode, digests: frozenset[str]) -> BlobSpec:
        digest = next(iter(digests))
        return self._once(
            code,
            digests,
            lambda: code.build(digests, self.blobs) if len(digests) > 1 else code.build_one(digest, self.blobs),
        )

    def of_peaks(self, code: CeilingCode) -> BlobSpec:
        return self._once(code, frozenset(), lambda: code.build(self.blobs))

    def _once(self, code: object, digests: frozenset[str], build: Callable[[], BlobSpec]) -> BlobSpec:
        with self._lock:
            key = id(code), digests
            if key not in self._built:
                self._built[key] = build()
            return self._built[key]


class HostTiming:
    """Measures the missing times of the machines of one host.

    ``on_step`` is called with the name of each step. After the first round, rounds end when ``timeout_seconds`` per
    timed machine, and once more for all together, are used.
    """

    def __init__(
        self,
        machines: Sequence[MachineTimes],
        open_session: Callable[[MachineFacts], KernelSession],
        libraries: Libraries,
        timeout_seconds: float,
        on_step: Callable[[str], None],
    ) -> None:
        self._machines = machines
        self._open_session = open_session
        self._libraries = libraries
        self._timeout_seconds = timeout_seconds
        self._on_step = on_step
        self._round_seconds: dict[str, float] = {}

    @cached_property
    def wanted(self) -> dict[str, frozenset[str]]:
        """Digests of the kernels to measure, by machine; those of one target have the same, for equal contention."""
        machines = self._machines
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
        count = sum(bool(self.wanted[machine.name]) for machine in first_of(self._machines, _kind))
        return ROUNDS[0] * (count + 1 if count > 1 else count)

    def check(self) -> None:
        """Time one cached kernel on two machines of every kind; discard the times of a kind that has changed."""
        recalled = [machine for machine in self._machines if machine.checked_kernel is not None]
        changed = set()
        for machine in first_of(recalled, _kind):
            self._on_step(f"checking what is known of {machine.name}")
            with contextlib.closing(self._open_session(machine.machine)) as session:
                self._load(session, machine, frozenset({machine.checked_kernel or ""}))
                if not machine.is_consistent(session.measure(CHECK_EFFORT)[0]) and self._has_changed(machine, session):
                    changed.add(machine.kind)
        for machine in recalled:
            if machine.kind in changed:
                machine.forget()

    def _load(self, session: KernelSession, machine: MachineTimes, digests: frozenset[str]) -> None:
        kernels = machine.kernel_set(digests, self._libraries.of_kernels(machine.code, digests))
        session.load(kernels, self._libraries.blobs.path)

    def _has_changed(self, times: MachineTimes, session: KernelSession) -> bool:
        """Whether a kernel is now faster than its cached time, or is confirmed to be slower."""
        now, is_confirmed = confirmed_fastest(
            {times.name: lambda: session.measure(CHECK_EFFORT)}, seconds_of, limit_seconds=self._timeout_seconds
        )[times.name]
        is_faster = now[0].seconds < times.alone[times.checked_kernel or ""].seconds
        return not times.is_consistent(now[0]) and (is_confirmed or is_faster)

    def measure(self) -> None:
        """Measure the missing times."""
        lacking = [machine for machine in self._machines if self.wanted[machine.name] or machine.lacks_ceilings]
        timed = first_of(lacking, _kind)
        self._time(timed)
        for machine in lacking:
            if machine not in timed:
                machine.take_from(
                    min(
                        (candidate for candidate in timed if candidate.kind == machine.kind),
                        key=lambda candidate: candidate.whole_seconds,
                    )
                )

    def _time(self, machines: Sequence[MachineTimes]) -> None:
        with contextlib.ExitStack() as stack:
            timed = [machine for machine in machines if self.wanted[machine.name]]
            together = self._finding_cores(timed)
            sessions = {
                machine.name: stack.enter_context(contextlib.closing(self._open_session(machine.machine)))
                for machine in dict.fromkeys((*machines, *together))
            }
            self._time_peaks([machine for machine in machines if machine.lacks_ceilings], sessions)
            for machine in dict.fromkeys((*timed, *together)):
                self._load(sessions[machine.name], machine, self.wanted[machine.name])
            measures: dict[str, Callable[[], Times]] = {
                machine.name: partial(self._measure_alone, machine, sessions[machine.name]) for machine in timed
            }
            if len(together) > 1:
                measures[TOGETHER] = partial(self._measure_together, together, sessions)
            limit = self._timeout_seconds * (len(timed) + 1)
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
            machine.take(alone.fastest[machine.name], (), is_confirmed=alone.is_confirmed)
            if machine.companions:
                machine.take(contended.fastest[machine.name], machine.companions, is_confirmed=contended.is_confirmed)

    def _time_peaks(self, machines: Sequence[MachineTimes], sessions: Mapping[str, KernelSession]) -> None:
        def load(machine: MachineTimes) -> None:
            assert machine.ceilings is not None  # noqa: S101  (it lacks their times)
            kernels = machine.ceilings.kernel_set(machine.name, self._libraries.of_peaks(machine.ceilings))
            sessions[machine.name].load(kernels, self._libraries.blobs.path)

        # Before its first library, a worker starts the process that tests libraries. Load all at the same time.
        with ThreadPoolExecutor(max(len(machines), 1), thread_name_prefix="load") as pool:
            list(pool.map(load, machines))
        for machine in machines:
            machine.take(sessions[machine.name].measure(PEAK_EFFORT), (), is_confirmed=True)

    def _finding_cores(self, timed: Sequence[MachineTimes]) -> list[MachineTimes]:
        """Return the machines to run at the same time, timed ones first, as long as each has cores of its own."""
        cores = usable_together(machine.machine.cores for machine in self._machines)
        together: list[MachineTimes] = []
        for machine in dict.fromkeys((*timed, *self._machines)) if timed else ():
            threads = sum(chosen.machine.threads for chosen in (*together, machine))
            if self.wanted[machine.name] and (not cores or threads <= cores):
                together.append(machine)
        return together

    def _measure_alone(self, times: MachineTimes, session: KernelSession) -> Times:
        self._on_step(f"timing {len(self.wanted[times.name])} kernels on {times.name}")
        kernel_times = session.measure(self._limited(ROUND_EFFORT.minimum_seconds))
        self._round_seconds[times.name] = seconds_of(kernel_times)
        return {times.name: kernel_times}

    def _measure_together(self, machines: Sequence[MachineTimes], sessions: Mapping[str, KernelSession]) -> Times:
        names = [machine.name for machine in machines]
        self._on_step(f"timing {' and '.join(names)} at the same time")
        slowest = max(self._round_seconds.values())
        whole = OVERLAP * (1 + ROUND_EFFORT.minimum_rounds) * slowest

        def measured(name: str) -> tuple[KernelTime, ...]:
            after_warming_up = whole - self._round_seconds.get(name, slowest)
            return sessions[name].measure(self._limited(max(ROUND_EFFORT.minimum_seconds, after_warming_up)))

        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(measured, names), strict=True))

    def _limited(self, minimum_seconds: float) -> TimingEffort:
        limit = min(max(self._timeout_seconds, 2 * minimum_seconds), MAXIMUM_LIMIT_SECONDS)
        return TimingEffort(ROUND_EFFORT.minimum_rounds, min(minimum_seconds, limit), limit)


def _kind(machine: MachineTimes) -> Hashable:
    return machine.kind


def seconds_of(times: Sequence[KernelTime]) -> float:
    """Return the total seconds of all kernels, each once."""
    return sum(time.seconds for time in times)


def _all_seconds(times: Times) -> float:
    return sum(map(seconds_of, times.values()))


def _doubt(what: str) -> str:
    return (
        f"no two measurements of {what} came within {WITHIN:.0%} of each other: other programs run there; plan again "
        "when the machine is quieter"
    )
