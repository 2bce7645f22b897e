"""Which replica of a stage computes which micro-batch: a pattern that repeats, and that every machine knows beforehand.

The *turns* of a stage are a list of replica numbers: micro-batch ``s`` is computed by ``turns[s % len(turns)]``. Two
thirds for replica 0 and one third for replica 1 are the turns ``0 1 0``::

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
"""After so many micro-batches at most all turns of a program repeat: 16 turns for each of a thousand replicas.

A route between two replicated stages repeats after the least common multiple of both lengths, and what goes where is
looked up in tables of that length.
"""
DIVISIBLE = 840
"""Shares that are no whole turns get a length that divides this (all up to 8 do): so these repeat together after so
many, whatever the stages."""
LONGEST = 60
"""Turns are so long at most, a share of 1/60 is met exactly,"""
LONGEST_PER_REPLICA = 32
"""or so long for each replica: of many an even share is small already, and results wait for the slowest one's turn
about as long anyway."""
WHOLE = 1e-12
"""What shares are whole turns of a length up to; computing them rounds by less."""
CLOSE = 0.01
"""A shorter list of turns is preferred if no replica has more work by it than by the best list, up to this share."""


@dataclass(frozen=True)
class Recurrence:
    """Micro-batches that recur: those whose number modulo ``period`` is in ``remainders``, which ascend."""

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
        """Of all micro-batches."""
        return len(self.remainders) / self.period

    def nth(self, number: int) -> int:
        """The micro-batch that has ``number`` of these before it."""
        rounds, place = divmod(number, len(self.remainders))
        return rounds * self.period + self.remainders[place]

    def count_before(self, sequence: int) -> int:
        """How many of these come before micro-batch ``sequence``."""
        rounds, rest = divmod(sequence, self.period)
        return rounds * len(self.remainders) + bisect_left(self.remainders, rest)

    def within(self, period: int) -> list[int]:
        """Those below ``period``, a multiple of this one's own, ascending."""
        return [start + place for start in range(0, period, self.period) for place in self.remainders]

    def __and__(self, other: Recurrence) -> Recurrence | None:
        """The micro-batches that are in both, if there are any; a `ValueError` if they repeat after too many."""
        period = cycle_of((self.period, other.period))
        rare, frequent = sorted((self, other), key=lambda each: each.share)
        remainders = tuple(place for place in rare.within(period) if place in frequent)
        return Recurrence(period, remainders) if remainders else None

    def __or__(self, other: Recurrence) -> Recurrence:
        """The micro-batches that are in one of the two, or in both; a `ValueError` if they repeat after too many."""
        period = cycle_of((self.period, other.period))
        return Recurrence(period, tuple(sorted({*self.within(period), *other.within(period)})))

    @property
    def longest_gap(self) -> int:
        """The largest distance from one of these to the next."""
        following = (*self.remainders[1:], self.remainders[0] + self.period)
        return max(later - earlier for earlier, later in zip(self.remainders, following, strict=True))

    def most_in(self, window: int) -> int:
        """The most of these among ``window`` micro-batches in a row."""
        return max(self.count_before(start + window) - self.count_before(start) for start in self.remainders)


EVERY = Recurrence(1, (0,))
"""Every micro-batch."""


def cycle_of(periods: Iterable[int]) -> int:
    """After how many micro-batches all of these repeat; a `ValueError` if that is more than `LONGEST_CYCLE`."""
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
    """The micro-batches of one replica; a `ValueError` if it has no turn."""
    known = len(turns) <= LONGEST_CYCLE  # else it is refused, and not kept
    return Recurrence(len(turns), _places(tuple(turns)).get(replica, ()) if known else ())


@lru_cache(maxsize=8)
def _places(turns: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
    """Of each replica: a thousand of them ask for their own."""
    found: dict[int, list[int]] = {}
    for place, replica in enumerate(turns):
        found.setdefault(replica, []).append(place)
    return {replica: tuple(places) for replica, places in found.items()}


def longest_turns(replicas: int) -> int:
    """Turns of so many replicas are no longer."""
    return min(max(LONGEST, LONGEST_PER_REPLICA * replicas), LONGEST_CYCLE)


def turns_by_share(shares: Sequence[float], maximum_length: int | None = None) -> tuple[int, ...]:
    """Turns that give each replica its share of the micro-batches, as evenly as whole micro-batches allow.

    ``shares`` are positive and count in proportion. If they are whole turns of a length up to ``maximum_length`` (by
    default `longest_turns`) they are met exactly, by the shortest one. Otherwise the length is the one, of the divisors
    of `DIVISIBLE` up to that, by which no replica is given much beyond its share; the shortest of those that are as
    good up to `CLOSE`. Over its length each replica has its share to within one micro-batch, and at every moment of a
    stream what it has of the turns so far is within one of what the whole turns give it. (That this can be done:
    Tijdeman 1980, "The chairman assignment problem"; by earliest deadline first: Baruah et al. 1996, "Proportionate
    progress".)

    Raises:
        ValueError: no shares, one that is not positive, or one too small for a single turn.
    """
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"shares are positive numbers, one for each replica, not {list(shares)}")
    if maximum_length is None:
        maximum_length = longest_turns(len(shares))
    if maximum_length < 1:
        raise ValueError(f"turns have a length of at least 1, not {maximum_length}")
    exact = whole_turns(shares, maximum_length)
    if exact is not None:
        return _interleave(exact)
    whole = math.fsum(shares)
    lengths = [length for length in range(1, min(maximum_length, DIVISIBLE) + 1) if DIVISIBLE % length == 0]
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


def whole_turns(shares: Sequence[float], maximum_length: int | None = None) -> tuple[int, ...] | None:
    """How many turns each replica has, if that is a whole number for all of them by some length; of the shortest.

    By default up to `longest_turns`.
    """
    if maximum_length is None:
        maximum_length = longest_turns(len(shares))
    whole, length, found = math.fsum(shares), 1, []
    for share in shares:
        part = Fraction(share / whole).limit_denominator(maximum_length)
        length = math.lcm(length, part.denominator)
        if abs(float(part) - share / whole) > WHOLE or length > maximum_length:
            return None
        found.append(part)
    counts = tuple(int(part * length) for part in found)
    return counts if all(counts) and sum(counts) == length else None


def _apportion(shares: Sequence[float], length: int) -> tuple[int, ...]:
    """Whole counts that add up to ``length``, by largest remainders."""
    whole = math.fsum(shares)
    ideal = [length * share / whole for share in shares]
    counts = [math.floor(each + 1e-9) for each in ideal]
    by_remainder = sorted(range(len(shares)), key=lambda replica: counts[replica] - ideal[replica])
    for replica in by_remainder[: length - sum(counts)]:
        counts[replica] += 1
    return tuple(counts)


def _interleave(counts: Sequence[int]) -> tuple[int, ...]:
    """Each replica ``counts`` times: its n-th turn neither before n shares are due nor after n + 1 are."""
    length = sum(counts)
    given = [0] * len(counts)
    turns: list[int] = []
    # By when a turn is due, and who may have theirs by when it must be given; of equal ones, who has waited longest.
    waiting = [(0, replica) for replica in range(len(counts))]
    ready: list[tuple[int, int, int]] = []
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            replica = heappop(waiting)[1]
            count, number = counts[replica], given[replica]
            heappush(ready, (-(-(number + 1) * length // count), number * length // count, replica))
        replica = heappop(ready)[2]
        given[replica] += 1
        heappush(waiting, (-(-given[replica] * length // counts[replica]), replica))
        turns.append(replica)
    return tuple(turns)
