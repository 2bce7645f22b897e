"""Costs of stages that are runs of one topological order, between any two cuts, for units of machines.

A unit holds one stage: a machine, or with replicas several machines that share its micro-batches. Interchangeable units
are of one kind, and only their number counts.
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
        counts: (K,) number of units of each kind.
        seconds: (n, K) seconds of each piece under contention; infinite if a member cannot run it. Exact for single
            machines, and for replicas whose speed ratio is the same for every piece.
        transfer_seconds, transfer_seconds_per_byte: (K,). memory: (K,) bytes of the smallest member.
        seconds_per_byte: (K + 1, K + 1) of the slowest pair from a unit to another; infinite if a pair is not linked.
            The last row and column are the client's.
    """

    members: tuple[tuple[Unit, ...], ...]
    counts: npt.NDArray[np.intp]
    seconds: Floats
    transfer_seconds: Floats
    transfer_seconds_per_byte: Floats
    memory: Floats
    seconds_per_byte: Floats


def units_of(instance: Instance, classes: Sequence[Sequence[int]], sets: Sequence[Unit]) -> Units:
    """Return ``sets`` of machines as units; units whose members have the same classes are of one kind."""
    class_of = {machine: number for number, members in enumerate(classes) for machine in members}
    kinds: dict[tuple[int, ...], list[Unit]] = {}
    for machines in sets:
        kinds.setdefault(tuple(sorted(class_of[machine] for machine in machines)), []).append(machines)
    members = tuple(tuple(kind) for kind in kinds.values())
    first = [units[0] for units in members]
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
        counts=np.array([len(units) for units in members], dtype=np.intp),
        seconds=np.stack(seconds, axis=1),
        transfer_seconds=np.array(transfers),
        transfer_seconds_per_byte=np.array(per_byte),
        memory=np.array([float(instance.memory[list(unit)].min()) for unit in first]),
        seconds_per_byte=_links(instance, members),
    )


def _links(instance: Instance, members: Sequence[Sequence[Unit]]) -> Floats:
    slow = np.where(instance.linked, instance.seconds_per_byte, math.inf)
    ends: list[Unit] = [*(units[0] for units in members), (instance.client,)]
    if all(len(end) == 1 for end in ends):
        first = [end[0] for end in ends]
        links: Floats = slow[np.ix_(first, first)]
    else:
        rows = np.stack([slow[np.array(end)].max(axis=0) for end in ends])
        links = np.stack([rows[:, np.array(end)].max(axis=1) for end in ends], axis=1)
    for kind, units in enumerate(members):
        links[kind, kind] = slow[np.ix_(units[0], units[1])].max() if len(units) > 1 else math.inf
    return links


class OrderCosts:
    """Transfers and sizes of stages along one topological order; row: first cut of a stage, column: its last cut.

    A sent tensor counts once per reader outside the stage, as if all readers were in different stages. With
    ``together``, it counts once.

    Attributes:
        received, sent: (P, P) bytes from and to other stages. from_client, to_client: bytes from and to the client.
        tensors: (P, P) number of tensors that the stage receives and sends.
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
            # Stages that begin after the source and after the previous reader, and that contain this reader.
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
            table[table < 1e-9 * table.max(initial=0.0)] = 0.0  # rounding errors of the differences
        self.bytes = self.received + self.sent + self.from_client + self.to_client
        self.weights = np.concatenate([[0.0], np.cumsum(instance.weights[self.order])])
        self.activations = instance.activations[self.order]


def _rectangle(table: Floats, top: int, bottom: int, left: int, right: int, value: float) -> None:
    """Add a value to rows top … bottom − 1 and columns left … right − 1, as differences for later cumulative sums."""
    size = len(table)
    table[top, left] += value
    if bottom < size:
        table[bottom, left] -= value
    if right < size:
        table[top, right] -= value
        if bottom < size:
            table[bottom, right] += value


def topological_orders(instance: Instance) -> list[list[int]]:
    """Return five topological orders: as given, by level from the inputs and from the outputs, two depth-first."""
    before, behind = instance.before, instance.behind
    length = len(before)
    depth = [0] * length
    height = [0] * length
    for piece in range(length):
        depth[piece] = max((depth[predecessor] + 1 for predecessor in before[piece]), default=0)
    for piece in reversed(range(length)):
        height[piece] = max((height[successor] + 1 for successor in behind[piece]), default=0)
    orders = [list(range(length)), sorted(range(length), key=lambda piece: (depth[piece], piece))]
    orders.append(sorted(range(length), key=lambda piece: (-height[piece], piece)))
    for sign in (1, -1):
        orders.append(_depth_first(before, behind, sign))
    return orders


def _depth_first(before: list[set[int]], behind: list[list[int]], sign: int) -> list[int]:
    waiting = [len(predecessors) for predecessors in before]
    ready = sorted((piece for piece, count in enumerate(waiting) if count == 0), key=lambda piece: sign * piece)
    order = []
    while ready:
        piece = ready.pop()
        order.append(piece)
        for successor in sorted(behind[piece], key=lambda number: sign * number):
            waiting[successor] -= 1
            if waiting[successor] == 0:
                ready.append(successor)
    return order


def costs_possible(costs: OrderCosts, units: Units, prefix: Floats, start: int, reach: int, period: float) -> Flags:
    """Return (K, reach − start): whether a unit of each kind can hold the stage from ``start`` to start + 1 … reach.

    Checks compute time and memory only; links are checked by the caller.
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
    """Compute times of runs of pieces in one order of P − 1 pieces.

    Args:
        seconds: (P − 1, K) seconds of each piece on every kind of unit; infinite where it cannot run.

    Attributes:
        prefix: (K, P) seconds of all pieces before a cut that the kind can run.
    """

    def __init__(self, seconds: Floats) -> None:
        blocked = np.isinf(seconds.T)
        kinds, length = blocked.shape
        start = np.zeros((kinds, 1))
        self.prefix: Floats = np.concatenate([start, np.cumsum(np.where(blocked, 0.0, seconds.T), axis=1)], axis=1)
        # The first cut, at or after each cut, whose next piece cannot run; the last cut if there is none.
        ends = np.concatenate([np.where(blocked, np.arange(length), length), np.full((kinds, 1), length)], axis=1)
        self._ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]

    def end(self, kind: int, start: int, period: float) -> int:
        """Return the last cut up to which all pieces from ``start`` compute within the period on one kind of unit."""
        limit = self.prefix[kind, start] + period * (1 + 1e-12)
        return int(min(np.searchsorted(self.prefix[kind], limit, side="right") - 1, self._ends[kind, start]))

    def reach(self, period: float) -> npt.NDArray[np.intp]:
        """Return (K, P): for each cut, the last cut up to which all pieces between them compute within the period."""
        limit = period * (1 + 1e-12)
        longest = np.stack([np.searchsorted(prefix, prefix + limit, side="right") - 1 for prefix in self.prefix])
        return np.asarray(np.minimum(longest, self._ends), dtype=np.intp)
