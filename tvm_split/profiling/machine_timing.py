"""Times kernels on the machines of one host: in turns each machine alone, and all at the same time.

Machines of one host share its memory, its caches and the power that its cores may take, so each is slower while the
others compute. By how much is often less than what a machine drifts within seconds, so the two are timed in short turns
and not one long after the other. Times that are known from the cache are not taken again; but where one machine has
something to measure in company, the others must be at work too.

Of equal machines the first and the last are timed, where these part a third, and the others are as the middle one. In
company are as many as find cores of their own: what more of them add is waiting for a core.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.execution.in_process_kernels import InProcessKernels
from rpc_runtime.hardware import usable_together
from rpc_runtime.program.kernel_times import (
    MAXIMUM_LIMIT_SECONDS,
    KernelSet,
    KernelTime,
    TimingEffort,
)
from rpc_runtime.program.program import BlobSpec
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.profiling.kernels import symbol
from tvm_split.profiling.machine_times import MachineTimes
from tvm_split.profiling.peaks import EFFORT as CEILING_EFFORT
from tvm_split.profiling.spot_checks import first_of
from tvm_split.profiling.timing_turns import TURNS, combined, contradictions, quietest, seconds_of, unlikeness

TURN_EFFORT = TimingEffort(minimum_rounds=2, minimum_seconds=0.12)
MOST_TURNS = 3 * TURNS
CHECK_EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.05)
TURNS_TO_BE_ALIKE = TURNS + 2
# So long that all machines are at work for the whole of the slowest one's rounds, which company makes longer.
OVERLAP = 1.25


class KernelSession(Protocol):
    """Where kernels can be loaded and timed."""

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int: ...

    def measure(self, effort: TimingEffort) -> tuple[KernelTime, ...]: ...

    def close(self) -> None: ...


class HostTiming:
    """Measures what is lacking on the machines of one host.

    ``on_step`` is called with what begins. Every wait is limited by ``timeout_seconds`` and by the effort. They are
    timed in `TURNS` turns; in more if their times contradict themselves or an equal machine's; in fewer if the turns
    would take longer than ``timeout_seconds`` for each machine alone and as much for all together.
    """

    def __init__(
        self,
        machines: Sequence[MachineTimes],
        cluster: Cluster,
        timeout_seconds: float,
        on_step: Callable[[str], None],
    ) -> None:
        self._machines = machines
        self._cluster = cluster
        self._timeout_seconds = timeout_seconds
        self._on_step = on_step
        lacking = {id(each): each.missing for each in machines}
        # Machines of one target measure the same kernels, so that each has the same company.
        self.wanted = {
            each.machine.name: frozenset().union(*(lacking[id(other)] for other in machines if other.code is each.code))
            & each.timeable
            for each in machines
        }
        if len(machines) > 1 and any(self.wanted.values()):
            self.wanted = {each.machine.name: self.wanted[each.machine.name] or each.timeable for each in machines}
        self._first = [each for each in first_of(machines, lambda each: each.kind) if self.wanted[each.machine.name]]

    @property
    def steps(self) -> int:
        count = len(self._first)
        return TURNS * (count + 1 if count > 1 else count)

    def check(self, library_of: Callable[[MachineTimes, str], BlobSpec], blobs: BlobFolder) -> None:
        """Time one kernel of every kind of machine that is known from the cache, and forget those that it contradicts.

        Of a kind the first and the last are looked at; if they are not believed, none is.
        """
        known = [each for each in self._machines if each.checked_kernel is not None]
        doubtful = set()
        for each in first_of(known, lambda each: each.kind):
            self._on_step(f"checking what is known of {each.machine.name}")
            digest = each.checked_kernel or ""
            with contextlib.closing(self._session(each)) as session:
                session.load(each.kernel_set(frozenset({digest}), library_of(each, digest)), blobs.path)
                (now,) = session.measure(CHECK_EFFORT)
            if not each.believe_if(now):
                doubtful.add(each.kind)
        for each in known:
            if each.kind in doubtful:
                each.forget()

    def measure(self, libraries: Mapping[int, BlobSpec], ceilings: Mapping[int, BlobSpec], blobs: BlobFolder) -> None:
        """Time what is wanted, with the libraries by ``id`` of the machine's code."""
        kinds: dict[tuple[int, str], list[MachineTimes]] = {}
        for each in self._machines:
            if self.wanted[each.machine.name] or each.lacks_ceilings:
                kinds.setdefault(each.kind, []).append(each)
        first = first_of(itertools.chain(*kinds.values()), lambda each: each.kind)
        self._time(first, libraries, ceilings, blobs)
        thirds = [kind[len(kind) // 2] for kind in kinds.values() if len(kind) > 2 and any(each.doubt for each in kind)]
        self._time(thirds, libraries, ceilings, blobs)
        for kind in kinds.values():
            timed = sorted({*kind} & {*first, *thirds}, key=lambda each: each.whole_seconds)
            for each in kind:
                if each not in timed:
                    each.take_from(timed[1] if len(timed) > 2 else kind[0])

    def _time(
        self,
        machines: Sequence[MachineTimes],
        libraries: Mapping[int, BlobSpec],
        ceilings: Mapping[int, BlobSpec],
        blobs: BlobFolder,
    ) -> None:
        """Time these machines, with others at work beside them that find cores."""
        at_work: list[_MachineAtWork] = []
        with contextlib.ExitStack() as stack:
            sessions = [self._session(each) for each in machines]
            for session in sessions:
                stack.callback(session.close)
            first = [
                (session, each.ceilings.kernel_set(each.machine.name, ceilings[id(each.ceilings)]))
                for each, session in zip(machines, sessions, strict=True)
                if each.lacks_ceilings and each.ceilings is not None
            ]
            self._load_beside_each_other(first, blobs)
            for each, session in zip(machines, sessions, strict=True):
                wanted = self.wanted[each.machine.name]
                if each.lacks_ceilings and each.ceilings is not None:
                    each.take_ceilings(session.measure(CEILING_EFFORT))
                if wanted:
                    session.load(each.kernel_set(wanted, libraries[id(each.code)]), blobs.path)
                    at_work.append(_MachineAtWork(each, session, len(wanted)))
            company = [*at_work]
            for each in self._beside(machines) if at_work else ():
                session = self._session(each)
                stack.callback(session.close)
                session.load(each.kernel_set(self.wanted[each.machine.name], libraries[id(each.code)]), blobs.path)
                company.append(_MachineAtWork(each, session, len(self.wanted[each.machine.name])))
            if at_work:
                self._measure_in_turns(at_work, company)
        doubts = self._contradictions(at_work)
        waiting = self._crowding(self._machines) / self._crowding([each.times for each in company])
        for machine in at_work:
            machine.times.doubt = doubts.get(machine.name, "")
            machine.times.take(combined(quietest(machine.alone)), ())
            if machine.contended:
                times = combined(quietest(machine.contended))
                machine.times.take([_longer(each, waiting) for each in times], machine.times.companions)

    def _load_beside_each_other(self, loads: Sequence[tuple[KernelSession, KernelSet]], blobs: BlobFolder) -> None:
        """Nothing is timed meanwhile, and a worker starts what tries a library out before it loads its first one."""
        if self._cluster.launcher.in_process or len(loads) < 2:
            for session, kernels in loads:
                session.load(kernels, blobs.path)
            return
        with ThreadPoolExecutor(len(loads), thread_name_prefix="load") as pool:
            list(pool.map(lambda load: load[0].load(load[1], blobs.path), loads))

    def _beside(self, machines: Sequence[MachineTimes]) -> list[MachineTimes]:
        """Others of the host that find cores of their own beside these."""
        cores = self._cores
        found: list[MachineTimes] = []
        for each in self._machines:
            if each not in machines and self.wanted[each.machine.name]:
                threads = sum(other.machine.threads for other in (*machines, *found, each))
                if not cores or threads <= cores:
                    found.append(each)
        return found

    @property
    def _cores(self) -> int:
        """Of the host, as far as its machines may use them; 0 if that is not known."""
        return usable_together(each.machine.cores for each in self._machines)

    def _crowding(self, machines: Iterable[MachineTimes]) -> float:
        """How many times longer these take all together because they wait for cores."""
        threads = sum(each.machine.threads for each in machines if not each.machine.has_gpu)
        return max(1.0, threads / self._cores) if self._cores else 1.0

    def _measure_in_turns(self, at_work: Sequence[_MachineAtWork], company: Sequence[_MachineAtWork]) -> None:
        """So many turns as it takes for times that agree: up to `MOST_TURNS`, or to `TURNS_TO_BE_ALIKE` of equals."""
        start = time.monotonic()
        limit = self._timeout_seconds * (len(at_work) + 1)
        for turn in range(MOST_TURNS):
            if turn and (time.monotonic() - start) * (turn + 1) / turn > limit:
                break  # as slow as these machines are, one more would not fit
            wanted = self._wanted_in(turn, at_work)
            if not wanted:
                break
            for machine in wanted if turn % 2 == 0 else wanted[::-1]:
                self._measure_alone(machine)
            if len(company) > 1:
                self._measure_in_company(company, max(each.round_seconds for each in at_work))

    def _wanted_in(self, turn: int, at_work: Sequence[_MachineAtWork]) -> Sequence[_MachineAtWork]:
        """The machines that are timed alone in a turn: all at first, then those whose times are in doubt."""
        if turn < TURNS:
            return at_work
        doubts = self._contradictions(at_work, with_equals=turn < TURNS_TO_BE_ALIKE)
        return [machine for machine in at_work if machine.name in doubts]

    def _contradictions(self, at_work: Sequence[_MachineAtWork], *, with_equals: bool = True) -> dict[str, str]:
        found = contradictions({each.name: (each.alone, each.contended) for each in at_work})
        for one, other in itertools.combinations(at_work, 2) if with_equals else ():
            if one.times.kind == other.times.kind and not found.keys() & {one.name, other.name}:
                layers = {symbol(digest): call.kernel.layers for digest, call in one.times.code.distinct.items()}
                alone = unlikeness({each.name: each.alone for each in (one, other)}, layers)
                in_company = unlikeness({each.name: each.contended for each in (one, other)}, layers)
                if alone or in_company:
                    found[one.name] = found[other.name] = alone or f"at work at the same time, {in_company}"
        return found

    def _measure_alone(self, machine: _MachineAtWork) -> None:
        self._on_step(f"timing {machine.kernels} kernels on {machine.name}")
        effort = self._limited(TURN_EFFORT.minimum_rounds, TURN_EFFORT.minimum_seconds)
        machine.alone.append(machine.session.measure(effort))

    def _measure_in_company(self, at_work: Sequence[_MachineAtWork], round_seconds: float) -> None:
        self._on_step(f"timing {' and '.join(machine.name for machine in at_work)} at the same time")
        rounds = TURN_EFFORT.minimum_rounds
        together = OVERLAP * (1 + rounds) * round_seconds

        def measured(machine: _MachineAtWork) -> tuple[KernelTime, ...]:
            after_warming_up = together - (machine.round_seconds if machine.alone else round_seconds)
            return machine.session.measure(self._limited(rounds, max(TURN_EFFORT.minimum_seconds, after_warming_up)))

        with ThreadPoolExecutor(len(at_work)) as pool:
            for machine, times in zip(at_work, pool.map(measured, at_work), strict=True):
                machine.contended.append(times)

    def _limited(self, minimum_rounds: int, minimum_seconds: float) -> TimingEffort:
        limit = min(max(self._timeout_seconds, 2 * minimum_seconds), MAXIMUM_LIMIT_SECONDS)
        return TimingEffort(minimum_rounds, min(minimum_seconds, limit), limit)

    def _session(self, each: MachineTimes) -> KernelSession:
        if self._cluster.launcher.in_process:
            return InProcessKernels(each.machine.threads)
        return RemoteKernels(self._cluster.endpoints()[each.machine.name], self._timeout_seconds)


@dataclass
class _MachineAtWork:
    """A machine whose kernels are loaded, and what was found in each turn."""

    times: MachineTimes
    session: KernelSession
    kernels: int
    alone: list[tuple[KernelTime, ...]] = field(default_factory=list)
    contended: list[tuple[KernelTime, ...]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.times.machine.name

    @property
    def round_seconds(self) -> float:
        """Of all kernels once, as they were when it was last alone."""
        return seconds_of(self.alone[-1])


def _longer(time: KernelTime, ratio: float) -> KernelTime:
    return replace(time, seconds=time.seconds * ratio, best_seconds=time.best_seconds * ratio)
