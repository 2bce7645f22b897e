"""Weighted round-robin schedules: which replica of a stage computes which micro-batch.

A schedule is a list of replica numbers that repeats, and all machines know it before the run: replica
``schedule[s % len(schedule)]`` computes micro-batch ``s``. The *weight* of a replica is how often it is in the list.
Two thirds for replica 0 and one third for replica 1 are the schedule ``0 1 0`` with the weights 2 and 1::

    micro-batch   0   1   2   3   4   5   6
    replica 0     a0  .   a2  a3  .   a5  a6
    replica 1     .   a1  .   .   a4  .   .
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from heapq import heappop, heappush

LONGEST_CYCLE = 16_384
"""Maximum number of micro-batches after which all schedules of a program repeat: 16 each for a thousand replicas.

A route between two replicated stages repeats after the least common multiple of both lengths. Its destinations are
looked up in tables of that length.
"""
DIVISIBLE = 840
"""Shares that no short schedule meets exactly get a length that divides this number (all lengths up to 8 do).

So the schedules of all such stages repeat together after at most this many micro-batches.
"""
LONGEST = 60
"""Maximum length of a schedule for few replicas; a share of 1/60 is met exactly."""
LONGEST_PER_REPLICA = 32
"""Maximum length of a schedule per replica, if that allows more than `LONGEST`.

With many replicas an even share is already small, and results wait about as long for the slowest replica.
"""
WHOLE = 1e-12
"""Tolerance for shares that a schedule meets exactly; the rounding error of computed shares is smaller."""
CLOSE = 0.01
"""A shorter schedule is preferred if it gives a replica at most this fraction more work than the best one."""


@dataclass(frozen=True)
class Recurrence:
    """The micro-batches whose number modulo ``period`` is in ``remainders``, which ascend."""

    period: int
    remainders: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.period <= LONGEST_CYCLE:
            raise ValueError(f"micro-batches recur with a period of 1 to {LONGEST_CYCLE}, not {self.period}")
        ascending = all(a < b for a, b in zip(self.remainders, self.remainders[1:], strict=False))
        if not self.remainders or not ascending or self.remainders[0] < 0 or self.remainders[-1] >= self.period:
            raise ValueError(
                f"micro-batches recur with remainders that ascend from 0 to {self.period - 1} at most, "
                f"not {self.remainders}"
            )

    def __contains__(self, sequence: int) -> bool:
        return sequence % self.period in self._remainders

    @cached_property
    def _remainders(self) -> frozenset[int]:
        return frozenset(self.remainders)

    @property
    def share(self) -> float:
        """The fraction of all micro-batches that are in this set."""
        return len(self.remainders) / self.period

    def nth(self, number: int) -> int:
        """Return the micro-batch that has ``number`` micro-batches of this set before it."""
        rounds, position = divmod(number, len(self.remainders))
        return rounds * self.period + self.remainders[position]

    def count_before(self, sequence: int) -> int:
        """Return how many micro-batches of this set come before micro-batch ``sequence``."""
        rounds, rest = divmod(sequence, self.period)
        return rounds * len(self.remainders) + bisect_left(self.remainders, rest)

    def within(self, period: int) -> list[int]:
        """Return the micro-batches below ``period``, ascending; ``period`` is a multiple of this set's period."""
        return [start + rest for start in range(0, period, self.period) for rest in self.remainders]

    def __and__(self, other: Recurrence) -> Recurrence | None:
        """Return the micro-batches in both sets (None: there are none); raise `ValueError` for too long a period."""
        period = cycle_of((self.period, other.period))
        rare, frequent = sorted((self, other), key=lambda recurrence: recurrence.share)
        remainders = tuple(sequence for sequence in rare.within(period) if sequence in frequent)
        return Recurrence(period, remainders) if remainders else None

    def __or__(self, other: Recurrence) -> Recurrence:
        """Return the micro-batches that are in one or both sets; raise `ValueError` if the period is too long."""
        period = cycle_of((self.period, other.period))
        return Recurrence(period, tuple(sorted({*self.within(period), *other.within(period)})))

    @property
    def longest_gap(self) -> int:
        """The largest distance between successive micro-batches of this set."""
        following = (*self.remainders[1:], self.remainders[0] + self.period)
        return max(later - earlier for earlier, later in zip(self.remainders, following, strict=True))

    def most_in(self, window: int) -> int:
        """Return the maximum number of this set's micro-batches among ``window`` in a row."""
        return max(self.count_before(start + window) - self.count_before(start) for start in self.remainders)


EVERY = Recurrence(1, (0,))
"""Every micro-batch."""


def cycle_of(periods: Iterable[int]) -> int:
    """Return the least common multiple of the periods; raise `ValueError` if it is above `LONGEST_CYCLE`."""
    cycle = 1
    for period in periods:
        cycle = math.lcm(cycle, period)
        if cycle > LONGEST_CYCLE:
            raise ValueError(
                f"the schedules repeat together after more than {LONGEST_CYCLE} micro-batches: give the stages with "
                "replicas schedules whose lengths have common divisors, by shares that are multiples of one fraction"
            )
    return cycle


def micro_batches_of(replica: int, schedule: Sequence[int]) -> Recurrence:
    """Return the micro-batches of one replica; raise `ValueError` if it has none, or the schedule is too long."""
    is_valid = len(schedule) <= LONGEST_CYCLE  # else Recurrence raises; do not cache it
    return Recurrence(len(schedule), _positions(tuple(schedule)).get(replica, ()) if is_valid else ())


@lru_cache(maxsize=8)
def _positions(schedule: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
    """Return each replica's positions in the schedule; cached, since a thousand replicas may ask for theirs."""
    by_replica: dict[int, list[int]] = {}
    for position, replica in enumerate(schedule):
        by_replica.setdefault(replica, []).append(position)
    return {replica: tuple(positions) for replica, positions in by_replica.items()}


def longest_schedule(replicas: int) -> int:
    """Return the maximum length of the schedule of a number of replicas."""
    return min(max(LONGEST, LONGEST_PER_REPLICA * replicas), LONGEST_CYCLE)


def schedule_by_share(shares: Sequence[float]) -> tuple[int, ...]:
    """Return the schedule that gives each replica its share of the micro-batches as evenly as possible.

    ``shares`` are positive numbers. If some length up to `longest_schedule` meets them exactly, the shortest of these
    is used. Otherwise the length is a divisor of `DIVISIBLE` up to that maximum: the shortest one within `CLOSE` of the
    best. The best length has the least excess of a replica's part of the schedule over its share. Each replica has its
    share of the schedule to within one micro-batch. At any time in a stream, it has had its part of the micro-batches
    so far, also to within one. (That this can be done: Tijdeman 1980, "The chairman assignment problem"; by earliest
    deadline first: Baruah et al. 1996, "Proportionate progress".)

    Raises:
        ValueError: no shares, one that is not positive, or one too small for a single micro-batch.
    """
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"shares are positive numbers, one for each replica, not {list(shares)}")
    exact = integer_weights(shares)
    if exact is not None:
        return _interleave(exact)
    whole = math.fsum(shares)
    lengths = [
        length for length in range(1, min(longest_schedule(len(shares)), DIVISIBLE) + 1) if DIVISIBLE % length == 0
    ]
    smallest = min(shares) / whole
    if smallest * lengths[-1] < 1 - 1e-9:
        raise ValueError(
            f"the share {smallest:.3g} of replica {shares.index(min(shares))} is less than one micro-batch of "
            f"{lengths[-1]}: leave that replica out, or give it a larger share"
        )
    candidates = [counts for length in lengths if all(counts := _apportion(shares, length))]
    excess = [max(n * whole / (sum(counts) * s) for n, s in zip(counts, shares, strict=True)) for counts in candidates]
    good_enough = min(excess) * (1 + CLOSE)
    return _interleave(next(counts for counts, most in zip(candidates, excess, strict=True) if most <= good_enough))


def integer_weights(shares: Sequence[float]) -> tuple[int, ...] | None:
    """Return the weights of the shortest schedule that meets all shares exactly; None if it would be too long."""
    maximum_length = longest_schedule(len(shares))
    whole, length, parts = math.fsum(shares), 1, []
    for share in shares:
        part = Fraction(share / whole).limit_denominator(maximum_length)
        length = math.lcm(length, part.denominator)
        if abs(float(part) - share / whole) > WHOLE or length > maximum_length:
            return None
        parts.append(part)
    counts = tuple(int(part * length) for part in parts)
    return counts if all(counts) and sum(counts) == length else None


def _apportion(shares: Sequence[float], length: int) -> tuple[int, ...]:
    """Return whole counts that add up to ``length``, by the largest remainder method."""
    whole = math.fsum(shares)
    ideal = [length * share / whole for share in shares]
    counts = [math.floor(count + 1e-9) for count in ideal]
    by_remainder = sorted(range(len(shares)), key=lambda replica: counts[replica] - ideal[replica])
    for replica in by_remainder[: length - sum(counts)]:
        counts[replica] += 1
    return tuple(counts)


def _interleave(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the schedule of these weights, by earliest deadline first.

    The n-th position of a replica of weight w lies in the n-th of w equal intervals of the length.
    """
    length = sum(weights)
    placed = [0] * len(weights)
    schedule: list[int] = []
    # waiting: (release time, replica). ready: (deadline, release time, replica), so that ties go to the longest wait.
    waiting = [(0, replica) for replica in range(len(weights))]
    ready: list[tuple[int, int, int]] = []
    for position in range(length):
        while waiting and waiting[0][0] <= position:
            replica = heappop(waiting)[1]
            weight, number = weights[replica], placed[replica]
            heappush(ready, (-(-(number + 1) * length // weight), number * length // weight, replica))
        replica = heappop(ready)[2]
        placed[replica] += 1
        heappush(waiting, (-(-placed[replica] * length // weights[replica]), replica))
        schedule.append(replica)
    return tuple(schedule)
