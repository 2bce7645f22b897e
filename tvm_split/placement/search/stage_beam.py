"""Beam search of stages for many machines: under a period limit, each stage goes to the machine that it fills best.

A partial plan, along a topological order, is the end of its last stage and the machines that are left. Prices of
machine time and of pieces come from `bounds.fair_prices`. A stage wastes the price of its machine's time minus the
price of its pieces; after each stage, the partial plans with the least waste are kept. If all machines are identical,
each stage simply takes as many pieces as it can. If all are different, nearly any run of pieces nearly fills one. The
caller finds the least period by binary search. For example, four pieces on one fast and two slow machines, in 4 s::

    piece                    p0    p1    p2    p3
    seconds, fast machine     1     1     2     2     a second costs 0.5
    seconds, slow machine     2     4     1     4     a second costs 0.25
    price of the piece      0.5   0.5  0.25     1     the cheaper machine's

    first stage    second stage                       waste
    slow: p0                                          0.25 × 4 − 0.5 = 0.5
                   slow: p1                           0.5 + 1 − 0.5 = 1
                   fast: p1 p2                        0.5 + 0.5 × 4 − 0.75 = 1.75
    fast: p0 p1 p2                                    0.5 × 4 − 1.25 = 0.75
                   slow: p3                           all pieces are placed: the plan
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.placement.search.bounds import Prices
from tvm_split.placement.search.budget import Budget
from tvm_split.placement.search.candidate import Placement
from tvm_split.placement.search.instance import Flags, Floats
from tvm_split.placement.search.order_costs import ROUNDING, ComputeRuns, DeviceClasses, OrderCosts

Counts = npt.NDArray[np.intp]
STEP_WORK = 500
"""Units of work to extend one partial plan by a stage, per class of machines."""


@dataclass(frozen=True)
class _Partial:
    """A partial plan: pieces up to ``end`` are placed; ``class_index`` is the last stage's class, or K."""

    end: int
    class_index: int
    left: Counts
    waste: float
    before: _Partial | None


class StageBeam:
    """Beam search over one order of pieces; see the module.

    Args:
        prices: prices of the machines' time and of the pieces, which are in the order of the instance.
        width: number of partial plans that are kept.
    """

    def __init__(self, costs: OrderCosts, machines: DeviceClasses, prices: Prices, width: int) -> None:
        self._costs = costs
        self._machines = machines
        self._width = width
        self._length = len(machines.seconds)
        self._runs = ComputeRuns(machines.seconds)
        self._value = np.concatenate([[0.0], np.cumsum(prices.pieces)])
        self._price = prices.classes
        links = machines.seconds_per_byte
        self._best_in, self._best_out = links[:-1, :-1].min(axis=0), links[:-1, :-1].min(axis=1)
        self._fits_from: dict[int, Flags] = {}
        self._reach: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)

    def stages(self, period: float, most: int, usable: Counts, budget: Budget) -> list[Placement] | None:
        """Return stages on at most ``most`` of the ``usable`` machines (by class) under a period; None if none fit."""
        self._fits_from, self._reach = {}, self._runs.reach(period)
        machines = self._machines
        partials = [_Partial(0, len(machines.members), usable, 0.0, None)]
        for _ in range(most):
            if budget.is_used_up:
                return None
            # Plans that differ only in the choice among machines of equal speed are one, else they fill the beam.
            following: dict[tuple[int, int, bytes], _Partial] = {}
            for partial in partials:
                budget.spend(STEP_WORK * len(self._price))
                for extended in self._extended(partial, period):
                    if extended.end == self._length:
                        return self._placed(extended)
                    left = np.bincount(machines.speed_group, extended.left).tobytes()
                    key = extended.end, int(machines.link_group[extended.class_index]), left
                    if key not in following or extended.waste < following[key].waste:
                        following[key] = extended
            partials = sorted(following.values(), key=lambda partial: partial.waste)[: self._width]
            if not partials:
                return None
        return None

    def _fits(self, start: int, period: float) -> Flags:
        """Return (K, W): whether each class can hold the pieces from ``start`` to each of the next W cuts."""
        possible = self._fits_from.get(start)
        if possible is not None:
            return possible
        costs, machines, instance = self._costs, self._machines, self._costs.instance
        links, reach = machines.seconds_per_byte, int(self._reach[:, start].max())
        columns = slice(start + 1, reach + 1)
        compute = self._runs.prefix[:, columns] - self._runs.prefix[:, start, None]
        compute = compute + machines.transfer_seconds[:, None] * costs.tensors[start, columns]
        compute = compute + machines.transfer_seconds_per_byte[:, None] * costs.bytes[start, columns]
        possible = (compute <= period) & (np.arange(start + 1, reach + 1) <= self._reach[:, start, None])
        if instance.memory_bytes.min() < math.inf:
            possible &= costs.memory_bytes(start, reach) <= machines.memory_bytes[:, None] * (1 + ROUNDING)
        for sizes, client, best in (
            (costs.received, costs.from_client[start, columns], (links[-1, :-1], self._best_in)),
            (costs.sent, costs.to_client[start, columns], (links[:-1, -1], self._best_out)),
        ):
            possible &= _transfer_seconds(client, best[0]) + _transfer_seconds(sizes[start, columns], best[1]) <= period
        self._fits_from[start] = possible
        return possible

    def _extended(self, partial: _Partial, period: float) -> list[_Partial]:
        """Return the partial plans with one more stage: the longest possible one on each class that is left."""
        start, costs = partial.end, self._costs
        classes = np.flatnonzero((partial.left > 0) & (self._reach[:, start] > start))
        if not len(classes):
            return []
        fits = self._fits(start, period)
        columns = slice(start + 1, start + 1 + fits.shape[1])
        possible = fits[classes]
        if partial.class_index < len(self._price):
            arriving = self._machines.seconds_per_byte[partial.class_index, classes]
            possible &= _transfer_seconds(costs.received[start, columns], arriving) <= period
        longest = fits.shape[1] - possible[:, ::-1].argmax(axis=1)
        able = possible.any(axis=1)
        classes, ends = classes[able], start + longest[able]
        waste = partial.waste + self._price[classes] * period - (self._value[ends] - self._value[start])
        chosen = np.argsort(waste, kind="stable")[: 2 * self._width]
        done = np.flatnonzero(ends == self._length)
        if len(done):
            chosen = done[:1]
        partials = []
        for at in chosen.tolist():
            remaining = partial.left.copy()
            remaining[classes[at]] -= 1
            partials.append(_Partial(int(ends[at]), int(classes[at]), remaining, float(waste[at]), partial))
        return partials

    def _placed(self, last: _Partial) -> list[Placement]:
        steps = [last]
        while steps[-1].before is not None:
            steps.append(steps[-1].before)
        waiting = [iter(members) for members in self._machines.members]
        placements = []
        for before, step in itertools.pairwise(reversed(steps)):
            placements.append(Placement(next(waiting[step.class_index]), tuple(range(before.end, step.end))))
        return placements


def _transfer_seconds(sizes: Floats, seconds_per_byte: Floats) -> Floats:
    """Return (K, W) seconds to transfer bytes over each link; 0 for no bytes, even without a link."""
    with np.errstate(invalid="ignore"):
        return np.where(sizes > 0, sizes * seconds_per_byte[:, None], 0.0)
