"""Beam search for the least latency on any number of machines: stages along an order of the pieces, cut by cut.

For each cut, the search keeps the partial plans with the least estimated end. The estimate adds a lower bound on the
remaining time to the time when the tensors still to be read are ready (as in A*: Hart, Nilsson, Raphael 1968). From
each partial plan, every next run of pieces may go to every unused machine that can hold it. A stage starts when all its
inputs have arrived, so stages of parallel branches run at the same time. Plans may use many machines, as is needed when
a few do not have enough memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.bounds import SecondsAhead
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.candidate import Placement
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.order_costs import OrderCosts

Counts = npt.NDArray[np.intp]
NEXT_KINDS = 3
"""Machine classes tried for each run of pieces: those with the least estimate."""
MOST_KINDS = 96
"""Most machine classes that are used; the fastest ones."""
MOST_MEASURED = 8
"""Most complete plans that `LatencyBeam.plans` returns; the best ones."""
TIE = 1e-6
"""Weight of the other tensors still to be read; it breaks ties between equal estimates."""


@dataclass(frozen=True)
class _Way:
    """A partial plan: the pieces before ``cut`` are placed.

    The last stage is on machine class ``kind`` (the client's number if there is no stage) and ends at ``done`` seconds.
    ``estimate`` is the estimated end of the whole plan; ``delivered`` is when the client has its last result so far.
    """

    estimate: float
    done: float
    delivered: float
    cut: int
    kind: int
    left: Counts
    stages: int
    before: _Way | None


@dataclass(frozen=True)
class _Open:
    """Tensors that cross a cut: positions of their sources, of their first and last readers, and bytes."""

    sources: Counts
    first: Counts
    last: Counts
    bytes: Floats


class LatencyOrder:
    """One order of the pieces, independent of the machines.

    Attributes:
        crossing: the tensors that cross each cut.
        last_reader: position of each piece's last reader; the piece's own position if only the client reads it.
    """

    def __init__(self, instance: Instance, order: Sequence[int]) -> None:
        self.costs = OrderCosts(instance, order, together=True)
        length = len(order)
        place = np.empty(length, dtype=np.intp)
        place[self.costs.order] = np.arange(length)
        crossing: list[list[tuple[int, int, int, float]]] = [[] for _ in range(length + 1)]
        self.last_reader = np.arange(length)
        for tensor in instance.tensors:
            readers = sorted(int(place[piece]) for piece in tensor.destinations if piece != instance.client)
            if tensor.source == instance.client or not readers:
                continue
            source, last = int(place[tensor.source]), readers[-1]
            self.last_reader[source] = max(self.last_reader[source], last)
            for before, reader in zip([source, *readers], readers, strict=False):
                for cut in range(before + 1, reader + 1):
                    crossing[cut].append((source, reader, last, tensor.bytes))
        self.crossing = [_crossing(tensors) for tensors in crossing]


class LatencyBeam:
    """Beam search along one order of an instance's pieces."""

    def __init__(self, instance: Instance, order: LatencyOrder) -> None:
        self._instance = instance
        self._order, self._costs = order, order.costs
        classes = instance.classes
        whole = np.where(np.isfinite(instance.seconds), instance.seconds, 0.0).sum(axis=0)
        self._classes = sorted(classes, key=lambda members: float(whole[members[0]]))[:MOST_KINDS]
        first = np.array([members[0] for members in self._classes])
        self._counts = np.array([len(members) for members in self._classes], dtype=np.intp)
        seconds = instance.seconds[self._costs.order][:, first].T
        self._prefix = np.concatenate([np.zeros((len(first), 1)), np.cumsum(np.nan_to_num(seconds, posinf=0), 1)], 1)
        self._barred = np.concatenate([np.zeros((len(first), 1)), np.cumsum(np.isinf(seconds), 1)], 1)
        self._memory = instance.memory[first]
        self._ahead = SecondsAhead(instance, self._classes)
        self._lag, self._slow = self._ahead.lag, self._ahead.slow

    def plans(self, width: int, budget: Budget) -> Iterator[list[Placement]]:
        """Yield the best complete plans, keeping ``width`` partial plans at each cut; none if the budget runs out.

        The caller must evaluate them: a link between stages that are not adjacent may be missing.
        """
        yield from map(self._placed, self._ways(width, budget)[:MOST_MEASURED])

    def _ways(self, width: int, budget: Budget) -> list[_Way]:
        length = len(self._costs.order)
        client = len(self._classes)
        ways_by_cut: list[list[_Way]] = [[] for _ in range(length + 1)]
        ways_by_cut[0].append(_Way(0.0, 0.0, 0.0, 0, client, self._counts, 0, None))
        worst = np.full(length + 1, math.inf)
        for cut in range(length):
            if budget.is_used_up:
                return []
            tails: dict[int, Floats] = {}
            for way in _best(ways_by_cut[cut], width):
                budget.spend(10 * len(self._classes) * (length - cut))
                for grown in self._grown(way, tails, worst):
                    ways = ways_by_cut[grown.cut]
                    ways.append(grown)
                    if len(ways) >= 4 * width:
                        ways[:] = _best(ways, width)
                        if len(ways) == width:
                            worst[grown.cut] = ways[-1].estimate
            ways_by_cut[cut] = []
        return _best(ways_by_cut[length], width)

    def _tails(self, way: _Way, kinds: Counts, cache: dict[int, Floats]) -> Floats:
        """Return (K, W) least seconds from the end of a stage to the end of the plan, over its pieces read later.

        The stage starts at the partial plan's cut and ends at each of the W later cuts. −∞ if only the client reads its
        pieces. ``cache`` holds results of this cut by the id of the table used.
        """
        length, cut = len(self._costs.order), way.cut
        tails = []
        for kind in kinds.tolist():
            remaining = way.left > 0
            remaining[kind] = way.left[kind] > 1
            table = self._ahead.table(remaining)
            seconds = cache.get(id(table))
            if seconds is None:
                seconds = cache[id(table)] = np.full((len(self._classes), length - cut), -math.inf)
                for piece in range(cut, length):
                    read = seconds[:, piece - cut : self._order.last_reader[piece] - cut]
                    np.maximum(read, table[self._costs.order[piece], :, None], out=read)
            tails.append(seconds[kind])
        return np.stack(tails)

    def _grown(self, way: _Way, cache: dict[int, Floats], worst: Floats) -> Iterator[_Way]:
        """Yield the partial plans with one more stage whose estimate is better than the ``worst`` kept at their cut."""
        problem, costs, cut = self._instance.problem, self._costs, way.cut
        if way.stages >= self._instance.machine_limit or way.stages >= (problem.stages or math.inf):
            return
        kinds = np.flatnonzero(way.left > 0)
        if not len(kinds):
            return
        columns = slice(cut + 1, len(costs.order) + 1)
        took = self._prefix[kinds][:, columns] - self._prefix[kinds, cut, None]
        possible = self._barred[kinds][:, columns] == self._barred[kinds, cut, None]
        possible &= took <= problem.maximum_period_seconds
        held = costs.weights[columns] - costs.weights[cut] + np.maximum.accumulate(costs.activations[cut:])
        held = held + problem.buffers * costs.bytes[cut, columns]
        possible &= held <= self._memory[kinds, None] * (1 + 1e-12)
        begins = self._carried(costs.from_client[cut, columns], -1, kinds)
        latest, total, begins = self._arriving(way, kinds, begins)
        done = begins + took
        delivered = done + self._carried(costs.to_client[cut, columns], kinds, -1)
        delivered = np.where(costs.to_client[cut, columns] > 0, np.maximum(delivered, way.delivered), way.delivered)
        possible &= np.isfinite(done)  # infinite if a link is missing
        finish = np.where(possible, done, 0.0) + self._tails(way, kinds, cache)
        estimate = np.maximum(np.maximum(finish, latest), np.maximum(delivered, done))
        estimate = np.where(possible, estimate + TIE * (np.maximum(finish, done) + total), math.inf)
        best = np.argsort(estimate, axis=0, kind="stable")[:NEXT_KINDS]
        least = np.take_along_axis(estimate, best, axis=0)
        for row, column in np.argwhere(np.isfinite(least) & (least < worst[columns])).tolist():
            at, value = best[row, column], float(least[row, column])
            remaining = way.left.copy()
            remaining[kinds[at]] -= 1
            yield _Way(
                value,
                float(done[at, column]),
                float(delivered[at, column]),
                cut + 1 + column,
                int(kinds[at]),
                remaining,
                way.stages + 1,
                way,
            )

    def _arriving(self, way: _Way, kinds: Counts, begins: Floats) -> tuple[Floats, Floats, Floats]:
        """Return what earlier stages mean for a stage of each kind up to each later cut.

        The first two, (W,), are the latest and the sum of the least end times over tensors that are still read after
        that cut. The third, (K, W), is when all inputs of the stage have arrived.
        """
        crossing, table = self._order.crossing[way.cut], self._ahead.table(way.left > 0)
        length = begins.shape[1]
        latest, total = np.full(length, -math.inf), np.zeros(length)
        ancestor: _Way | None = way
        while ancestor is not None and ancestor.before is not None:
            produced = (crossing.sources >= ancestor.before.cut) & (crossing.sources < ancestor.cut)
            if produced.any():
                first, last = crossing.first[produced] - way.cut, crossing.last[produced] - way.cut
                sizes = np.cumsum(np.bincount(first, crossing.bytes[produced], minlength=length))
                lag, slow = self._lag[ancestor.kind, kinds], self._slow[ancestor.kind, kinds]
                come = ancestor.done + lag[:, None] + slow[:, None] * sizes
                begins[:, first.min() :] = np.maximum(begins, come)[:, first.min() :]
                ahead = ancestor.done + table[self._costs.order[crossing.sources[produced]], ancestor.kind]
                for end, value in zip(last.tolist(), ahead.tolist(), strict=True):
                    latest[:end] = np.maximum(latest[:end], value)
                    total[:end] += value
            ancestor = ancestor.before
        return latest, total, begins

    def _carried(self, sizes: Floats, source: int | Counts, end: int | Counts) -> Floats:
        """Return (K, W) seconds to transfer so many bytes; 0 for no bytes, even without a link."""
        lag, slow = (np.atleast_1d(table[source, end])[:, None] for table in (self._lag, self._slow))
        with np.errstate(invalid="ignore"):
            return np.where(sizes > 0, lag + sizes * slow, 0.0)

    def _placed(self, last: _Way) -> list[Placement]:
        waiting = [list(members) for members in self._classes]
        ways = [last]
        while ways[-1].before is not None:
            ways.append(ways[-1].before)
        ways.reverse()
        return [
            Placement((waiting[way.kind].pop(0),), tuple(sorted(self._costs.order[before.cut : way.cut].tolist())))
            for before, way in itertools.pairwise(ways)
        ]


def _crossing(tensors: Sequence[tuple[int, int, int, float]]) -> _Open:
    columns = np.array(tensors, dtype=np.float64).reshape(-1, 4).T
    sources, first, last = columns[:3].astype(np.intp)
    return _Open(sources, first, last, columns[3])


def _best(ways: Sequence[_Way], width: int) -> list[_Way]:
    """Return the ``width`` partial plans of least estimate; only one per last class and machines left."""
    best: dict[tuple[int, bytes], _Way] = {}
    for way in sorted(ways, key=lambda way: way.estimate):
        best.setdefault((way.kind, way.left.tobytes()), way)
        if len(best) == width:
            break
    return list(best.values())
