"""Weighted round-robin schedules: which replica of a stage computes which micro-batch.

A schedule is periodic, and all machines know it before the run. The *turns* of a stage are a list of replica numbers:
replica ``turns[s % len(turns)]`` computes micro-batch ``s``. Two thirds for replica 0 and one third for replica 1 are
the turns ``0 1 0``::

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
"""Maximum number of micro-batches after which all turns of a program repeat: 16 turns for each of a thousand replicas.

A route between two replicated stages repeats after the least common multiple of both lengths. Its destinations are
looked up in tables of that length.
"""
DIVISIBLE = 840
"""Shares that are not exact in whole turns get a length that divides this number (all lengths up to 8 do).

So the turns of all such stages repeat together after at most this many micro-batches.
"""
LONGEST = 60
"""Maximum length of turns for few replicas; a share of 1/60 is met exactly."""
LONGEST_PER_REPLICA = 32
"""Maximum length of turns per replica, if that allows more than `LONGEST`.

With many replicas an even share is already small, and results wait about as long for the slowest replica's turn.
"""
WHOLE = 1e-12
"""Tolerance for shares that are exact in whole turns; the rounding error of computed shares is smaller."""
CLOSE = 0.01
"""A shorter list of turns is preferred if it gives a replica at most this fraction more work than the best list."""


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
        return sequence % self.period in self._places

    @cached_property
    def _places(self) -> frozenset[int]:
        return frozenset(self.remainders)

    @property
    def share(self) -> float:
        """The fraction of all micro-batches that are in this set."""
        return len(self.remainders) / self.period

    def nth(self, number: int) -> int:
        """Return the micro-batch that has ``number`` micro-batches of this set before it."""
        rounds, place = divmod(number, len(self.remainders))
        return rounds * self.period + self.remainders[place]

    def count_before(self, sequence: int) -> int:
        """Return how many micro-batches of this set come before micro-batch ``sequence``."""
        rounds, rest = divmod(sequence, self.period)
        return rounds * len(self.remainders) + bisect_left(self.remainders, rest)

    def within(self, period: int) -> list[int]:
        """Return the micro-batches below ``period``, ascending; ``period`` is a multiple of this set's period."""
        return [start + place for start in range(0, period, self.period) for place in self.remainders]

    def __and__(self, other: Recurrence) -> Recurrence | None:
        """Return the micro-batches that are in both, or None; raise `ValueError` if the period is too long."""
        period = cycle_of((self.period, other.period))
        rare, frequent = sorted((self, other), key=lambda recurrence: recurrence.share)
        remainders = tuple(place for place in rare.within(period) if place in frequent)
        return Recurrence(period, remainders) if remainders else None

    def __or__(self, other: Recurrence) -> Recurrence:
        """Return the micro-batches that are in one or both; raise `ValueError` if the period is too long."""
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
                f"turns repeat together after more than {LONGEST_CYCLE} micro-batches: give the stages with replicas "
                "lists of turns whose lengths have common divisors, by shares that are multiples of one fraction"
            )
    return cycle


def turns_of(replica: int, turns: Sequence[int]) -> Recurrence:
    """Return the micro-batches of one replica; raise `ValueError` if it has no turn, or the turns are too long."""
    is_valid = len(turns) <= LONGEST_CYCLE  # else Recurrence raises; do not cache it
    return Recurrence(len(turns), _places(tuple(turns)).get(replica, ()) if is_valid else ())


@lru_cache(maxsize=8)
def _places(turns: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
    """Return each replica's positions in the turns; cached, since a thousand replicas may ask for theirs."""
    by_replica: dict[int, list[int]] = {}
    for place, replica in enumerate(turns):
        by_replica.setdefault(replica, []).append(place)
    return {replica: tuple(places) for replica, places in by_replica.items()}


def longest_turns(replicas: int) -> int:
    """Return the maximum length of turns for a number of replicas."""
    return min(max(LONGEST, LONGEST_PER_REPLICA * replicas), LONGEST_CYCLE)


def turns_by_share(shares: Sequence[float]) -> tuple[int, ...]:
    """Return turns that give each replica its share of the micro-batches, as evenly as whole micro-batches allow.

    ``shares`` are positive weights. If some length up to `longest_turns` meets them exactly, the shortest such length
    is used. Otherwise the length is a divisor of `DIVISIBLE` up to that maximum, with the least excess of any replica
    over its share; of those within `CLOSE` of it, the shortest. Over this length each replica has its share to within
    one micro-batch. At any time in a stream, its number of turns so far is within one of its part of the turns. (That
    this can be done: Tijdeman 1980, "The chairman assignment problem"; by earliest deadline first: Baruah et al. 1996,
    "Proportionate progress".)

    Raises:
        ValueError: no shares, one that is not positive, or one too small for a single turn.
    """
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"shares are positive numbers, one for each replica, not {list(shares)}")
    exact = whole_turns(shares)
    if exact is not None:
        return _interleave(exact)
    whole = math.fsum(shares)
    lengths = [length for length in range(1, min(longest_turns(len(shares)), DIVISIBLE) + 1) if DIVISIBLE % length == 0]
    smallest = min(shares) / whole
    if smallest * lengths[-1] < 1 - 1e-9:
        raise ValueError(
            f"the share {smallest:.3g} of replica {shares.index(min(shares))} is less than one turn of "
            f"{lengths[-1]}: leave that replica out, or give it a larger share"
        )
    candidates = [counts for length in lengths if all(counts := _apportion(shares, length))]
    excess = [max(n * whole / (sum(counts) * s) for n, s in zip(counts, shares, strict=True)) for counts in candidates]
    good_enough = min(excess) * (1 + CLOSE)
    return _interleave(next(counts for counts, most in zip(candidates, excess, strict=True) if most <= good_enough))


def whole_turns(shares: Sequence[float]) -> tuple[int, ...] | None:
    """Return each replica's number of turns for the shortest length that meets all shares exactly, or None.

    The length is at most `longest_turns`.
    """
    maximum_length = longest_turns(len(shares))
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


def _interleave(counts: Sequence[int]) -> tuple[int, ...]:
    """Return turns with each replica as often as in ``counts``.

    The n-th of a replica's c turns lies in the n-th of c equal intervals of the length.
    """
    length = sum(counts)
    placed = [0] * len(counts)
    turns: list[int] = []
    # waiting: (release time, replica). ready: (deadline, release time, replica), so that ties go to the longest wait.
    waiting = [(0, replica) for replica in range(len(counts))]
    ready: list[tuple[int, int, int]] = []
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            replica = heappop(waiting)[1]
            count, number = counts[replica], placed[replica]
            heappush(ready, (-(-(number + 1) * length // count), number * length // count, replica))
        replica = heappop(ready)[2]
        placed[replica] += 1
        heappush(waiting, (-(-placed[replica] * length // counts[replica]), replica))
        turns.append(replica)
    return tuple(turns)
