"""Sharded axes, their bounds, and how they pass an operator.

An axis may be sharded in several stretches. For example, the columns of a fused query-key-value projection are three
stretches of heads, and each machine has the same heads of each.

    query            key              value
    0  1 │ 2  3      0  1 │ 2  3      0  1 │ 2  3       Axis(index, repeats=3, period=4), bounds (0, 2), (2, 4)

So an axis is ``repeats`` stretches of ``period`` indices, each divided at the same bounds. A `Dealing` holds the common
bounds of all values that operators combine. It has the number of equal *blocks* between which a stretch may be divided.
At first, a block is one channel. An operator on groups of channels, or on heads, leaves fewer, larger blocks. The
bounds are multiples of whole vectors if the shares allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np
from tvm import relax

from relay_passes.shards.region import bounds, has_empty

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Axis:
    """The sharded axis ``index`` of a value: ``repeats`` stretches of ``period`` indices with the same bounds."""

    index: int
    repeats: int
    period: int

    def at(self, index: int) -> Axis:
        return Axis(index, self.repeats, self.period)

    def part_of(self, array: Array, begin: int, end: int) -> Array:
        """Return a new array with the indices from ``begin`` to before ``end`` of each stretch."""
        before, behind = array.shape[: self.index], array.shape[self.index + 1 :]
        stretches = array.reshape((*before, self.repeats, self.period, *behind))
        part = stretches[(slice(None),) * (self.index + 1) + (slice(begin, end),)]
        return np.array(part, order="C").reshape((*before, self.repeats * (end - begin), *behind))


VECTORS = (16, 8, 4)
"""Preferred divisors of a part's length, best first: kernels work on blocks of channels."""
MOST_OFF = 0.05
"""Largest deviation of a bound from its share, as a fraction of the whole, to reach a multiple of `VECTORS`."""


class Dealing:
    """The common bounds of values that operators combine, at multiples of 1 / ``blocks`` of their periods.

    ``period`` is that of the first value; if it is not known, a block is one index.
    """

    def __init__(self, blocks: int, period: int | None = None) -> None:
        self._blocks = blocks
        self._period = period or blocks
        self._joined: Dealing | None = None

    @property
    def root(self) -> Dealing:
        return self if self._joined is None else self._joined.root

    @property
    def blocks(self) -> int:
        return self.root._blocks

    def join(self, other: Dealing, blocks: int) -> None:
        """Give both the same bounds from now on, between ``blocks`` blocks or a divisor of that."""
        kept, joined = self.root, other.root
        if kept is not joined:
            joined._joined = kept
        kept._blocks = gcd(kept._blocks, joined._blocks, blocks)
        kept._period = gcd(kept._period, joined._period)

    def bounds(self, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
        """Return (begin, end) of each machine's blocks, at multiples of the longest vector that fits the shares."""
        root = self.root
        for vector in VECTORS:
            cells = gcd(root._blocks, root._period // vector)
            if root._period % vector == 0 and is_dealable(cells, shares):
                found = bounds(cells, shares)
                off = max(abs(end / cells - share) for (_, end), share in zip(found, accumulate(shares), strict=True))
                if off <= MOST_OFF:
                    each = root._blocks // cells
                    return tuple((begin * each, end * each) for begin, end in found)
        return bounds(root._blocks, shares)


def is_dealable(blocks: int, shares: Sequence[float]) -> bool:
    """Return whether each share gets at least one block."""
    return not has_empty(bounds(blocks, shares))


Operands = Sequence[relax.Expr]
Scaled = Callable[[int], int]
"""Maps a total number of channels, groups or indices to the number in one machine's part."""

Emit = Callable[[relax.Expr, str], relax.Expr]
"""Binds an intermediate expression of an operation; the string is the end of its name."""

Adapt = Callable[[relax.Expr, Operands, Scaled, Emit], relax.Expr]
"""Returns a machine's operation from the whole operation and the machine's operands."""


@dataclass(frozen=True)
class Passage:
    """How sharded axes pass an operator.

    ``operands`` has the axis along which each operand must be sharded, None for one that each machine needs whole.
    ``results`` has the axis of the result, or of each field of a tuple. With ``sums`` a machine's result is a partial
    sum. If ``blocks`` is set, bounds may lie only between that many equal blocks. With ``cuts`` the operator divides
    the axis into several, of which the outermost is sharded (heads). ``adapt`` writes a machine's operation if it
    differs from the whole one in more than its operands.
    """

    operands: tuple[Axis | None, ...]
    results: tuple[Axis | None, ...]
    blocks: int | None = None
    cuts: bool = False
    sums: bool = False
    adapt: Adapt | None = None
