"""Bounds of the machines' parts of an axis: near their shares, and common to values that operators combine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

Range = tuple[int, int]
"""A half-open range of indices: (first, end)."""

VECTORS = (16, 8, 4)
"""Preferred divisors of a part's length, best first: kernels work on blocks of channels."""
MOST_OFF = 0.05
"""Largest deviation of a bound from its share, as a fraction of the whole, to reach a multiple of `VECTORS`."""


def bounds(total: int, shares: Sequence[float], unit: int = 1) -> tuple[Range, ...]:
    """Return (begin, end) of each machine's part of ``total`` indices, rounded to multiples of ``unit``.

    The last part takes the rest if ``unit`` does not divide ``total``. A part whose share is too small is empty.
    """
    cumulated = 0.0
    ends = []
    for share in shares:
        cumulated += share
        ends.append(min(total, round(cumulated * total / unit) * unit))
    ends[-1] = total
    return tuple(zip((0, *ends), ends, strict=False))


def has_empty(parts: Sequence[Range]) -> bool:
    """Return whether one of the parts has no index."""
    return any(begin >= end for begin, end in parts)


def fit_blocks(blocks: int, shares: Sequence[float]) -> bool:
    """Return whether each share gets at least one block."""
    return not has_empty(bounds(blocks, shares))


def largest_miss(parts: Sequence[Range], total: int, shares: Sequence[float]) -> float:
    """Return the largest deviation of a bound from its share, as a fraction of ``total``."""
    return max(abs(end / total - share) for (_, end), share in zip(parts, accumulate(shares), strict=True))


def common_range(left: Range, right: Range) -> Range | None:
    first, end = max(left[0], right[0]), min(left[1], right[1])
    return (first, end) if first < end else None


def hull(left: Range | None, right: Range) -> Range:
    """Return the smallest range that contains both; None is an empty range."""
    return right if left is None else (min(left[0], right[0]), max(left[1], right[1]))


class CommonBounds:
    """The common bounds of values that operators combine, between ``blocks`` equal blocks of their axes.

    At first, a block is one channel. An operator on groups of channels, or on heads, leaves fewer, larger blocks.
    ``length`` is that of the first value's axis.
    """

    def __init__(self, blocks: int, length: int) -> None:
        self._blocks, self._length = blocks, length
        self._joined: CommonBounds | None = None

    @property
    def root(self) -> CommonBounds:
        return self if self._joined is None else self._joined.root

    @property
    def blocks(self) -> int:
        return self.root._blocks

    def join(self, other: CommonBounds, blocks: int) -> None:
        """Give both the same bounds from now on, between ``blocks`` blocks or a divisor of that."""
        root, joined = self.root, other.root
        if root is not joined:
            joined._joined = root
        root._blocks = gcd(root._blocks, joined._blocks, blocks)
        root._length = gcd(root._length, joined._length)

    def ranges(self, shares: Sequence[float], length: int) -> tuple[Range, ...]:
        """Return each machine's range of an axis, at multiples of the longest vector that fits the shares."""
        root = self.root
        cells, parts = root._blocks, bounds(root._blocks, shares)
        for vector in VECTORS:
            fewer = gcd(root._blocks, root._length // vector)
            if root._length % vector == 0 and fit_blocks(fewer, shares):
                vectors = bounds(fewer, shares)
                if largest_miss(vectors, fewer, shares) <= MOST_OFF:
                    cells, parts = fewer, vectors
                    break
        return tuple((begin * length // cells, end * length // cells) for begin, end in parts)
