"""The clock of another machine, estimated from the round trips of questions.

The answer to a question was written at some moment of the round trip; taking the middle errs by at most half of it
(Cristian, Probabilistic clock synchronization, 1989). Between two samples the offset changes evenly, because quartz
drifts slowly.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BUCKET_NANOSECONDS = 2_000_000_000
"""Only the sample with the smallest error in each interval of this length is kept."""
MOST_BUCKETS = 1000
"""After so many samples, every second one is dropped: for the first time after half an hour."""
DRIFT = 250e-6
"""Largest drift of two clocks without a sample nearby: quartz is specified to 100 ppm and less, on each side."""

Nanoseconds = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class ClockSample:
    """A machine's clock, at ``machine_nanoseconds``, was ``offset_nanoseconds`` ahead of the reader's."""

    machine_nanoseconds: int
    offset_nanoseconds: int
    error_nanoseconds: int

    @classmethod
    def of_round_trip(cls, asked: int, answered: int, machine_nanoseconds: int) -> "ClockSample":
        """Return the sample of a round trip from ``asked`` to ``answered`` (nanoseconds of the reader's clock)."""
        return cls(machine_nanoseconds, machine_nanoseconds - (asked + answered) // 2, -(-(answered - asked) // 2))


@dataclass
class MachineClock:
    """A machine's clock relative to the reader's; without samples, both are the same clock."""

    samples: list[ClockSample] = field(default_factory=list)

    def add(self, sample: ClockSample) -> None:
        """Keep a sample if it is the best one of its interval of `BUCKET_NANOSECONDS`, and not older than the last."""
        if self.samples and sample.machine_nanoseconds < self.samples[-1].machine_nanoseconds:
            return  # answers that overtook each other
        bucket = sample.machine_nanoseconds // BUCKET_NANOSECONDS
        if not self.samples or self.samples[-1].machine_nanoseconds // BUCKET_NANOSECONDS != bucket:
            self.samples.append(sample)
        elif sample.error_nanoseconds < self.samples[-1].error_nanoseconds:
            self.samples[-1] = sample
        if len(self.samples) > MOST_BUCKETS:
            self.samples[:] = self.samples[::2]

    def of_reader(self, times: Nanoseconds) -> Nanoseconds:
        """Return times of the machine's clock, converted to the reader's clock."""
        if not self.samples:
            return times
        moments, offsets, _ = self._columns()
        # Relative to the first sample, since nanoseconds since a host's start may have more digits than a float64.
        estimated = np.interp((times - moments[0]).astype(float), moments - moments[0], offsets - offsets[0])
        aligned: Nanoseconds = times - (offsets[0] + np.rint(estimated).astype(np.int64))
        return aligned

    def errors(self, times: Nanoseconds) -> Nanoseconds:
        """Return an upper bound of the error of `of_reader` for each time, in nanoseconds."""
        if not self.samples:
            return np.zeros(len(times), np.int64)
        moments, _, errors = self._columns()
        following = np.searchsorted(moments, times)
        before, after = np.clip([following - 1, following], 0, len(moments) - 1)
        distances = np.minimum(np.abs(times - moments[before]), np.abs(times - moments[after]))
        drifted = np.ceil(DRIFT * distances).astype(np.int64)
        bound: Nanoseconds = np.maximum(errors[before], errors[after]) + drifted
        return bound

    def _columns(self) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
        rows = [(s.machine_nanoseconds, s.offset_nanoseconds, s.error_nanoseconds) for s in self.samples]
        moments, offsets, errors = np.array(rows, np.int64).T
        return moments, offsets, errors


def shifts(waits: Iterable[tuple[str, str, int]], fixed: Iterable[str]) -> dict[str, int]:
    """Return the nanoseconds to add to each machine's times, so that no tensor arrives before it is sent.

    ``waits`` are (source, destination, least time from the start of a send to the end of its receive); one below 0 is
    impossible. ``fixed`` machines keep their clock. The shifts are the smallest by the method of Bellman and Ford; the
    number of its rounds is bounded, so that wrong times of a machine cannot make it run forever.
    """
    listed, kept = [*waits], frozenset(fixed)
    later: dict[str, int] = {}
    for _ in range(len(listed) + 1):
        for source, destination, least in listed:
            lacking = -(least + later.get(destination, 0) - later.get(source, 0))
            if lacking > 0 and destination not in kept:
                later[destination] = later.get(destination, 0) + lacking
            elif lacking > 0 and source not in kept:
                later[source] = later.get(source, 0) - lacking
    return later
