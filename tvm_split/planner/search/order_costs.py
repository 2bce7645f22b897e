"""What stages take that are stretches of one topological order: between any two cuts, for units of machines.

A unit is what holds a stage: a machine, or with replicas several that share its micro-batches. Units that can be
exchanged are one kind, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Flags, Floats, Instance

Unit = tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """K kinds of units.

    Attributes:
        members: the units of each kind, all of one size.
        counts: (K,) how many there are of each.
        seconds: (n, K) of each piece, contention included; infinite where a member cannot run it. Exact for single
            machines, and for replicas that are slower than each other by the same ratio for every piece.
        transfer_seconds, transfer_seconds_per_byte: (K,). memory: (K,) of the smallest member.
        seconds_per_byte: (K + 1, K + 1) from a unit to another, of the slowest pair; infinite where a pair is not
            linked. The last is the client.
    """

    members: tuple[tuple[Unit, ...], ...]
    counts: npt.NDArray[np.intp]
    seconds: Floats
    transfer_seconds: Floats
    transfer_seconds_per_byte: Floats
    memory: Floats
    seconds_per_byte: Floats


def units_of(instance: Instance, classes: Sequence[Sequence[int]], sets: Sequence[Unit]) -> Units:
    """The units that ``sets`` of machines are; those whose members are of the same classes are of one kind."""
    class_of = {machine: number for number, members in enumerate(classes) for machine in members}
    kinds: dict[tuple[int, ...], list[Unit]] = {}
    for each in sets:
        kinds.setdefault(tuple(sorted(class_of[machine] for machine in each)), []).append(each)
    members = tuple(tuple(each) for each in kinds.values())
    first = [each[0] for each in members]
    seconds, transfers, per_byte = [], [], []
    for unit in first:
        at = np.array(unit)
        alone = instance.seconds[:, at] * instance.contention[at]
        able = np.isfinite(alone).all(axis=1)
        with np.errstate(divide="ignore"):
            seconds.append(np.where(able, 1.0 / (1.0 / alone).sum(axis=1), math.inf))
        rate = 1.0 / np.maximum(alone[able].sum(axis=0), 1e-300)
        share = rate / rate.sum() if len(unit) > 1 else np.ones(1)
        transfers.append(float(share**2 @ instance.transfer_seconds[at]))
        per_byte.append(float(share**2 @ instance.transfer_seconds_per_byte[at]))
    return Units(
        members=members,
        counts=np.array([len(each) for each in members], dtype=np.intp),
        seconds=np.stack(seconds, axis=1),
        transfer_seconds=np.array(transfers),
        transfer_seconds_per_byte=np.array(per_byte),
        memory=np.array([float(instance.memory[list(unit)].min()) for unit in first]),
        seconds_per_byte=_links(instance, members),
    )


def _links(instance: Instance, members: Sequence[Sequence[Unit]]) -> Floats:
    slow = np.where(instance.linked, instance.seconds_per_byte, math.inf)
    ends: list[Unit] = [*(each[0] for each in members), (instance.client,)]
    if all(len(each) == 1 for each in ends):
        first = [each[0] for each in ends]
        found: Floats = slow[np.ix_(first, first)]
    else:
        rows = np.stack([slow[np.array(each)].max(axis=0) for each in ends])
        found = np.stack([rows[:, np.array(each)].max(axis=1) for each in ends], axis=1)
    for kind, each in enumerate(members):
        found[kind, kind] = slow[np.ix_(each[0], each[1])].max() if len(each) > 1 else math.inf
    return found


class OrderCosts:
    """Stages of an instance along one topological order; row where a stage begins, column where it ends.

    What a stage sends counts once for each of its readers that are outside, as if all were in different stages, or, if
    they are ``together``, once.

    Attributes:
        received, sent: (P, P) bytes to and from other stages. from_client, to_client: the client's.
        tensors: (P, P) tensors that come in and go out.
    """

    def __init__(self, instance: Instance, order: Sequence[int], *, together: bool = False) -> None:
        self.instance = instance
        self.order = np.array(order, dtype=np.intp)
        length = len(order)
        place = np.empty(length, dtype=np.intp)
        place[self.order] = np.arange(length)
        shape = (length + 1, length + 1)
        self.received, self.sent, self.from_client, self.to_client, self.tensors = (np.zeros(shape) for _ in range(5))
        for tensor in instance.tensors:
            ends = sorted(int(place[piece]) for piece in tensor.destinations if piece != instance.client)
            source = -1 if tensor.source == instance.client else int(place[tensor.source])
            into = self.from_client if source < 0 else self.received
            # From behind the source to a reader, for stages that begin there and have not ended before it.
            for before, end in zip([source, *ends], ends, strict=False):
                for table, value in ((into, tensor.bytes), (self.tensors, 1.0)):
                    _rectangle(table, before + 1, end + 1, end + 1, length + 1, value)
            if source < 0:
                continue
            for end in ends[-1:] if together else ends:
                _rectangle(self.sent, 0, source + 1, source + 1, end + 1, tensor.bytes)
                _rectangle(self.tensors, 0, source + 1, source + 1, end + 1, 1.0)
            if instance.client in tensor.destinations:
                for table, value in ((self.to_client, tensor.bytes), (self.tensors, 1.0)):
                    _rectangle(table, 0, source + 1, source + 1, length + 1, value)
        for table in (self.received, self.sent, self.from_client, self.to_client, self.tensors):
            np.cumsum(np.cumsum(table, axis=0, out=table), axis=1, out=table)
            table[table < 1e-9 * table.max(initial=0.0)] = 0.0  # what differences leave of sums
        self.bytes = self.received + self.sent + self.from_client + self.to_client
        self.weights = np.concatenate([[0.0], np.cumsum(instance.weights[self.order])])
        self.activations = instance.activations[self.order]


def _rectangle(table: Floats, top: int, bottom: int, left: int, right: int, value: float) -> None:
    """Adds a value to rows ``top`` to ``bottom`` − 1 and columns ``left`` to ``right`` − 1 of what is summed later."""
    size = len(table)
    table[top, left] += value
    if bottom < size:
        table[bottom, left] -= value
    if right < size:
        table[top, right] -= value
        if bottom < size:
            table[bottom, right] += value


def costs_possible(costs: OrderCosts, units: Units, prefix: Floats, start: int, reach: int, period: float) -> Flags:
    """(K, reach − start): whether a unit of each kind can hold the stage from ``start`` to start + 1 … reach.

    Links are those that are best for each kind; others are looked at when the neighbours are known.
    """
    problem = costs.instance.problem
    columns = slice(start + 1, reach + 1)
    compute = prefix[:, columns] - prefix[:, start, None]
    size = costs.bytes[start, columns]
    if units.transfer_seconds.any() or units.transfer_seconds_per_byte.any():
        compute = compute + units.transfer_seconds[:, None] * costs.tensors[start, columns]
        compute = compute + units.transfer_seconds_per_byte[:, None] * size
    possible: Flags = compute <= period
    if units.memory.min() < math.inf:
        held = costs.weights[columns] - costs.weights[start]
        held = held + np.maximum.accumulate(costs.activations[start:reach]) + problem.buffers * size
        possible &= held <= units.memory[:, None] * (1 + 1e-12)
    return possible


class Stretches:
    """Pieces in an order, of P − 1; ``seconds`` (P − 1, K) of each on every kind of machine, infinite where it cannot.

    Attributes:
        prefix: (K, P) seconds of all pieces before a cut, as far as the kind can run them.
    """

    def __init__(self, seconds: Floats) -> None:
        blocked = np.isinf(seconds.T)
        kinds, length = blocked.shape
        start = np.zeros((kinds, 1))
        self.prefix: Floats = np.concatenate([start, np.cumsum(np.where(blocked, 0.0, seconds.T), axis=1)], axis=1)
        # At or behind each cut, the first one whose next piece is blocked, or the last of all.
        ends = np.concatenate([np.where(blocked, np.arange(length), length), np.full((kinds, 1), length)], axis=1)
        self._ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]

    def reach(self, period: float) -> npt.NDArray[np.intp]:
        """(K, P): the last cut before which everything from a cut on is computed within the period."""
        limit = period * (1 + 1e-12)
        longest = np.stack([np.searchsorted(each, each + limit, side="right") - 1 for each in self.prefix])
        return np.asarray(np.minimum(longest, self._ends), dtype=np.intp)
