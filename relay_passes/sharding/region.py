"""Regions: parts of a graph that several machines compute together, and the data types of the rewrite that shards one.

The rewrite replaces the region by operations. Each of them belongs to a machine, except for two kinds:

- a *slice* of a value from before the region. It is computed where that value is made, so that only the slice is
  transferred. A slice of a model input is computed by the machine that needs it, since a client computes nothing.
- a *gather* or *sum* makes a whole value of the region for its readers behind the region. It has the original
  variable's name, so that nothing behind the region changes. It is computed where it is needed.

Sums and concatenations are in the order of the machines, so the result does not depend on the order of arrival.

The bounds of the machines' parts of an axis are near their shares, and common to values that operators combine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Literal

import tvm
from tvm import relax
from tvm_ffi import register_error

from relay_passes.ir import main_function, operations_of, returned_fields, used_variables

ShardAxis = Literal["batch", "rows", "columns", "channels", "heads"]
Exchange = Literal["fused", "each"]
INDICES = {"batch": 0, "rows": 2, "columns": 3}
"""By name, the position of an axis that is sharded by ranges, in an image [batch, channels, rows, columns].

The batch is the first axis of the model's first input, and of all values computed from inputs that have that length.
"""


@register_error
class ShardError(ValueError):
    """A region cannot be sharded as requested; the message names the operation and an alternative."""


@dataclass(frozen=True)
class Region:
    """Consecutive variables of a graph, in its order, that ``machines`` compute together.

    ``shares`` are the machines' fractions of the work. Each is above 0; they add up to 1.
    """

    names: tuple[str, ...]
    machines: tuple[str, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Sharded:
    """A whole graph with one region sharded.

    ``machine_of`` has the machine of every variable that replaces the region; None for the slices of its inputs, and
    for the gathers and sums of its results. ``source_of`` maps each new variable to the variable of the original graph
    that has the same value, or the whole of which the new one is a part.
    """

    module: tvm.IRModule
    machine_of: Mapping[str, str | None]
    source_of: Mapping[str, str]


_Bindings = Sequence[relax.VarBinding]


@dataclass(frozen=True)
class Contents:
    """A region's operations in a graph, and those before and behind it.

    ``outside`` has the values from before the region that it uses, by name. ``wanted`` has the names of the region's
    variables that are used behind it.
    """

    region: Region
    function: relax.Function
    before: _Bindings
    bindings: _Bindings
    behind: _Bindings
    outside: Mapping[str, relax.Var]
    wanted: tuple[str, ...]


def contents_of(module: tvm.IRModule, region: Region) -> Contents:
    """Return the contents of a region; raise a `ValueError` if other operations stand between its own."""
    function = main_function(module)
    bindings, inside = operations_of(function), set(region.names)
    places = [place for place, binding in enumerate(bindings) if binding.var.name in inside]
    begin, end = places[0], places[-1] + 1
    if len(places) != len(inside) or end - begin != len(places):
        raise ValueError("a region's variables stand together in the graph")
    before, within, behind = bindings[:begin], bindings[begin:end], bindings[end:]
    used = {variable.name for binding in within for variable in used_variables(binding.value)}
    readers = (*(binding.value for binding in behind), *returned_fields(function))
    used_behind = {variable.name for value in readers for variable in used_variables(value)}
    available = (*function.params, *(binding.var for binding in before))
    return Contents(
        region,
        function,
        before,
        within,
        behind,
        {variable.name: variable for variable in available if variable.name in used},
        tuple(binding.var.name for binding in within if binding.var.name in used_behind),
    )


def part_name(name: str, machine: str) -> str:
    return f"{name}_{machine.replace('-', '_')}"


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
    return any(begin >= end for begin, end in parts)


def fit_blocks(blocks: int, shares: Sequence[float]) -> bool:
    """Return whether ``blocks`` equal blocks of an axis (channels, groups, heads) are enough for one per share."""
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
    """The bounds of machines' ranges, common to all values that operators combine, between ``blocks`` equal blocks.

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
        """Make both share their bounds from now on, between ``blocks`` blocks or a divisor of that number."""
        root, joined = self.root, other.root
        if root is not joined:
            joined._joined = root
        root._blocks = gcd(root._blocks, joined._blocks, blocks)
        root._length = gcd(root._length, joined._length)

    def ranges(self, shares: Sequence[float], length: int) -> tuple[Range, ...]:
        """Return each machine's range of ``length`` indices, at multiples of the largest of `VECTORS` that fits."""
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
