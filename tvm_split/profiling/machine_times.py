"""Known kernel times of one machine: measured now, cached, or taken from an identical machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

from rpc_runtime.program.kernel_times import KernelSet, KernelTime
from rpc_runtime.program.program import BlobSpec
from tvm_split.compiler.targets import target_text
from tvm_split.profiling.kernels import TargetCode, symbol
from tvm_split.profiling.machines import MachineFacts
from tvm_split.profiling.peaks import CeilingCode
from tvm_split.profiling.store import Store, entry_key

MOST_OF_MEMORY = 0.5
CHANGED = 2.0
"""Ratio of times from which a machine counts as changed; frequencies and caches vary by less."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class CachedTime:
    """Seconds of one kernel call, and when that was measured (seconds since 1970)."""

    seconds: Seconds
    measured_at: float


_CACHED_TIME = TypeAdapter(CachedTime)


@dataclass(eq=False)
class MachineTimes:
    """Known times of one machine by digest, alone and under contention, and why others are unknown."""

    machine: MachineFacts
    code: TargetCode
    ceilings: CeilingCode | None
    cache: Store
    companions: tuple[str, ...]
    alone: dict[str, CachedTime] = field(default_factory=dict)
    contended: dict[str, CachedTime] = field(default_factory=dict)
    ceiling_times: dict[str, CachedTime] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)
    doubt: str = ""

    @property
    def name(self) -> str:
        return self.machine.name

    def recall(self) -> None:
        """Load the times that the cache has."""
        for digest in self.code.distinct:
            for times, companions in ((self.alone, ()), (self.contended, self.companions)):
                found = self.cache.get(self._key(digest, companions), _CACHED_TIME)
                if found is not None:
                    times[digest] = found
        for digest in self.ceilings.kernels if self.ceilings is not None else ():
            found = self.cache.get(self._ceiling_key(digest), _CACHED_TIME)
            if found is not None:
                self.ceiling_times[digest] = found

    @property
    def checked_kernel(self) -> str | None:
        """Digest of the kernel with the longest cached time, or None; a new measurement of it validates the cache."""
        return max(self.alone.keys() & self.timeable, key=lambda each: self.alone[each].seconds, default=None)

    def is_consistent(self, now: KernelTime) -> bool:
        """Whether the new time of the `checked_kernel` agrees with the known one; an error counts as agreement."""
        known = self.alone[self.checked_kernel or ""].seconds
        return bool(now.error) or known / CHANGED <= now.seconds <= known * CHANGED

    def forget(self) -> None:
        """Discard all known kernel times."""
        self.alone.clear()
        self.contended.clear()

    @property
    def known(self) -> frozenset[str]:
        """Digests of the kernels whose times alone and under contention are known."""
        return frozenset(self.alone.keys() & self.contended.keys())

    @property
    def missing(self) -> frozenset[str]:
        """Digests of the kernels that can be timed and lack a time."""
        return self.timeable - self.known

    @property
    def timeable(self) -> frozenset[str]:
        room = self.machine.memory_free_bytes or float("inf")
        return frozenset(
            digest
            for digest in self.code.distinct
            if digest not in self.code.untimeable and self.code.timed(digest).size_bytes < MOST_OF_MEMORY * room
        )

    @property
    def kind(self) -> tuple[int, str]:
        """Key that is equal for machines that run the same code on identical processors of one host."""
        return id(self.code), json.dumps({**self.machine.identity, "machine": ""}, sort_keys=True)

    @property
    def lacks_ceilings(self) -> bool:
        return self.ceilings is not None and len(self.ceiling_times) < len(self.ceilings.kernels)

    def kernel_set(self, digests: frozenset[str], library: BlobSpec) -> KernelSet:
        ordered = [digest for digest in self.code.distinct if digest in digests]
        room = self.machine.memory_free_bytes
        weight_bytes = min(self.code.weight_bytes, int(MOST_OF_MEMORY * room)) if room else self.code.weight_bytes
        kernels = tuple(self.code.timed(digest) for digest in ordered)
        target = target_text(self.code.target)
        return KernelSet(self.machine.name, self.code.device, library, kernels, weight_bytes, target)

    def take(self, times: Sequence[KernelTime], companions: tuple[str, ...], *, is_confirmed: bool) -> None:
        """Use measured times. The cache keeps them if they are confirmed, or faster than the cached ones."""
        by_symbol = {symbol(digest): digest for digest in self.code.distinct}
        found: dict[str, CachedTime] = {}
        for each in times:
            digest = by_symbol[each.function]
            if each.error:
                self.problems[digest] = each.error
            else:
                found[digest] = CachedTime(each.seconds, time.time())
        (self.contended if companions else self.alone).update(found)
        if not self.companions:
            self.contended.update(found)
        self.measured |= found.keys()
        kept = {self._key(digest, companions): each for digest, each in found.items()}
        self.cache.put({key: each for key, each in kept.items() if is_confirmed or self._is_faster(key, each)})

    def _is_faster(self, key: str, found: CachedTime) -> bool:
        known = self.cache.get(key, _CACHED_TIME)
        return known is not None and found.seconds < known.seconds

    @property
    def whole_seconds(self) -> float:
        """Total seconds of all known kernels, each once."""
        return sum(each.seconds for each in self.alone.values())

    def take_from(self, equal: MachineTimes) -> None:
        """Use the measured times of an identical machine, and keep them in the cache unless they are doubtful."""
        for own, others, companions in (
            (self.alone, equal.alone, ()),
            (self.contended, equal.contended, self.companions),
        ):
            found = {digest: others[digest] for digest in equal.measured & others.keys()}
            own.update(found)
            if not equal.doubt:
                self.cache.put({self._key(digest, companions): each for digest, each in found.items()})
        self.problems.update(equal.problems)
        self.measured |= equal.measured
        self.ceiling_times.update(equal.ceiling_times)
        self.cache.put({self._ceiling_key(digest): each for digest, each in equal.ceiling_times.items()})

    def take_ceilings(self, times: Sequence[KernelTime]) -> None:
        kernels = self.ceilings.kernels if self.ceilings else {}
        by_symbol = {kernel.function: digest for digest, kernel in kernels.items()}
        found = {by_symbol[each.function]: CachedTime(each.seconds, time.time()) for each in times if not each.error}
        self.ceiling_times.update(found)
        self.cache.put({self._ceiling_key(digest): each for digest, each in found.items()})

    def _key(self, digest: str, companions: tuple[str, ...]) -> str:
        # Other cache contents matter only by their size; a power of two is precise enough.
        warmth = self.code.weight_bytes.bit_length() if self.code.distinct[digest].weights else 0
        return entry_key(kernel=digest, target=dict(self.code.target), with_=list(companions), warmth=warmth)

    def _ceiling_key(self, digest: str) -> str:
        return entry_key(ceiling=digest, target=dict(self.code.target))
