"""Values that no plan can be below: by machines' prices, by the client's links, by the longest path, by divided pieces.

Prices are the dual of dividing every piece over the machines at will (`mixed_integer.period_bound`). For prices y of
the machines' time that add up to 1, no plan of several machines has a period below Σ over pieces of the least of
y · seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_split.planner.problem import Problem
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.ideals import predecessors, successors
from tvm_split.planner.search.instance import Flags, Floats, Instance, instance_of
from tvm_split.planner.search.mixed_integer import period_bound

STEPS = 60
"""Of the search for prices."""
SHARPNESS = (8.0, 400.0)
"""How strictly a piece goes where it is cheapest, in the first step and in the last."""
SHORTEST = 1e-100
"""Seconds, for pieces that take none."""
MOST_TABLES = 256
MOST_ENTRIES = 200_000
"""Of all tables of what is ahead; with more, what is left no longer counts."""
LEAST = 1e-9
"""Share of the highest price that no price is below."""


@dataclass(frozen=True)
class Prices:
    """Of a second of one machine of each class, and of each piece; ``bound`` is the sum over pieces, in seconds."""

    classes: Floats
    pieces: Floats
    bound: float


def fair_prices(seconds: Floats, counts: Floats, budget: Budget) -> Prices:
    """The prices of the greatest bound found.

    Where each piece takes all machines in the same proportion, prices by speed give the relaxation's own value at once;
    elsewhere they move towards the machines that most pieces choose.

    Args:
        seconds: (n, K) of each piece on a machine of each class, contention included; infinite where it cannot run.
        counts: (K,) machines of each class.
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
    """A lower bound on the period of every plan: each piece's tensors from the client, and to it, over the best link.

    A stage gets all that the client sends to any of its pieces, and replicas are charged all of it, too.
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
    """How long one micro-batch takes at least from a piece on, by the longest path of the pieces that are left.

    Each piece of a path is on the best machine for that path.

    Args:
        classes: identical machines, of those that count.

    Attributes:
        lag, slow: (K + 1, K + 1) latency and seconds per byte between different machines of two classes; infinite
            latency where there is no link. The last is the client.
    """

    def __init__(self, instance: Instance, classes: Sequence[tuple[int, ...]]) -> None:
        first = [members[0] for members in classes]
        ends = np.ix_([*first, instance.client], [*(members[-1] for members in classes), instance.client])
        linked = instance.linked[ends]
        self.lag = np.where(linked, instance.latency[ends], math.inf)
        self.slow = np.where(linked, instance.seconds_per_byte[ends], 0.0)
        self._seconds = instance.seconds[:, first]
        self._client = instance.client
        self._readers = successors(predecessors(instance))
        self._size: dict[tuple[int, int], float] = {}
        for tensor in instance.tensors:
            for end in tensor.destinations:
                self._size[tensor.source, end] = self._size.get((tensor.source, end), 0.0) + tensor.bytes
        self._most = min(MOST_TABLES, MOST_ENTRIES // max(1, self._seconds.size))
        self._tables: dict[bytes, Floats] = {}
        everything = np.ones(len(classes), dtype=bool)
        self._loose, self._staying = self._of(everything)

    def whole(self) -> float:
        """Seconds that every plan takes at least; exact on chains without limits."""
        rest = self._seconds + self._staying
        for piece in range(len(rest)):
            if (self._client, piece) in self._size:
                rest[piece] += self.lag[-1, :-1] + self._size[self._client, piece] * self.slow[-1, :-1]
        return float(rest.min(axis=1).max())

    def table(self, left: Flags) -> Floats:
        """(n, K) seconds from the end of a stage with a piece on a machine of a class to the end of everything.

        What follows is on machines of the classes in ``left``, (K,), and not on the machine of the stage.
        """
        key = left.tobytes()
        if key not in self._tables:
            if len(self._tables) >= self._most:
                return self._loose
            self._tables[key] = self._of(left)[0]
        return self._tables[key]

    def _of(self, left: Flags) -> tuple[Floats, Floats]:
        """The table; and the same, for the classes that are left, where what follows may stay on the machine."""
        at = np.flatnonzero(left)
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


def division_bound(problem: Problem, time_limit_seconds: float = 1.0) -> float:
    """Seconds, by the problem's objective, that no plan is below in which machines share a stage.

    Every piece is divided at will, and nothing is sent for it. A part of a piece is taken to need at least its share of
    the piece's time; one that fits into a cache where the whole does not could be below. One input alone crosses at
    least one link between machines, to become whole again, and waits for the quickest link from and to the client; it
    waits for no core, as in every latency.
    """
    if problem.objective == "throughput":
        return period_bound(instance_of(problem), Budget(time_limit_seconds))
    alone = tuple(replace(machine, contention=1.0) for machine in problem.machines)
    instance = instance_of(replace(problem, machines=alone, shared_cores=()))
    machines = range(len(instance.machines))
    between = [float(instance.latency[a, b]) for a in machines for b in machines if a != b and instance.linked[a, b]]
    divided = max(period_bound(instance, Budget(time_limit_seconds)), min(between, default=0.0))
    is_fed = any(tensor.source == instance.client for tensor in instance.tensors)
    is_read = any(instance.client in tensor.destinations for tensor in instance.tensors)
    for is_used, linked, latency in (
        (is_fed, instance.linked[-1], instance.latency[-1]),
        (is_read, instance.linked[:, -1], instance.latency[:, -1]),
    ):
        divided += float(np.min(latency[linked], initial=math.inf)) if is_used else 0.0
    return divided
