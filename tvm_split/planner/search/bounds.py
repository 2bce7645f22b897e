"""Lower bounds on a plan's value: from machine prices, client links, the longest path and freely divided pieces.

Prices are the dual of the linear relaxation that divides every piece freely over the machines
(`mixed_integer.period_bound`). Let y be prices of the machines' time that add up to 1. Then no plan of several machines
has a period below Σ over pieces of min over machines of y · seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_split.planner.problem import Problem
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.instance import Flags, Floats, Instance, instance_of
from tvm_split.planner.search.mixed_integer import period_bound

STEPS = 60
"""Number of iterations of the search for prices."""
SHARPNESS = (8.0, 400.0)
"""Exponent that concentrates a piece on its cheapest machines, in the first and in the last iteration."""
SHORTEST = 1e-100
"""Seconds assumed for a piece that takes no time."""
MOST_TABLES = 256
MOST_ENTRIES = 200_000
"""Most entries in all tables of `SecondsAhead`; beyond that, the table for all machine classes is used."""
DIVISION_SECONDS = 1.0
"""Time limit of `division_bound`."""
LEAST = 1e-9
"""Lower limit of a price, as a share of the highest price."""


@dataclass(frozen=True)
class Prices:
    """Prices of one second of a machine of each class, and of each piece.

    ``bound`` is the sum over pieces in seconds: a lower bound on the period.
    """

    classes: Floats
    pieces: Floats
    bound: float


def fair_prices(seconds: Floats, counts: Floats, budget: Budget) -> Prices:
    """Search for the prices that give the greatest lower bound on the period.

    If the machines' speed ratios are the same for all pieces, prices by speed give the value of the relaxation at once.
    Otherwise the iterations raise the prices of the machines that most pieces choose.

    Args:
        seconds: (n, K) seconds of each piece on each class, under contention; infinite where it cannot run.
        counts: (K,) number of machines of each class.
    """
    usable = np.isfinite(seconds)
    seconds = np.where(usable, np.maximum(seconds, SHORTEST), np.inf)
    typical = np.where(usable.any(axis=1), np.min(seconds, axis=1), 1.0)
    rates = np.array([_rate(column, typical) for column in seconds.T])
    rates = np.maximum(rates, LEAST * rates.max())
    prices = rates / (counts @ rates)
    best = _prices(seconds, prices)
    sharpness = SHARPNESS[0]
    growth = (SHARPNESS[1] / SHARPNESS[0]) ** (1 / STEPS)
    for _ in range(STEPS):
        if budget.is_used_up or len(counts) == 1:
            break
        budget.spend(10 * seconds.size)
        costs = seconds * prices
        drawn = counts * (costs / costs.min(axis=1, keepdims=True)) ** -sharpness
        drawn /= drawn.sum(axis=1, keepdims=True)
        load = np.where(usable, drawn * np.where(usable, seconds, 0.0), 0.0).sum(axis=0) / counts
        prices = prices * np.clip(load / (load @ counts * prices.sum()), 1e-2, 1e2) ** (1.0 / sharpness)
        prices = np.maximum(prices, LEAST * prices.max())
        prices /= counts @ prices
        prices_now = _prices(seconds, prices)
        if prices_now.bound > best.bound:
            best = prices_now
        sharpness *= growth
    return best


def _rate(column: Floats, typical: Floats) -> float:
    able = np.isfinite(column)
    work = float(typical[able].sum())
    return work / float(column[able].sum()) if able.any() and work > 0 else LEAST


def _prices(seconds: Floats, prices: Floats) -> Prices:
    pieces = np.min(seconds * prices, axis=1)
    added = len(pieces) * SHORTEST  # at most, since no price is above 1
    return Prices(prices, pieces, max(float(pieces.sum()) - added, 0.0))


def client_bound(instance: Instance) -> float:
    """Return a lower bound on the period, in seconds, from each piece's tensors from and to the client.

    Each piece uses its best client link. A stage receives everything that the client sends to any of its pieces; each
    replica is charged for all of it.
    """
    client = instance.client
    received, sent = np.zeros(len(instance.pieces)), np.zeros(len(instance.pieces))
    for tensor in instance.tensors:
        if tensor.source == client:
            received[[piece for piece in tensor.destinations if piece != client]] += tensor.bytes
        elif client in tensor.destinations:
            sent[tensor.source] += tensor.bytes
    able = np.isfinite(instance.seconds)
    bound = 0.0
    for sizes, slow in ((received, instance.seconds_per_byte[-1, :-1]), (sent, instance.seconds_per_byte[:-1, -1])):
        for piece in np.flatnonzero(sizes):
            bound = max(bound, float(sizes[piece] * slow[able[piece]].min(initial=math.inf)))
    return bound


class SecondsAhead:
    """Lower bounds on the time of one micro-batch from a piece to the end: the longest path over the remaining pieces.

    Each piece of a path is placed on the best machine for that path.

    Args:
        classes: classes of identical machines that may be used.

    Attributes:
        lag, slow: (K + 1, K + 1) latency in seconds and seconds per byte between different machines of two classes;
            infinite latency where there is no link. The last row and column are the client's.
    """

    def __init__(self, instance: Instance, classes: Sequence[tuple[int, ...]]) -> None:
        first = [members[0] for members in classes]
        ends = np.ix_([*first, instance.client], [*(members[-1] for members in classes), instance.client])
        linked = instance.linked[ends]
        self.lag = np.where(linked, instance.latency[ends], math.inf)
        self.slow = np.where(linked, instance.seconds_per_byte[ends], 0.0)
        self._seconds = instance.seconds[:, first]
        self._client = instance.client
        self._readers = instance.behind
        self._size: dict[tuple[int, int], float] = {}
        for tensor in instance.tensors:
            for end in tensor.destinations:
                self._size[tensor.source, end] = self._size.get((tensor.source, end), 0.0) + tensor.bytes
        self._most = min(MOST_TABLES, MOST_ENTRIES // max(1, self._seconds.size))
        self._tables: dict[bytes, Floats] = {}
        everything = np.ones(len(classes), dtype=bool)
        self._loose, self._staying = self._of(everything)

    def whole(self) -> float:
        """Return a lower bound on the latency of every plan in seconds; exact for chains without limits."""
        rest = self._seconds + self._staying
        for piece in range(len(rest)):
            if (self._client, piece) in self._size:
                rest[piece] += self.lag[-1, :-1] + self._size[self._client, piece] * self.slow[-1, :-1]
        return float(rest.min(axis=1).max())

    def table(self, allowed: Flags) -> Floats:
        """Return (n, K) least seconds from the end of a stage to the end of the micro-batch.

        Row: a piece of that stage. Column: the class of its machine. The later pieces run on other machines, of the
        classes that ``allowed``, (K,), marks.
        """
        key = allowed.tobytes()
        if key not in self._tables:
            if len(self._tables) >= self._most:
                return self._loose
            self._tables[key] = self._of(allowed)[0]
        return self._tables[key]

    def _of(self, allowed: Flags) -> tuple[Floats, Floats]:
        """Return the table, and the same for the allowed classes if later pieces may stay on the same machine."""
        at = np.flatnonzero(allowed)
        leaving, staying = np.zeros_like(self._seconds), np.zeros((len(self._seconds), len(at)))
        same = np.eye(len(at), dtype=bool)
        for piece in reversed(range(len(leaving))):
            if (piece, self._client) in self._size:
                leaving[piece] = self.lag[:-1, -1] + self._size[piece, self._client] * self.slow[:-1, -1]
                staying[piece] = leaving[piece, at]
            for reader in self._readers[piece]:
                transfer = self.lag[:-1, at] + self._size[piece, reader] * self.slow[:-1, at]
                rest = self._seconds[reader, at] + staying[reader]
                leaving[piece] = np.maximum(leaving[piece], (transfer + rest).min(axis=1, initial=math.inf))
                stay = np.where(same, 0.0, transfer[at]) + rest
                staying[piece] = np.maximum(staying[piece], stay.min(axis=1, initial=math.inf))
        return leaving, staying


def division_bound(problem: Problem) -> float:
    """Return a lower bound, in seconds of the objective, for plans in which machines share a stage by sharding.

    Every piece is divided freely, without transfers. A part is assumed to take at least its share of the piece's time;
    a part that fits into a cache, where the whole piece does not, may be faster than that. For the latency, the input
    crosses at least one link between machines (to gather the shards) and the fastest links from and to the client. Like
    every latency, it includes no contention for cores.
    """
    if problem.objective == "throughput":
        return period_bound(instance_of(problem), Budget(DIVISION_SECONDS))
    alone = tuple(replace(machine, contention=1.0) for machine in problem.machines)
    instance = instance_of(replace(problem, machines=alone, shared_cores=()))
    machines = range(len(instance.machines))
    between = [float(instance.latency[a, b]) for a in machines for b in machines if a != b and instance.linked[a, b]]
    divided = max(period_bound(instance, Budget(DIVISION_SECONDS)), min(between, default=0.0))
    is_fed = any(tensor.source == instance.client for tensor in instance.tensors)
    is_read = any(instance.client in tensor.destinations for tensor in instance.tensors)
    for is_used, linked, latency in (
        (is_fed, instance.linked[-1], instance.latency[-1]),
        (is_read, instance.linked[:, -1], instance.latency[:, -1]),
    ):
        divided += float(np.min(latency[linked], initial=math.inf)) if is_used else 0.0
    return divided
