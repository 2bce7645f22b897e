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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

CYCLE = 840
"""Every list of turns has a length that divides this (all up to 8 do): whatever replicated stages a tensor
passes, its route repeats after so many micro-batches at most."""
LONGEST = 60
"""Turns of few replicas are no longer; a share of 1/60 is met exactly."""
LONGEST_PER_REPLICA = 8
"""Of many replicas an even share is small already, and results wait for the slowest one's turn about as long anyway."""
CLOSE = 0.01
"""A shorter list of turns is preferred if no replica has more work by it than by the best list, up to this share."""


@dataclass(frozen=True)
class Recurrence:
    """Micro-batches that recur: those whose number modulo ``period`` is in ``remainders``, which ascend."""

    period: int
    remainders: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.period < 1 or CYCLE % self.period:
            raise ValueError(f"micro-batches recur with a period that divides {CYCLE}, not {self.period}")
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

    def __and__(self, other: Recurrence) -> Recurrence | None:
        """The micro-batches that are in both, if there are any."""
        period = math.lcm(self.period, other.period)
        remainders = tuple(place for place in range(period) if place in self and place in other)
        return Recurrence(period, remainders) if remainders else None

    def __or__(self, other: Recurrence) -> Recurrence:
        """The micro-batches that are in one of the two, or in both."""
        period = math.lcm(self.period, other.period)
        return Recurrence(period, tuple(place for place in range(period) if place in self or place in other))

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


def turns_of(replica: int, turns: Sequence[int]) -> Recurrence:
    """The micro-batches of one replica; a `ValueError` if it has no turn."""
    return Recurrence(len(turns), tuple(place for place, turn in enumerate(turns) if turn == replica))


def longest_turns(replicas: int) -> int:
    """Turns of so many replicas are no longer, and a share of one by that is the smallest."""
    limit = max(LONGEST, LONGEST_PER_REPLICA * replicas)
    return max(lengths_of_turns(limit))


def lengths_of_turns(longest: int) -> list[int]:
    """Up to the ``longest``, ascending."""
    return [length for length in range(1, min(longest, CYCLE) + 1) if CYCLE % length == 0]


def turns_by_share(shares: Sequence[float], maximum_length: int | None = None) -> tuple[int, ...]:
    """Turns that give each replica its share of the micro-batches, as evenly as whole micro-batches allow.

    ``shares`` are positive and count in proportion. The length is the one, of the divisors of `CYCLE` up to
    ``maximum_length`` (by default `longest_turns`), by which no replica is given much beyond its share; the shortest of
    those that are as good up to `CLOSE`. Over its length each replica has its share to within one micro-batch, and at
    every moment of a stream what it has of the turns so far is within one of what the whole turns give it. (That this
    can be done: Tijdeman 1980, "The chairman assignment problem"; by earliest deadline first: Baruah et al. 1996,
    "Proportionate progress".)

    Raises:
        ValueError: no shares, one that is not positive, or one too small for a single turn.
    """
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"shares are positive numbers, one for each replica, not {list(shares)}")
    if maximum_length is None:
        maximum_length = longest_turns(len(shares))
    if maximum_length < 1:
        raise ValueError(f"turns have a length of at least 1, not {maximum_length}")
    whole = math.fsum(shares)
    lengths = lengths_of_turns(maximum_length)
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
    for place in range(length):
        due = [replica for replica, count in enumerate(counts) if given[replica] * length <= place * count]
        # The earliest deadline first; of equal ones, who has waited longest.
        chosen = min(
            due,
            key=lambda replica: (
                -(-(given[replica] + 1) * length // counts[replica]),
                given[replica] * length // counts[replica],
                replica,
            ),
        )
        given[chosen] += 1
        turns.append(chosen)
    return tuple(turns)
