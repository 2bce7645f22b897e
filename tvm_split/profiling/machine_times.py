"""Known kernel times of one machine: measured, cached, or of an identical machine."""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

from rpc_runtime.program.measurements import KernelSet, KernelTime
from rpc_runtime.program.specs import BlobSpec
from tvm_split.compiler.stage import Kernel
from tvm_split.compiler.targets import target_text
from tvm_split.errors import ProfileError
from tvm_split.placement.estimate import Roofline
from tvm_split.placement.profile import SHORTEST_SECONDS, PieceTime
from tvm_split.profiling.kernels import KernelCall, TargetCode
from tvm_split.profiling.machine_facts import MachineFacts
from tvm_split.profiling.store import Store, entry_key
from tvm_split.units import count_text

MOST_OF_MEMORY = 0.5
"""Largest share of the free memory that the arguments of a kernel, or all weights, may take."""
UNKNOWN_ERROR = 0.5
"""Error of an estimate by nothing but other rules: their slowness differs by a factor of about two."""
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

    Contention is with ``companions``; a machine without any is always alone. The times alone include those of the
    kernels of ``peaks``; a GPU has none. ``late`` are kernels that were not compiled in time. ``is_outdated`` says that
    a check has found other times than the cached ones.
    """

    machine: MachineFacts
    code: TargetCode
    peaks: TargetCode
    cache: Store
    companions: tuple[str, ...]
    problems: dict[str, str] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)
    doubt: str = ""
    late: frozenset[str] = frozenset()
    is_outdated: bool = False
    _times: dict[tuple[str, ...], dict[str, CachedTime]] = field(init=False)

    def __post_init__(self) -> None:
        self._times = {(): {}, self.companions: {}}

    @property
    def alone(self) -> dict[str, CachedTime]:
        return self._times[()]

    @property
    def contended(self) -> dict[str, CachedTime]:
        return self._times[self.companions]

    @property
    def name(self) -> str:
        return self.machine.name

    def recall(self) -> None:
        """Load the times that the cache has."""
        for companions, times in self._times.items():
            for digest in (*self.code.distinct, *self.peaks.distinct):
                cached = self.cache.get(self._key(digest, companions), _CACHED_TIME)
                if cached is not None:
                    times[digest] = cached

    @property
    def kept(self) -> dict[str, float]:
        """Seconds by key that the cache has; none if they are outdated and were not measured again."""
        if self.is_outdated and not self.measured:
            return {}
        digests = (*self.code.distinct, *self.peaks.distinct)
        keys = [self._key(digest, companions) for companions in self._times for digest in digests]
        return {key: kept.seconds for key in keys if (kept := self.cache.get(key, _CACHED_TIME)) is not None}

    @property
    def checked_kernel(self) -> str | None:
        """Digest of the kernel with the longest cached time, to be measured again as a check of the cache; or None."""
        return max(self.alone.keys() & self.timeable, key=lambda digest: self.alone[digest].seconds, default=None)

    def is_consistent(self, digest: str, now: KernelTime) -> bool:
        """Whether the new time of a kernel agrees with the known one; an error counts as agreement."""
        cached_seconds = self.alone[digest].seconds
        return bool(now.error) or cached_seconds / CHANGED <= now.seconds <= cached_seconds * CHANGED

    def forget(self) -> None:
        """Discard all known times of the code's kernels, which are outdated."""
        self.is_outdated = True
        for times in self._times.values():
            for digest in times.keys() - self.peaks.distinct.keys():
                del times[digest]

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
        free_bytes = self.machine.memory_free_bytes or float("inf")
        return frozenset(
            digest
            for digest in self.code.distinct
            if digest not in self.code.untimeable | self.late
            and self.code.distinct[digest].timed.size_bytes < MOST_OF_MEMORY * free_bytes
        )

    @property
    def device_class(self) -> tuple[int, str]:
        """Key that is equal for machines that run the same code on identical processors of one host."""
        return id(self.code), json.dumps({**self.machine.identity, "machine": ""}, sort_keys=True)

    @property
    def lacks_peaks(self) -> bool:
        return not self.peaks.distinct.keys() <= self.alone.keys()

    def kernel_set(self, code: TargetCode, digests: frozenset[str], library: BlobSpec) -> KernelSet:
        """Return the kernels of ``code`` (the model's or the peaks') with these digests, to be timed in ``library``."""
        free_bytes = self.machine.memory_free_bytes
        weight_bytes = min(code.weight_bytes, int(MOST_OF_MEMORY * free_bytes)) if free_bytes else code.weight_bytes
        kernels = tuple(call.timed for digest, call in code.distinct.items() if digest in digests)
        return KernelSet(self.machine.name, code.device, library, kernels, weight_bytes, target_text(code.target))

    def add_measured(self, times: Sequence[KernelTime], companions: tuple[str, ...], *, is_confirmed: bool) -> None:
        """Add times measured with ``companions``; cache those that are confirmed or faster than the cached ones."""
        new_times: dict[str, CachedTime] = {}
        for kernel_time in times:
            digest = kernel_time.function
            if kernel_time.error:
                self.problems[digest] = kernel_time.error
            else:
                new_times[digest] = CachedTime(kernel_time.seconds, time.time())
        self._times[companions].update(new_times)
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

    def copy_from(self, identical: MachineTimes) -> None:
        """Use the measured times of an identical machine, and keep them in the cache unless they are doubtful."""
        for (companions, times), identical_times in zip(self._times.items(), identical._times.values(), strict=True):
            copied = {digest: identical_times[digest] for digest in identical.measured & identical_times.keys()}
            times.update(copied)
            if not identical.doubt:
                self.cache.put({self._key(digest, companions): cached for digest, cached in copied.items()})
        self.problems.update(identical.problems)
        self.measured |= identical.measured

    def _key(self, digest: str, companions: tuple[str, ...]) -> str:
        # Other cache contents matter only by their size; a power of two is precise enough.
        has_weights = digest in self.code.distinct and self.code.distinct[digest].weights
        warmth = self.code.weight_bytes.bit_length() if has_weights else 0
        return entry_key(kernel=digest, target=dict(self.code.target), with_=list(companions), warmth=warmth)


@dataclass(frozen=True)
class Family:
    """The measured kernels of one schedule rule.

    ``slowness`` is the ratio of their time to a roofline of the machine's peaks. ``error`` is the mean distance of the
    single kernels from it, as a share of it, and `UNKNOWN_ERROR` by their number.
    """

    slowness: float
    error: float

    @classmethod
    def of(cls, times: Sequence[tuple[float, float]]) -> Family:
        """Return the family of kernels with these times: (measured, roofline) seconds of each."""
        whole = sum(roofline for _, roofline in times)
        slowness = sum(measured for measured, _ in times) / whole
        error = sum(abs(measured / slowness - roofline) for measured, roofline in times) / whole
        return cls(slowness, error + UNKNOWN_ERROR / len(times))


class CallSeconds:
    """Seconds of kernel calls on a machine, alone and under contention: measured, else estimated.

    The estimate is a roofline of the machine's peaks, times the slowness of the kernel's `Family`, if a kernel of it
    was measured, else of all measured kernels.

    Raises:
        ProfileError: nothing could be measured on the machine.
    """

    def __init__(self, times: MachineTimes) -> None:
        self._times = times
        self.peaks = _peaks(times)
        known_digests = [digest for digest in times.code.distinct if digest in times.known]
        alone = sum(times.alone[digest].seconds for digest in known_digests)
        self._contention = (
            sum(times.contended[digest].seconds for digest in known_digests) / alone if known_digests else 1.0
        )
        measured: dict[str, list[tuple[float, float]]] = {}
        for digest in known_digests:
            kernel = times.code.distinct[digest].kernel
            pair = times.alone[digest].seconds, self._roofline(kernel)
            measured.setdefault(kernel.rule, []).append(pair)
            measured.setdefault("", []).append(pair)
        self._families = {rule: Family.of(pairs) for rule, pairs in measured.items()}

    def of(self, calls: Sequence[KernelCall]) -> PieceTime:
        """Return the time of calls that run one after the other."""
        call_times = [self._of_call(call) for call in calls]
        alone, contended = (
            max(sum(call_time[place] for call_time in call_times), SHORTEST_SECONDS) for place in (0, 1)
        )
        all_known = all(call.digest in self._times.known for call in calls)
        # Contention never makes kernels faster: a longer time alone was disturbed.
        return PieceTime(min(alone, contended), contended, "measured" if all_known else "estimated")

    def _of_call(self, call: KernelCall) -> tuple[float, float]:
        if call.digest in self._times.known:
            alone, contended = (times[call.digest].seconds for times in (self._times.alone, self._times.contended))
            return alone, contended
        seconds = self._roofline(call.kernel) * self._family(call.kernel).slowness
        return seconds, seconds * self._contention

    def _roofline(self, kernel: Kernel) -> float:
        return max(self.peaks.seconds(kernel.operations, kernel.moved_bytes), SHORTEST_SECONDS)

    def _family(self, kernel: Kernel) -> Family:
        if kernel.rule in self._families:
            return self._families[kernel.rule]
        whole = self._families.get("", Family(1.0, 0.0))
        return Family(whole.slowness, whole.error + UNKNOWN_ERROR)

    @property
    def estimates(self) -> str:
        """A sentence about the kernels that were not timed although they could be; empty if there are none."""
        code, known = self._times.code, self._times.known
        untimed = [call for call in code.calls if call.digest not in known | code.untimeable]
        if not untimed:
            return ""
        seconds = [self._of_call(call)[0] for call in untimed]
        errors = [self._family(call.kernel).error for call in untimed]
        error = sum(map(operator.mul, seconds, errors)) / sum(seconds)
        share = sum(seconds) / sum(self._of_call(call)[0] for call in code.calls)
        kernels = f"{len({call.digest for call in untimed})} of {count_text(len(code.distinct), 'kernel')}"
        return (
            f"{kernels} were not timed on {self._times.name}, {share:.1%} of its time; they are estimated by others of "
            f"their kind, with an error of {error:.0%}: `tvm-split plan`, or --refresh, times more of them"
        )


def _peaks(times: MachineTimes) -> Roofline:
    """Return peak operations and bytes per second: measured, or else the best that any kernel reached."""
    code = times.code if not times.peaks.calls or times.lacks_peaks else times.peaks
    measured_rates = [
        (call.kernel.operations / seconds, call.kernel.moved_bytes / seconds)
        for digest, call in code.distinct.items()
        if digest in times.alone and (seconds := times.alone[digest].seconds)
    ]
    if not measured_rates:
        reasons = "; ".join(sorted(set(times.problems.values()))) or "none of its kernels can be timed"
        raise ProfileError(f"nothing could be measured on machine {times.machine.name!r}: {reasons}")
    return Roofline(*(max(rates) for rates in zip(*measured_rates, strict=True)))
