"""Known kernel times of one machine: measured now, cached, or taken from an identical machine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

from rpc_runtime.program.kernel_times import KernelSet, KernelTime, TimedKernel
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
    """Known times of one machine by digest, alone and under contention, and why others are unknown.

    The times alone include those of the kernels of ``ceilings``.
    """

    machine: MachineFacts
    code: TargetCode
    ceilings: CeilingCode | None
    cache: Store
    companions: tuple[str, ...]
    alone: dict[str, CachedTime] = field(default_factory=dict)
    contended: dict[str, CachedTime] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)
    doubt: str = ""

    @property
    def name(self) -> str:
        return self.machine.name

    def recall(self) -> None:
        """Load the times that the cache has."""
        for digest in (*self.code.distinct, *self._peaks):
            for times, companions in ((self.alone, ()), (self.contended, self.companions)):
                cached = self.cache.get(self._key(digest, companions), _CACHED_TIME)
                if cached is not None:
                    times[digest] = cached

    @property
    def _peaks(self) -> Mapping[str, TimedKernel]:
        return {} if self.ceilings is None else self.ceilings.kernels

    @property
    def checked_kernel(self) -> str | None:
        """Digest of the kernel with the longest cached time, or None; a new measurement of it validates the cache."""
        return max(self.alone.keys() & self.timeable, key=lambda digest: self.alone[digest].seconds, default=None)

    def is_consistent(self, now: KernelTime) -> bool:
        """Whether the new time of the `checked_kernel` agrees with the known one; an error counts as agreement."""
        cached_seconds = self.alone[self.checked_kernel or ""].seconds
        return bool(now.error) or cached_seconds / CHANGED <= now.seconds <= cached_seconds * CHANGED

    def forget(self) -> None:
        """Discard all known times of the code's kernels."""
        self.alone = {digest: cached for digest, cached in self.alone.items() if digest in self._peaks}
        self.contended.clear()

    @property
    def known(self) -> frozenset[str]:
        """Digests of the kernels whose times alone and under contention are known."""
        return frozenset(self.code.distinct.keys() & self.alone.keys() & self.contended.keys())

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
        return not self._peaks.keys() <= self.alone.keys()

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
        by_symbol |= {kernel.function: digest for digest, kernel in self._peaks.items()}
        new_times: dict[str, CachedTime] = {}
        for kernel_time in times:
            digest = by_symbol[kernel_time.function]
            if kernel_time.error:
                self.problems[digest] = kernel_time.error
            else:
                new_times[digest] = CachedTime(kernel_time.seconds, time.time())
        (self.contended if companions else self.alone).update(new_times)
        if not self.companions:
            self.contended.update(new_times)
        self.measured |= new_times.keys()
        entries = {self._key(digest, companions): cached for digest, cached in new_times.items()}
        self.cache.put({key: cached for key, cached in entries.items() if is_confirmed or self._is_faster(key, cached)})

    def _is_faster(self, key: str, measured: CachedTime) -> bool:
        cached = self.cache.get(key, _CACHED_TIME)
        return cached is not None and measured.seconds < cached.seconds

    @property
    def whole_seconds(self) -> float:
        """Total seconds of all known kernels, each once."""
        return sum(cached.seconds for cached in self.alone.values())

    def take_from(self, equal: MachineTimes) -> None:
        """Use the measured times of an identical machine, and keep them in the cache unless they are doubtful."""
        for own_times, equal_times, companions in (
            (self.alone, equal.alone, ()),
            (self.contended, equal.contended, self.companions),
        ):
            copied = {digest: equal_times[digest] for digest in equal.measured & equal_times.keys()}
            own_times.update(copied)
            if not equal.doubt:
                self.cache.put({self._key(digest, companions): cached for digest, cached in copied.items()})
        self.problems.update(equal.problems)
        self.measured |= equal.measured

    def _key(self, digest: str, companions: tuple[str, ...]) -> str:
        # Other cache contents matter only by their size; a power of two is precise enough.
        has_weights = digest in self.code.distinct and self.code.distinct[digest].weights
        warmth = self.code.weight_bytes.bit_length() if has_weights else 0
        return entry_key(kernel=digest, target=dict(self.code.target), with_=list(companions), warmth=warmth)
