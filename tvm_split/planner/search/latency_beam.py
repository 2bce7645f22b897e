"""The least latency on more machines than tables can list: stages along an order of the pieces, cut by cut.

Of all ways to compute the pieces up to a cut, those that are done first are kept (beam search); from each, every next
stretch may go to every machine that is left and can hold it. So any number of machines can take part, as it must be
where a few do not have the memory, and each where it is best.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.evaluate import Placed
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.machine_classes import machine_classes
from tvm_split.planner.search.order_costs import OrderCosts

Counts = npt.NDArray[np.intp]
WIDTHS = (2, 8, 32)
"""Ways that are kept at each cut, one after the other as long as there is time."""
NEXT_KINDS = 3
"""Machines that are tried for each stretch: those by which it is done first."""
MOST_KINDS = 96
"""The fastest, where machines are of more kinds."""


@dataclass(frozen=True)
class _Way:
    """The pieces before a cut are done after ``seconds``; ``kind`` did the last ones, the client's number did none."""

    seconds: float
    cut: int
    kind: int
    left: Counts
    stages: int
    before: _Way | None


class LatencyBeam:
    """One order of an instance. What it finds is to be measured: stages beyond the neighbours are not looked at."""

    def __init__(self, instance: Instance, order: Sequence[int]) -> None:
        self._instance = instance
        self._costs = OrderCosts(instance, order, together=True)
        classes = machine_classes(instance)
        whole = np.where(np.isfinite(instance.seconds), instance.seconds, 0.0).sum(axis=0)
        self._classes = sorted(classes, key=lambda members: float(whole[members[0]]))[:MOST_KINDS]
        first = np.array([members[0] for members in self._classes])
        self._counts = np.array([len(members) for members in self._classes], dtype=np.intp)
        seconds = instance.seconds[self._costs.order][:, first].T
        self._prefix = np.concatenate([np.zeros((len(first), 1)), np.cumsum(np.nan_to_num(seconds, posinf=0), 1)], 1)
        self._barred = np.concatenate([np.zeros((len(first), 1)), np.cumsum(np.isinf(seconds), 1)], 1)
        self._memory = instance.memory[first]
        ends = [*((members[0], members[-1]) for members in self._classes), (instance.client,) * 2]
        pairs = np.ix_([each[0] for each in ends], [each[1] for each in ends])
        self._lag = np.where(instance.linked[pairs], instance.latency[pairs], math.inf)
        self._slow = np.where(instance.linked[pairs], instance.seconds_per_byte[pairs], 0.0)

    def plans(self, deadline: float) -> Iterator[list[Placed]]:
        """The ways to the end, for wider and wider beams until the deadline (monotonic)."""
        for width in WIDTHS:
            for way in self._ways(width, deadline if width > WIDTHS[0] else math.inf):
                yield self._placed(way)
            if time.monotonic() > deadline:
                return

    def _ways(self, width: int, deadline: float) -> list[_Way]:
        length = len(self._costs.order)
        client = len(self._classes)
        reached: list[list[_Way]] = [[] for _ in range(length + 1)]
        reached[0].append(_Way(0.0, 0, client, self._counts, 0, None))
        for cut in range(length):
            if time.monotonic() > deadline:
                return []
            for way in _best(reached[cut], width):
                self._grow(way, reached)
            reached[cut] = []
        return _best(reached[length], width)

    def _grow(self, way: _Way, reached: list[list[_Way]]) -> None:
        """All that one stage more may be."""
        problem, costs, cut = self._instance.problem, self._costs, way.cut
        if way.stages >= self._instance.machine_limit or way.stages >= (problem.stages or math.inf):
            return
        kinds = np.flatnonzero(way.left > 0)
        columns = slice(cut + 1, len(costs.order) + 1)
        took = self._prefix[kinds][:, columns] - self._prefix[kinds, cut, None]
        possible = self._barred[kinds][:, columns] == self._barred[kinds, cut, None]
        possible &= took <= problem.maximum_period_seconds
        held = costs.weights[columns] - costs.weights[cut] + np.maximum.accumulate(costs.activations[cut:])
        held = held + problem.buffers * costs.bytes[cut, columns]
        possible &= held <= self._memory[kinds, None] * (1 + 1e-12)
        begins = np.maximum(
            way.seconds + self._carried(costs.received[cut, columns], way.kind, kinds),
            self._carried(costs.from_client[cut, columns], -1, kinds),
        )
        if way.kind < len(self._classes) and not costs.received[cut, cut + 1 :].any():
            begins = np.maximum(begins, way.seconds)  # nothing is handed on, and yet one follows the other
        done = np.where(possible, begins + took, math.inf)
        done[:, -1] += self._carried(costs.to_client[cut, -1:], kinds, -1)[:, 0]
        best = np.argsort(done, axis=0)[:NEXT_KINDS]
        for column in range(done.shape[1]):
            for at in best[:, column].tolist():
                seconds = float(done[at, column])
                if math.isinf(seconds):
                    break
                left = way.left.copy()
                left[kinds[at]] -= 1
                end = cut + 1 + column
                reached[end].append(_Way(seconds, end, int(kinds[at]), left, way.stages + 1, way))

    def _carried(self, sizes: Floats, source: int | Counts, end: int | Counts) -> Floats:
        """(K, W) seconds until so many bytes have come; none for no bytes, whether or not there is a link."""
        lag, slow = (np.atleast_1d(table[source, end])[:, None] for table in (self._lag, self._slow))
        with np.errstate(invalid="ignore"):
            return np.where(sizes > 0, lag + sizes * slow, 0.0)

    def _placed(self, last: _Way) -> list[Placed]:
        waiting = [list(members) for members in self._classes]
        ways = [last]
        while ways[-1].before is not None:
            ways.append(ways[-1].before)
        ways.reverse()
        return [
            Placed((waiting[way.kind].pop(0),), tuple(sorted(self._costs.order[before.cut : way.cut].tolist())))
            for before, way in itertools.pairwise(ways)
        ]


def _best(ways: Sequence[_Way], width: int) -> list[_Way]:
    """Those that are done first, of equal ends and machines left only one."""
    found: dict[tuple[int, bytes], _Way] = {}
    for way in sorted(ways, key=lambda each: each.seconds):
        found.setdefault((way.kind, way.left.tobytes()), way)
        if len(found) == width:
            break
    return list(found.values())
