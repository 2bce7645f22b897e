"""Times kernels on the machines of one host: each machine alone, then all at the same time.

Machines of one host share its memory, its caches and the power that its cores may take, so each is slower while the
others compute. Times that are known from the cache are not taken again; but where one machine has something to measure
in company, the others must be at work too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rpc_runtime.in_process_kernels import InProcessKernels
from rpc_runtime.kernel_times import MAXIMUM_LIMIT_SECONDS, KernelSet, KernelTime, TimingEffort
from rpc_runtime.program import BlobSpec
from rpc_runtime.remote_kernels import RemoteKernels
from tvm_split.blobs import BlobFolder
from tvm_split.cluster import Cluster
from tvm_split.profiles.profile_cache import CachedTime, ProfileCache, entry_key
from tvm_split.profiles.profiled_machine import ProfiledMachine
from tvm_split.profiles.target_code import CeilingCode, TargetCode, symbol

EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.5)
CEILING_EFFORT = TimingEffort(minimum_rounds=7, minimum_seconds=0.0)
# So long that all machines are at work for the whole of the slowest one's rounds, though they do not start together.
OVERLAP = 1.5
MOST_OF_MEMORY = 0.5


class KernelSession(Protocol):
    """Where kernels can be loaded and timed."""

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int: ...

    def measure(self, effort: TimingEffort) -> tuple[KernelTime, ...]: ...

    def close(self) -> None: ...


@dataclass
class MachineTimes:
    """What is known of one machine: times by digest, alone and in company, and why others are not known."""

    machine: ProfiledMachine
    code: TargetCode
    ceilings: CeilingCode | None
    cache: ProfileCache
    companions: tuple[str, ...]
    alone: dict[str, CachedTime] = field(default_factory=dict)
    contended: dict[str, CachedTime] = field(default_factory=dict)
    ceiling_times: dict[str, CachedTime] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)

    def recall(self) -> None:
        """Take what the cache has."""
        for digest in self.code.distinct:
            for times, companions in ((self.alone, ()), (self.contended, self.companions)):
                found = self.cache.get(self._key(digest, companions))
                if found is not None:
                    times[digest] = found
        for digest in self.ceilings.functions if self.ceilings is not None else ():
            found = self.cache.get(self._ceiling_key(digest))
            if found is not None:
                self.ceiling_times[digest] = found

    @property
    def missing(self) -> frozenset[str]:
        """Digests of the kernels that can be timed and of which a time is lacking."""
        return frozenset(digest for digest in self.timeable if digest not in self.alone or digest not in self.contended)

    @property
    def timeable(self) -> frozenset[str]:
        room = self.machine.memory_free_bytes or float("inf")
        return frozenset(
            digest
            for digest in self.code.distinct
            if digest not in self.code.untimeable and self.code.timed(digest).size_bytes < MOST_OF_MEMORY * room
        )

    @property
    def lacks_ceilings(self) -> bool:
        return self.ceilings is not None and len(self.ceiling_times) < len(self.ceilings.functions)

    def kernel_set(self, digests: frozenset[str], library: BlobSpec) -> KernelSet:
        ordered = [digest for digest in self.code.distinct if digest in digests]
        room = self.machine.memory_free_bytes
        weight_bytes = min(self.code.weight_bytes, int(MOST_OF_MEMORY * room)) if room else self.code.weight_bytes
        kernels = tuple(self.code.timed(digest) for digest in ordered)
        return KernelSet(self.machine.name, self.code.device, library, kernels, weight_bytes)

    def take(self, times: Sequence[KernelTime], companions: tuple[str, ...]) -> None:
        """Remember what was measured, and keep it for later."""
        by_symbol = {symbol(digest): digest for digest in self.code.distinct}
        found: dict[str, CachedTime] = {}
        for each in times:
            digest = by_symbol[each.function]
            if each.error:
                self.problems[digest] = each.error
            else:
                found[digest] = CachedTime(each.seconds, each.best_seconds, time.time())
        (self.contended if companions else self.alone).update(found)
        if not self.companions:
            self.contended.update(found)
        self.measured |= found.keys()
        self._keep({self._key(digest, companions): each for digest, each in found.items()})

    def take_ceilings(self, times: Sequence[KernelTime]) -> None:
        by_symbol = {symbol(digest): digest for digest in (self.ceilings.functions if self.ceilings else ())}
        found = {
            by_symbol[each.function]: CachedTime(each.seconds, each.best_seconds, time.time())
            for each in times
            if not each.error
        }
        self.ceiling_times.update(found)
        self._keep({self._ceiling_key(digest): each for digest, each in found.items()})

    def _keep(self, entries: Mapping[str, CachedTime]) -> None:
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time the next time
            self.cache.put(entries)

    def _key(self, digest: str, companions: tuple[str, ...]) -> str:
        # What else is in the caches counts only by its size: a power of two is near enough.
        warmth = self.code.weight_bytes.bit_length() if self.code.distinct[digest].weights else 0
        return entry_key(kernel=digest, target=dict(self.code.target), with_=list(companions), warmth=warmth)

    def _ceiling_key(self, digest: str) -> str:
        return entry_key(ceiling=digest, target=dict(self.code.target))


class HostTiming:
    """Measures what is lacking on the machines of one host.

    ``on_step`` is called with what begins. Every wait is limited by ``timeout_seconds`` and by the effort.
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

    @property
    def steps(self) -> int:
        return sum(bool(digests) for digests in self.wanted.values()) + (self._in_company)

    @property
    def _in_company(self) -> bool:
        return sum(bool(digests) for digests in self.wanted.values()) > 1

    def measure(self, libraries: Mapping[int, BlobSpec], ceilings: Mapping[int, BlobSpec], blobs: BlobFolder) -> None:
        """Time what is wanted, with the libraries by ``id`` of the machine's code."""
        with contextlib.ExitStack() as stack:
            at_work: list[tuple[MachineTimes, KernelSession]] = []
            for each in self._machines:
                wanted = self.wanted[each.machine.name]
                if not wanted and not each.lacks_ceilings:
                    continue
                session = self._session(each)
                stack.callback(session.close)
                if each.lacks_ceilings and each.ceilings is not None:
                    kernels = tuple(each.ceilings.kernels.values())
                    session.load(
                        KernelSet(each.machine.name, "cpu", ceilings[id(each.ceilings)], kernels, 0), blobs.path
                    )
                    each.take_ceilings(session.measure(CEILING_EFFORT))
                if wanted:
                    self._on_step(f"timing {len(wanted)} kernels on {each.machine.name}")
                    session.load(each.kernel_set(wanted, libraries[id(each.code)]), blobs.path)
                    each.take(session.measure(self._effort(EFFORT.minimum_seconds)), ())
                    at_work.append((each, session))
            if len(at_work) > 1:
                self._measure_in_company(at_work)

    def _measure_in_company(self, at_work: Sequence[tuple[MachineTimes, KernelSession]]) -> None:
        names = [each.machine.name for each, _ in at_work]
        self._on_step(f"timing {' and '.join(names)} at the same time")
        slowest = max(
            EFFORT.minimum_rounds * sum(each.alone[d].seconds for d in self.wanted[name] if d in each.alone)
            for name, (each, _) in zip(names, at_work, strict=True)
        )
        effort = self._effort(max(EFFORT.minimum_seconds, OVERLAP * slowest))
        with ThreadPoolExecutor(len(at_work)) as pool:
            found = list(pool.map(lambda pair: pair[1].measure(effort), at_work))
        for (each, _), times in zip(at_work, found, strict=True):
            each.take(times, each.companions)

    def _effort(self, minimum_seconds: float) -> TimingEffort:
        limit = min(max(self._timeout_seconds, 2 * minimum_seconds), MAXIMUM_LIMIT_SECONDS)
        return TimingEffort(EFFORT.minimum_rounds, min(minimum_seconds, limit), limit)

    def _session(self, each: MachineTimes) -> KernelSession:
        if self._cluster.kind == "in_process":
            return InProcessKernels(each.machine.threads)
        return RemoteKernels(self._cluster.endpoints()[each.machine.name], self._timeout_seconds)
