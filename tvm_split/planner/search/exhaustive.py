"""Small graphs, exactly: every assignment of pieces to machines, a piece at a time, without those that cannot win.

Partial assignments are kept side by side as rows of arrays. Period, latency and memory only grow with more pieces, so a
row that is over a limit, or worse than a plan already known, is dropped with all that would follow from it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.candidate import Candidate, candidate
from tvm_split.planner.search.evaluate import Placed
from tvm_split.planner.search.ideals import predecessors
from tvm_split.planner.search.instance import TOLERANCE, Flags, Floats, Instance, Tensor
from tvm_split.planner.search.latency_bound import LatencyBound
from tvm_split.planner.search.machine_classes import machine_classes

MOST_ROWS = 300_000
"""Partial assignments kept at once, of 4 machines and 9 pieces all; where there would be more, the search gives up."""

SMALL_PIECES = 9
MOST_ROWS_OF_LARGE = 60_000

MOST_TIES = 50_000


@dataclass
class _Rows:
    """Partial assignments: N rows for M machines; the client is the machine behind the last.

    ``moved`` has the bytes and ``crosses`` whether anything goes from one machine to another, ``reaches`` whether
    values of a machine arrive at another, if only over others (and of each at itself).
    """

    choice: npt.NDArray[np.int8]
    alone: Floats
    compute: Floats
    receive: Floats
    send: Floats
    weights: Floats
    activations: Floats
    moved: Floats
    crosses: Flags
    reaches: Flags

    def taken(self, index: npt.NDArray[np.intp]) -> _Rows:
        return _Rows(*(getattr(self, each.name)[index] for each in fields(self)))

    def __len__(self) -> int:
        return len(self.choice)


class ExhaustiveSearch:
    """The best plan of several machines for one instance.

    Args:
        known: a plan that is to be beaten.
        bound: what the rest of a plan takes at least, where the latency is limited.
    """

    def __init__(self, instance: Instance, known: Candidate | None, bound: LatencyBound | None) -> None:
        problem = instance.problem
        self._instance = instance
        self._machines = len(instance.machines)
        self._period_limit, self._latency_limit = problem.maximum_period_seconds, problem.maximum_latency_seconds
        if known is not None:
            value = known.value(problem)
            if problem.objective == "throughput":
                self._period_limit = min(self._period_limit, value)
            else:
                self._latency_limit = min(self._latency_limit, value)
        classes = machine_classes(instance)
        self._twin = {later: earlier for members in classes for earlier, later in itertools.pairwise(members)}
        self._ahead: list[list[tuple[int, Floats]]] = [[] for _ in instance.pieces]
        if self._latency_limit < math.inf and bound is not None:
            self._look_ahead(bound)
        self._into: list[list[Tensor]] = [[] for _ in instance.pieces]
        self._outof: list[list[Tensor]] = [[] for _ in instance.pieces]
        for tensor in instance.tensors:
            for piece in tensor.destinations:
                if piece != instance.client:
                    self._into[piece].append(tensor)
            if instance.client in tensor.destinations:
                self._outof[tensor.source].append(tensor)

    def _look_ahead(self, bound: LatencyBound) -> None:
        """For every piece placed last: the pieces with successors still to place, and what these take at least."""
        for later, each in enumerate(predecessors(self._instance)):
            for other in each:
                least = bound.step(other, later)
                for last in range(other, later):
                    self._ahead[last].append((other, least))

    def best(self, deadline: float) -> tuple[bool, Candidate | None]:
        """Whether the search came to its end, and the best plan of several machines as good as the known one."""
        rows = self._start()
        for piece in range(len(self._instance.pieces)):
            grown = [self._placed(rows, piece, machine) for machine in range(self._machines)]
            kept = [each for each in grown if each is not None and len(each)]
            if not kept:
                return True, None
            most = MOST_ROWS if piece < SMALL_PIECES else MOST_ROWS_OF_LARGE
            if sum(map(len, kept)) > most or time.monotonic() > deadline:
                return False, None
            rows = _Rows(*(np.concatenate([getattr(each, name.name) for each in kept]) for name in fields(_Rows)))
        return self._best_of(rows)

    def _start(self) -> _Rows:
        machines, pieces = self._machines, len(self._instance.pieces)
        pairs = (1, machines + 1, machines + 1)
        return _Rows(
            np.full((1, pieces), -1, dtype=np.int8),
            alone=np.zeros((1, machines)),
            compute=np.zeros((1, machines)),
            receive=np.zeros((1, machines)),
            send=np.zeros((1, machines)),
            weights=np.zeros((1, machines)),
            activations=np.zeros((1, machines)),
            moved=np.zeros(pairs),
            crosses=np.zeros(pairs, dtype=bool),
            reaches=np.broadcast_to(np.eye(machines, dtype=bool), (1, machines, machines)).copy(),
        )

    def _placed(self, rows: _Rows, piece: int, machine: int) -> _Rows | None:
        """The rows with a piece on a machine, as far as that is allowed."""
        instance = self._instance
        seconds = float(instance.seconds[piece, machine])
        if math.isinf(seconds):
            return None
        allowed = np.ones(len(rows), dtype=bool)
        if machine in self._twin:  # equal machines are taken in their order
            unused = (rows.choice != machine).all(axis=1)
            allowed &= ~unused | (rows.choice == self._twin[machine]).any(axis=1)
        for tensor in self._into[piece]:
            if tensor.source != instance.client:
                source = rows.choice[:, tensor.source]
                allowed &= (source == machine) | instance.linked[source, machine]
        rows = rows.taken(np.flatnonzero(allowed))
        rows.choice[:, piece] = machine
        rows.alone[:, machine] += seconds
        rows.compute[:, machine] += seconds * instance.contention[machine]
        rows.weights[:, machine] += instance.weights[piece]
        rows.activations[:, machine] = np.maximum(rows.activations[:, machine], instance.activations[piece])
        for tensor in self._into[piece]:
            earlier = [other for other in tensor.destinations if other != instance.client and other < piece]
            arrived = (rows.choice[:, earlier] == machine).any(axis=1)
            if tensor.source == instance.client:
                source = np.full(len(rows), self._machines, dtype=np.int8)
            else:
                source = rows.choice[:, tensor.source]
            self._move(rows, np.flatnonzero((source != machine) & ~arrived), source, machine, tensor.bytes)
        for tensor in self._outof[piece]:
            source = np.full(len(rows), machine, dtype=np.int8)
            self._move(rows, np.arange(len(rows)), source, self._machines, tensor.bytes)
        return rows.taken(np.flatnonzero(self._possible(rows, piece)))

    def _move(
        self, rows: _Rows, where: npt.NDArray[np.intp], source: npt.NDArray[np.int8], end: int, size: float
    ) -> None:
        """Bytes from each row's own source to a machine, in some rows."""
        instance, client = self._instance, self._machines
        origin = source[where].astype(np.intp)
        stream = size * instance.seconds_per_byte[origin, end]
        rows.moved[where, origin, end] += size
        rows.crosses[where, origin, end] = True
        if end != client:
            rows.receive[where, end] += stream
            rows.compute[where, end] += instance.transfer_seconds[end] + size * instance.transfer_seconds_per_byte[end]
        machines = origin != client
        at, origin = where[machines], origin[machines]
        rows.send[at, origin] += stream[machines]
        rows.compute[at, origin] += (
            instance.transfer_seconds[origin] + size * instance.transfer_seconds_per_byte[origin]
        )
        if end != client:
            before, behind = rows.reaches[at, :, origin], rows.reaches[at, end, :]
            rows.reaches[at] |= before[:, :, None] & behind[:, None, :]

    def _possible(self, rows: _Rows, piece: int) -> Flags:
        """Rows that keep to all limits, now that a piece is placed."""
        instance, machines = self._instance, self._machines
        possible = np.maximum(np.maximum(rows.compute, rows.receive), rows.send).max(axis=1) <= (
            self._period_limit * (1 + TOLERANCE)
        )
        # Of two machines that reach each other, neither can start.
        both_ways = rows.reaches & rows.reaches.transpose(0, 2, 1)
        possible &= both_ways.sum(axis=(1, 2)) == machines
        exchanged = rows.moved[:, :machines].sum(axis=2) + rows.moved[:, :, :machines].sum(axis=1)
        memory = rows.weights + rows.activations + instance.problem.buffers * exchanged
        possible &= (memory <= instance.memory).all(axis=1)
        possible &= _machines_used(rows, machines) <= min(instance.machine_limit, instance.problem.stages or machines)
        if self._latency_limit < math.inf:
            near = np.flatnonzero(possible)
            latency = self._latency(rows.taken(near), self._ahead[piece])
            possible[near] = latency <= self._latency_limit * (1 + TOLERANCE)
        return np.asarray(possible, dtype=np.bool_)

    def _latency(self, rows: _Rows, ahead: Sequence[tuple[int, Floats]] = ()) -> Floats:
        """Of what is placed so far, and of what it takes at least ``ahead`` of pieces that are placed.

        The critical path over stages, found in as many rounds as a path can be long.
        """
        instance, machines = self._instance, self._machines
        wire = np.where(rows.crosses, rows.moved * instance.seconds_per_byte + instance.latency, -math.inf)
        finish = rows.alone + np.maximum(wire[:, machines, :machines], 0.0)
        for _ in range(machines - 1):
            arrival = (finish[:, :, None] + wire[:, :machines, :machines]).max(axis=1)
            finish = rows.alone + np.maximum(np.maximum(arrival, wire[:, machines, :machines]), 0.0)
        delivered = finish + wire[:, :machines, machines]
        latency = np.maximum(finish.max(axis=1), delivered.max(axis=1))
        for piece, least in ahead:
            machine = rows.choice[:, piece].astype(np.intp)
            latency = np.maximum(latency, finish[np.arange(len(rows)), machine] + least[machine])
        return np.asarray(latency, dtype=np.float64)

    def _best_of(self, rows: _Rows) -> tuple[bool, Candidate | None]:
        problem = self._instance.problem
        used = _machines_used(rows, self._machines)
        keep = (used > 1) & (used == problem.stages if problem.stages is not None else True)
        rows = rows.taken(np.flatnonzero(keep))
        if not len(rows):
            return True, None
        period = np.maximum(np.maximum(rows.compute, rows.receive), rows.send).max(axis=1)
        latency = self._latency(rows)
        keys = (period, latency) if problem.objective == "throughput" else (latency, period)
        order = np.lexsort((_machines_used(rows, self._machines), keys[1], keys[0]))
        equal = order[keys[0][order] <= keys[0][order[0]] * (1 + TOLERANCE)][:MOST_TIES]
        equal = equal[keys[1][equal] <= keys[1][equal].min() * (1 + TOLERANCE)]
        winner = int(equal[_machines_used(rows, self._machines)[equal].argmin()])
        return True, candidate(self._instance, stages_of(rows.choice[winner].tolist()))


def stages_of(choice: list[int]) -> list[Placed]:
    """Stages from the machine of every piece."""
    pieces: dict[int, list[int]] = {}
    for piece, machine in enumerate(choice):
        pieces.setdefault(machine, []).append(piece)
    return [Placed((machine,), tuple(each)) for machine, each in pieces.items()]


def _machines_used(rows: _Rows, machines: int) -> npt.NDArray[np.intp]:
    return np.asarray(
        sum((rows.choice == machine).any(axis=1).astype(np.intp) for machine in range(machines)), dtype=np.intp
    )
