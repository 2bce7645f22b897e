"""Beam search of stages for many machines: under a period limit, each stage goes to the unit that it fills best.

A partial plan, along a topological order, is the end of its last stage and the units that are left. Prices of machine
time and of pieces come from `bounds.fair_prices`. A stage wastes the price of its unit's time minus the price of its
pieces; after each stage, the partial plans with the least waste are kept. If all machines are identical, each stage
simply takes as many pieces as it can. If all are different, nearly any run of pieces nearly fills some unit. The caller
finds the least period by binary search.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.bounds import Prices
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.candidate import Placement
from tvm_split.planner.search.instance import Flags, Floats
from tvm_split.planner.search.order_costs import OrderCosts, Stretches, Units, costs_possible

Counts = npt.NDArray[np.intp]
STEP_WORK = 500
"""Units of work to extend one partial plan by a stage, per kind of unit."""


@dataclass(frozen=True)
class _Partial:
    """A partial plan: pieces up to ``end`` are placed; ``kind`` is the last stage's unit kind, K if there is none."""

    end: int
    kind: int
    left: Counts
    waste: float
    before: _Partial | None


class StageBeam:
    """Beam search over one order of pieces and one set of units; see the module.

    Args:
        prices: prices of the units' time and of the pieces; the pieces in topological order, not in that of ``costs``.
        width: number of partial plans that are kept.
    """

    def __init__(self, costs: OrderCosts, units: Units, prices: Prices, width: int) -> None:
        self._costs = costs
        self._units = units
        self._width = width
        self._length = len(costs.order)
        self._stretches = Stretches(units.seconds[costs.order])
        self._value = np.concatenate([[0.0], np.cumsum(prices.pieces[costs.order])])
        self._price = prices.classes
        links = units.seconds_per_byte
        self._into, self._outof = links[:-1, :-1].min(axis=0), links[:-1, :-1].min(axis=1)
        self._neighbourhood, _ = neighbourhoods(links[:-1, :-1], units.counts)
        self._tables: dict[int, Flags] = {}
        self._reach: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)

    def stages(self, period: float, most: int, usable: Counts, budget: Budget) -> list[Placement] | None:
        """Return stages on at most ``most`` of the ``usable`` units (per kind) under a period; None if none fit."""
        self._tables, self._reach = {}, self._stretches.reach(period)
        kinds = len(self._units.members)
        partials = [_Partial(0, kinds, usable, 0.0, None)]
        for _ in range(most):
            if budget.is_used_up:
                return None
            following: dict[tuple[int, int, bytes], _Partial] = {}
            for partial in partials:
                budget.spend(STEP_WORK * len(self._price))
                for grown in self._grown(partial, period):
                    if grown.end == self._length:
                        return self._placed(grown)
                    key = grown.end, self._neighbourhood[grown.kind], grown.left.tobytes()
                    if key not in following or grown.waste < following[key].waste:
                        following[key] = grown
            partials = sorted(following.values(), key=lambda partial: partial.waste)[: self._width]
            if not partials:
                return None
        return None

    def _table(self, start: int, period: float) -> Flags:
        """Return (K, W): whether a unit of each kind can hold the pieces from ``start`` to each of the next W cuts."""
        possible = self._tables.get(start)
        if possible is None:
            costs, units, reach = self._costs, self._units, int(self._reach[:, start].max())
            columns = slice(start + 1, reach + 1)
            possible = costs_possible(costs, units, self._stretches.prefix, start, reach, period)
            possible &= np.arange(start + 1, reach + 1) <= self._reach[:, start, None]
            for sizes, client, best in (
                (costs.received, costs.from_client[start, columns], (units.seconds_per_byte[-1, :-1], self._into)),
                (costs.sent, costs.to_client[start, columns], (units.seconds_per_byte[:-1, -1], self._outof)),
            ):
                possible &= _wire(client, best[0]) + _wire(sizes[start, columns], best[1]) <= period
            self._tables[start] = possible
        return possible

    def _grown(self, partial: _Partial, period: float) -> list[_Partial]:
        """Return the partial plans with one more stage: the longest possible one on each kind of unit that is left."""
        start, costs = partial.end, self._costs
        kinds = np.flatnonzero((partial.left > 0) & (self._reach[:, start] > start))
        if not len(kinds):
            return []
        table = self._table(start, period)
        columns = slice(start + 1, start + 1 + table.shape[1])
        possible = table[kinds]
        if partial.kind < len(self._price):
            arriving = self._units.seconds_per_byte[partial.kind, kinds]
            possible &= _wire(costs.received[start, columns], arriving) <= period
        longest = table.shape[1] - possible[:, ::-1].argmax(axis=1)
        able = possible.any(axis=1)
        kinds, ends = kinds[able], start + longest[able]
        waste = partial.waste + self._price[kinds] * period - (self._value[ends] - self._value[start])
        chosen = np.argsort(waste, kind="stable")[: 2 * self._width]
        done = np.flatnonzero(ends == self._length)
        if len(done):
            chosen = done[:1]
        partials = []
        for at in chosen.tolist():
            remaining = partial.left.copy()
            remaining[kinds[at]] -= 1
            partials.append(_Partial(int(ends[at]), int(kinds[at]), remaining, float(waste[at]), partial))
        return partials

    def _placed(self, last: _Partial) -> list[Placement]:
        steps = [last]
        while steps[-1].before is not None:
            steps.append(steps[-1].before)
        waiting = [list(units) for units in self._units.members]
        placements = []
        for before, step in itertools.pairwise(reversed(steps)):
            held = sorted(self._costs.order[before.end : step.end].tolist())
            placements.append(Placement(tuple(sorted(waiting[step.kind].pop(0))), tuple(held)))
        return placements


def _wire(sizes: Floats, seconds_per_byte: Floats) -> Floats:
    """Return (K, W) seconds to transfer bytes over each link; 0 for no bytes, even without a link."""
    with np.errstate(invalid="ignore"):
        return np.where(sizes > 0, sizes * seconds_per_byte[:, None], 0.0)


def neighbourhoods(links: Floats, counts: Counts) -> tuple[Counts, Floats]:
    """Group kinds with the same links to all others, as in one rack. Return each kind's group, and (G, G) links."""
    filled = links.copy()
    np.fill_diagonal(filled, np.inf)
    nearest = np.minimum(filled.min(axis=0), filled.min(axis=1)) if len(links) > 1 else np.diag(links)
    np.fill_diagonal(filled, np.where(counts > 1, np.diag(links), nearest))
    groups: dict[bytes, int] = {}
    both_ways = [row.tobytes() for row in np.concatenate([filled, filled.T], axis=1)]
    group_of = np.array([groups.setdefault(both_way, len(groups)) for both_way in both_ways], dtype=np.intp)
    first = [int(np.flatnonzero(group_of == group)[0]) for group in range(len(groups))]
    return group_of, filled[np.ix_(first, first)]
