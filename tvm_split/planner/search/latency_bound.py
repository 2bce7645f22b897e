"""A lower bound on the latency, block after block.

A piece that comes before or after every other divides the graph: all of a block between two such pieces runs after the
one is done and before the other starts. In a block, an assignment of its pieces to machines takes at least its longest
path with transfers, and on every machine the sum of its pieces behind the earliest arrival and before the shortest way
out, since a machine computes one piece after the other. The least of that over all assignments of a small block, and
the longest path with the best machine for each piece of a large one, add up along the dividing pieces.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.ideals import dividing_pieces, predecessors, successors
from tvm_split.planner.search.instance import Flags, Floats, Instance

MOST_ASSIGNMENTS = 70_000

Machines = npt.NDArray[np.intp]


class LatencyBound:
    """What no plan of an instance can be below, whatever its limits.

    Args:
        deadline: (monotonic) after which blocks have only their longest paths looked at.

    Attributes:
        whole: seconds; exact on chains without limits.
        ahead: (n, M) seconds from the end of a piece on a machine to the end of everything, at least.
    """

    def __init__(self, instance: Instance, deadline: float = math.inf) -> None:
        self._wires = _Wires(instance)
        length, machines = len(instance.pieces), np.arange(len(instance.machines))
        client = np.array([instance.client])
        self.ahead = np.zeros((length, len(machines)))
        self._behind = successors(self._wires.before)
        # From the end backwards: the next dividing piece, its machines, and the least seconds from its start on.
        following, at, rest = length, client, np.zeros(1)
        for piece in reversed([instance.client, *dividing_pieces(instance)]):
            block = list(range(piece + 1, following))
            for other in reversed(block):
                self.ahead[other] = self._ahead_of(other, following, at, rest)
            here = client if piece == instance.client else machines
            between = _least_seconds(self._wires, piece, here, block, following, at, deadline)
            least = (between + rest[None, :]).min(axis=1)
            if piece == instance.client:
                self.whole = float(least.min())
            else:
                self.ahead[piece] = least
                following, at, rest = piece, machines, instance.seconds[piece] + least

    def step(self, piece: int, successor: int) -> Floats:
        """(M,) seconds from the end of a piece on each machine to the end of everything, by way of one successor."""
        machines = np.arange(self.ahead.shape[1])
        way = self._wires.seconds(piece, successor, machines[:, None], machines[None, :])
        rest = self._wires.instance.seconds[successor] + self.ahead[successor]
        return np.asarray((way + rest).min(axis=1), dtype=np.float64)

    def _ahead_of(self, piece: int, following: int, at: Machines, rest: Floats) -> Floats:
        machines = np.arange(self.ahead.shape[1])
        way = self._wires.seconds(piece, following, machines[:, None], at[None, :])
        least = (way + rest[None, :]).min(axis=1)
        for successor in self._behind[piece]:
            if successor != following:
                least = np.maximum(least, self.step(piece, successor))
        return np.asarray(least, dtype=np.float64)


class _Wires:
    """Seconds between pieces on given machines; the client is piece −1 at the start and piece n at the end."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.before = predecessors(instance)
        self.size: dict[tuple[int, int], float] = {}
        length = len(instance.pieces)
        for tensor in instance.tensors:
            for piece in tensor.destinations:
                pair = tensor.source, length if piece == instance.client else piece
                self.size[pair] = self.size.get(pair, 0.0) + tensor.bytes
        machines = len(instance.machines) + 1
        same = np.eye(machines, dtype=bool)
        self._latency = np.where(same, 0.0, np.where(instance.linked, instance.latency, math.inf))
        self._per_byte = np.where(same, 0.0, instance.seconds_per_byte)

    def seconds(self, source: int, end: int, at: Machines, to: Machines) -> Floats:
        """Of what goes from one piece to another, for arrays of machines; 0 where nothing does."""
        if (source, end) not in self.size:
            return np.zeros(np.broadcast_shapes(at.shape, to.shape))
        return np.asarray(self._latency[at, to] + self.size[source, end] * self._per_byte[at, to], dtype=np.float64)


def _least_seconds(
    wires: _Wires, first: int, at: Machines, block: list[int], last: int, to: Machines, deadline: float
) -> Floats:
    """(machines of the first piece, of the last): seconds from the end of the one to the start of the other."""
    options = [np.flatnonzero(np.isfinite(wires.instance.seconds[piece])) for piece in block]
    count = math.prod(len(each) for each in options)
    if not block:
        return wires.seconds(first, last, at[:, None], to[None, :])
    if count > MOST_ASSIGNMENTS or time.monotonic() > deadline:
        return _longest_path(wires, first, at, block, last, to)
    assignments = np.stack([each.ravel() for each in np.meshgrid(*options, indexing="ij")], axis=1)
    seconds = {piece: wires.instance.seconds[piece, assignments[:, place]] for place, piece in enumerate(block)}
    on = {piece: assignments[:, place] for place, piece in enumerate(block)}
    here = [{piece: on[piece] == machine for piece in block} for machine in range(len(wires.instance.machines))]
    loads = [np.sum([np.where(each[piece], seconds[piece], 0.0) for piece in block], axis=0) for each in here]
    ways_out = []
    for end in to:
        tails = _tails(wires, block, seconds, on, last, np.full(1, end))
        ways_out.append((tails, [_earliest(each, tails) for each in here]))
    found = np.empty((len(at), len(to)))
    for row, start in enumerate(at):
        if time.monotonic() > deadline:
            return _longest_path(wires, first, at, block, last, to)
        heads = _heads(wires, first, np.full(1, start), block, seconds, on)
        # A machine computes its pieces one after the other, behind the first arrival and before the shortest way out.
        serial = [_earliest(each, heads) + load for each, load in zip(here, loads, strict=True)]
        done = {piece: heads[piece] + seconds[piece] for piece in block}
        for column, (tails, shortest) in enumerate(ways_out):
            needed = np.full(count, float(wires.seconds(first, last, at[row : row + 1], to[column : column + 1])[0]))
            for piece in block:
                np.maximum(needed, done[piece] + tails[piece], out=needed)
            for load, tail in zip(serial, shortest, strict=True):
                np.maximum(needed, np.where(np.isinf(tail), 0.0, load + tail), out=needed)
            found[row, column] = needed.min()
    return found


def _earliest(here: dict[int, Flags], times: dict[int, Floats]) -> Floats:
    """The least of the times of the pieces on a machine; infinite where it has none."""
    return np.asarray(np.minimum.reduce([np.where(flags, times[piece], math.inf) for piece, flags in here.items()]))


def _heads(
    wires: _Wires, first: int, at: Machines, block: list[int], seconds: dict[int, Floats], on: dict[int, Machines]
) -> dict[int, Floats]:
    """When each piece can start, counted from the end of the first."""
    heads: dict[int, Floats] = {}
    for piece in block:
        start = np.asarray(wires.seconds(first, piece, at, on[piece]))
        for other in wires.before[piece]:
            if other in heads:
                arrival = heads[other] + seconds[other] + wires.seconds(other, piece, on[other], on[piece])
                start = np.maximum(start, arrival)
        heads[piece] = start
    return heads


def _tails(
    wires: _Wires, block: list[int], seconds: dict[int, Floats], on: dict[int, Machines], last: int, to: Machines
) -> dict[int, Floats]:
    """How long before the start of the last piece each must be done."""
    tails = {piece: np.asarray(wires.seconds(piece, last, on[piece], to)) for piece in block}
    for piece, other in itertools.product(reversed(block), block):
        if piece in wires.before[other]:
            way = wires.seconds(piece, other, on[piece], on[other]) + seconds[other] + tails[other]
            tails[piece] = np.maximum(tails[piece], way)
    return tails


def _longest_path(wires: _Wires, first: int, at: Machines, block: list[int], last: int, to: Machines) -> Floats:
    """As `_least_seconds`, with the best machine for every step of every path."""
    machines = np.arange(len(wires.instance.machines))
    found = np.asarray(wires.seconds(first, last, at[:, None], to[None, :]))
    for row, start in enumerate(at):
        done: dict[int, Floats] = {}
        for piece in block:
            begin = wires.seconds(first, piece, np.full(1, start), machines)
            for other in wires.before[piece]:
                if other in done:
                    way = done[other][:, None] + wires.seconds(other, piece, machines[:, None], machines[None, :])
                    begin = np.maximum(begin, way.min(axis=0))
            done[piece] = begin + wires.instance.seconds[piece]
            way = done[piece][:, None] + wires.seconds(piece, last, machines[:, None], to[None, :])
            found[row] = np.maximum(found[row], way.min(axis=0))
    return found
