"""Axes that are dealt out to machines, and what passing an operator asks of them.

An axis of a value need not be dealt in one stretch: the columns of a fused query-key-value projection are three
stretches of heads, and each machine has the same heads of each.

    query            key              value
    0  1 │ 2  3      0  1 │ 2  3      0  1 │ 2  3       Axis(index, repeats=3, period=4), bounds (0, 2), (2, 4)

So an axis is ``repeats`` stretches of ``period`` indices, each cut at the same bounds. Where these lie is decided once
for all values that meet, by their `Dealing`: into how many equal *blocks* a stretch may be cut. Single channels are the
blocks at first, and an operator that works on groups of them, or on heads, leaves only fewer. Of these bounds those are
taken that keep whole vectors together, where the shares allow it.
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
    """The axis ``index`` of a value, dealt out: ``repeats`` stretches of ``period`` indices, each cut alike."""

    index: int
    repeats: int
    period: int

    def at(self, index: int) -> Axis:
        return Axis(index, self.repeats, self.period)

    def part_of(self, array: Array, begin: int, end: int) -> Array:
        """The indices ``begin`` to ``end`` of each stretch of an array, in an array of their own."""
        before, behind = array.shape[: self.index], array.shape[self.index + 1 :]
        stretches = array.reshape((*before, self.repeats, self.period, *behind))
        part = stretches[(slice(None),) * (self.index + 1) + (slice(begin, end),)]
        return np.array(part, order="C").reshape((*before, self.repeats * (end - begin), *behind))


VECTORS = (16, 8, 4)
"""Indices that a part's length should be a multiple of: kernels work on blocks of channels."""
MOST_OFF = 0.05
"""Of the whole, by which a bound may miss its share for that."""


class Dealing:
    """The bounds that all values share that meet, between at most ``blocks`` equal blocks of their periods.

    ``period`` is that of the first value; if it is not known, blocks are single indices.
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
        """Both have the same bounds from now on, between so many blocks."""
        kept, joined = self.root, other.root
        if kept is not joined:
            joined._joined = kept
        kept._blocks = gcd(kept._blocks, joined._blocks, blocks)
        kept._period = gcd(kept._period, joined._period)

    def bounds(self, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
        """Each machine's first block, and the one behind its last: whole vectors, the longest that suit the shares."""
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
    """Whether each share gets a block at least."""
    return not has_empty(bounds(blocks, shares))


Operands = Sequence[relax.Expr]
Scaled = Callable[[int], int]
"""From a number of what is dealt out (channels, groups, the indices of an axis) to a machine's part of them."""

Emit = Callable[[relax.Expr, str], relax.Expr]
"""Binds what an operation needs of its own under a name with that ending."""

Adapt = Callable[[relax.Expr, Operands, Scaled, Emit], relax.Expr]
"""A machine's operation, from the whole's and the machine's operands."""


@dataclass(frozen=True)
class Passage:
    """How dealt axes pass an operator.

    ``operands`` are the axes along which each operand has to be dealt, None for what each machine needs whole;
    ``results`` the same of the result, or of each field where it is a tuple. With ``sums`` a machine's result is a
    summand of the whole. The axes may be cut only between ``blocks`` equal blocks, if given; with ``cuts`` because the
    axis becomes several, of which the outermost is dealt out (heads).
    """

    operands: tuple[Axis | None, ...]
    results: tuple[Axis | None, ...]
    blocks: int | None = None
    cuts: bool = False
    sums: bool = False
    adapt: Adapt | None = None
