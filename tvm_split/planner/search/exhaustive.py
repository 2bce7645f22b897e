"""Small graphs, exactly: every assignment of pieces to machines, a piece at a time, without those that cannot win.

A piece goes to a set of machines; without replicas these are the single machines. Partial assignments are kept side by
side as rows of arrays. Period, latency and memory only grow with more pieces, so a row that is over a limit, or worse
than a plan already known, is dropped with all that would follow from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tvm_split.planner.problem import TOLERANCE
from tvm_split.planner.search.candidate import Candidate, candidate
from tvm_split.planner.search.ideals import predecessors
from tvm_split.planner.search.instance import Flags, Floats, Instance, Tensor
from tvm_split.planner.search.latency_bound import LatencyBound
from tvm_split.planner.search.machine_sets import count_of_sets, machine_sets
from tvm_split.planner.search.placement import Placed

MOST_ROWS = 400_000
"""Partial assignments kept at once, of 4 machines and 9 pieces all, replicas included (380,745); where there would be
more, the search gives up."""

SMALL_PIECES = 9
SMALL_SETS = 63
"""So many sets of machines, of six unlike ones all, and so few pieces are tried however long that takes."""

MOST_ROWS_OF_LARGE = 60_000

MOST_TIES = 50_000


@dataclass
class _Rows:
    """Partial assignments: N rows for M machines; the client is the machine behind the last.

    A stage goes by the first machine of its set: at the others' columns there is nothing, but for ``alone``. ``choice``
    has the set of each piece and ``home`` that of each machine, −1 while there is none. ``alone`` is what a machine
    computes by itself, ``slowest`` the most of that in a set. ``tensors`` and ``bytes`` count what comes in and goes
    out. ``wire`` has the seconds of what goes from one stage to another, −∞ for nothing; ``reaches`` whether values of
    a stage arrive at another, if only over others (and of each at itself).
    """

    choice: npt.NDArray[np.int16]
    home: npt.NDArray[np.int16]
    alone: Floats
    slowest: Floats
    weights: Floats
    activations: Floats
    receive: Floats
    send: Floats
    tensors: Floats
    bytes: Floats
    wire: Floats
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
        self._sets = machine_sets(instance)
        self._client = len(self._sets.members)
        self._period_limit, self._latency_limit = problem.maximum_period_seconds, problem.maximum_latency_seconds
        if known is not None:
            value = known.value(problem)
            if problem.objective == "throughput":
                self._period_limit = min(self._period_limit, value)
            else:
                self._latency_limit = min(self._latency_limit, value)
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
        """For every piece placed last: the pieces with successors still to place, and what these take at least.

        A set is no faster than any of its members would be.
        """
        for later, each in enumerate(predecessors(self._instance)):
            for other in each:
                least = bound.step(other, later)
                of_sets = np.array([least[list(members)].max() for members in self._sets.members])
                for last in range(other, later):
                    self._ahead[last].append((other, of_sets))

    def best(self, deadline: float) -> tuple[bool, Candidate | None]:
        """Whether the search came to its end, and the best plan of several machines as good as the known one."""
        rows = self._start()
        for piece in range(len(self._instance.pieces)):
            few = piece < SMALL_PIECES and len(self._sets.members) <= SMALL_SETS
            most = MOST_ROWS if few else MOST_ROWS_OF_LARGE
            kept: list[_Rows] = []
            for place in np.flatnonzero(self._sets.allowed[piece]).tolist():
                grown = self._placed(rows, piece, place)
                if len(grown):
                    kept.append(grown)
                if sum(map(len, kept)) > most or time.monotonic() > deadline:
                    return False, None
            if not kept:
                return True, None
            rows = _Rows(*(np.concatenate([getattr(each, name.name) for each in kept]) for name in fields(_Rows)))
        return True, self._best_of(rows)

    def _start(self) -> _Rows:
        machines, pieces = self._machines, len(self._instance.pieces)
        own, with_client = (1, machines), (1, machines + 1)
        return _Rows(
            choice=np.full((1, pieces), -1, dtype=np.int16),
            home=np.full(own, -1, dtype=np.int16),
            alone=np.zeros(own),
            slowest=np.zeros(own),
            weights=np.zeros(own),
            activations=np.zeros(own),
            receive=np.zeros(with_client),
            send=np.zeros(with_client),
            tensors=np.zeros(with_client),
            bytes=np.zeros(with_client),
            wire=np.full((1, machines + 1, machines + 1), -math.inf),
            reaches=np.eye(machines, dtype=bool)[None],
        )

    def _placed(self, rows: _Rows, piece: int, place: int) -> _Rows:
        """The rows with a piece on a set of machines, as far as that is allowed."""
        instance, sets = self._instance, self._sets
        members, first = sets.members[place], sets.members[place][0]
        is_free = (rows.home[:, members] < 0).all(axis=1)
        for machine in sets.predecessors[place]:
            is_free &= rows.home[:, machine] >= 0
        allowed = is_free | (rows.home[:, first] == place)
        for tensor in self._into[piece]:
            if tensor.source != instance.client:
                source = rows.choice[:, tensor.source]
                allowed &= (source == place) | sets.linked[source, place]
        rows = rows.taken(np.flatnonzero(allowed))
        rows.choice[:, piece] = place
        rows.home[:, members] = place
        rows.alone[:, members] += instance.seconds[piece, members]
        rows.slowest[:, first] = rows.alone[:, members].max(axis=1)
        rows.weights[:, first] += instance.weights[piece]
        rows.activations[:, first] = np.maximum(rows.activations[:, first], instance.activations[piece])
        for tensor in self._into[piece]:
            earlier = [other for other in tensor.destinations if other != instance.client and other < piece]
            arrived = (rows.choice[:, earlier] == place).any(axis=1)
            if tensor.source == instance.client:
                source = np.full(len(rows), self._client, dtype=np.int16)
            else:
                source = rows.choice[:, tensor.source]
            self._move(rows, np.flatnonzero((source != place) & ~arrived), source, place, tensor.bytes)
        for tensor in self._outof[piece]:
            source = np.full(len(rows), place, dtype=np.int16)
            self._move(rows, np.arange(len(rows)), source, self._client, tensor.bytes)
        return rows.taken(np.flatnonzero(self._possible(rows, piece)))

    def _move(
        self, rows: _Rows, where: npt.NDArray[np.intp], source: npt.NDArray[np.int16], end: int, size: float
    ) -> None:
        """Bytes from each row's own source to a set of machines, in some rows."""
        sets = self._sets
        origin = source[where]
        start, to = sets.first[origin], int(sets.first[end])
        stream = size * sets.seconds_per_byte[origin, end]
        rows.wire[where, start, to] = np.maximum(rows.wire[where, start, to], sets.latency[origin, end]) + stream
        rows.send[where, start] += stream
        rows.receive[where, to] += stream
        for column in (start, to):
            rows.tensors[where, column] += 1
            rows.bytes[where, column] += size
        if end != self._client:
            between = origin != self._client
            at, start = where[between], start[between]
            before, behind = rows.reaches[at, :, start], rows.reaches[at, to, :]
            rows.reaches[at] |= before[:, :, None] & behind[:, None, :]

    def _possible(self, rows: _Rows, piece: int) -> Flags:
        """Rows that keep to all limits, now that a piece is placed."""
        instance, machines = self._instance, self._machines
        possible = self._period(rows) <= self._period_limit * (1 + TOLERANCE)
        # Of two stages that reach each other, neither can start.
        both_ways = rows.reaches & rows.reaches.transpose(0, 2, 1)
        possible &= both_ways.sum(axis=(1, 2)) == machines
        memory = rows.weights + rows.activations + instance.problem.buffers * rows.bytes[:, :machines]
        possible &= (memory <= self._sets.memory[rows.home]).all(axis=1)
        possible &= _machines_used(rows) <= instance.machine_limit
        if instance.problem.stages is not None:
            possible &= self._stages_used(rows) <= instance.problem.stages
        if self._latency_limit < math.inf:
            near = np.flatnonzero(possible)
            latency = self._latency(rows.taken(near), self._ahead[piece])
            possible[near] = latency <= self._latency_limit * (1 + TOLERANCE)
        return np.asarray(possible, dtype=np.bool_)

    def _period(self, rows: _Rows) -> Floats:
        """Of what is placed so far: the most that a stage computes, its replicas together, receives or sends.

        Or what machines that share cores keep busy of them.
        """
        instance, machines = self._instance, self._machines
        first = self._sets.first[rows.home]  # of no set, −1, the client's
        at = np.arange(len(rows))[:, None]
        compute = rows.alone * instance.contention + rows.tensors[at, first] * instance.transfer_seconds
        compute += rows.bytes[at, first] * instance.transfer_seconds_per_byte
        stages = at * (machines + 1) + first
        with np.errstate(divide="ignore"):  # without time, the rate is infinite
            rates = np.bincount(stages.ravel(), 1.0 / compute.ravel(), rows.send.size)
        slowest = np.where(rates > 0, rates, math.inf).reshape(rows.send.shape)[:, :machines].min(axis=1)
        exchange = np.maximum(rows.receive, rows.send)[:, :machines].max(axis=1)
        period = np.maximum(1.0 / slowest, exchange)
        if instance.core_sets:
            together = 1.0 / np.where(rates > 0, rates, math.inf).reshape(rows.send.shape)
            computing = np.where(rows.home >= 0, together[at, first], 0.0)
            period = np.maximum(period, self._sharing(rows, computing))
        return np.asarray(period, dtype=np.float64)

    def _sharing(self, rows: _Rows, computing: Floats) -> Floats:
        """The least period that shared cores allow, where machines compute for so long."""
        problem, period = self._instance.problem, np.zeros(len(rows))
        client = rows.tensors[:, -1] * problem.client_transfer_seconds
        client += rows.bytes[:, -1] * problem.client_transfer_seconds_per_byte
        for members, cores in self._instance.core_sets:
            busy = client.copy() if self._instance.client in members else np.zeros(len(rows))
            for machine in members:
                if machine != self._instance.client:
                    busy += computing[:, machine] * problem.machines[machine].cores
            period = np.maximum(period, busy / cores)
        return period

    def _latency(self, rows: _Rows, ahead: Sequence[tuple[int, Floats]] = ()) -> Floats:
        """Of what is placed so far, and of what it takes at least ``ahead`` of pieces that are placed.

        The critical path over stages, found in as many rounds as a path can be long.
        """
        machines = self._machines
        between, enter = rows.wire[:, :machines, :machines], np.maximum(rows.wire[:, machines, :machines], 0.0)
        finish = rows.slowest + enter
        for _ in range(machines - 1):
            finish = rows.slowest + np.maximum((finish[:, :, None] + between).max(axis=1), enter)
        delivered = finish + rows.wire[:, :machines, machines]
        latency = np.maximum(finish.max(axis=1), delivered.max(axis=1))
        for piece, least in ahead:
            place = rows.choice[:, piece]
            latency = np.maximum(latency, finish[np.arange(len(rows)), self._sets.first[place]] + least[place])
        return np.asarray(latency, dtype=np.float64)

    def _best_of(self, rows: _Rows) -> Candidate | None:
        problem = self._instance.problem
        keep = _machines_used(rows) > 1
        if problem.stages is not None:
            keep &= self._stages_used(rows) == problem.stages
        rows = rows.taken(np.flatnonzero(keep))
        if not len(rows):
            return None
        period, latency, used = self._period(rows), self._latency(rows), _machines_used(rows)
        keys = (period, latency) if problem.objective == "throughput" else (latency, period)
        order = np.lexsort((used, keys[1], keys[0]))
        equal = order[keys[0][order] <= keys[0][order[0]] * (1 + TOLERANCE)][:MOST_TIES]
        equal = equal[keys[1][equal] <= keys[1][equal].min() * (1 + TOLERANCE)]
        winner = int(equal[used[equal].argmin()])
        return candidate(self._instance, stages_of(self._sets.members[place] for place in rows.choice[winner]))

    def _stages_used(self, rows: _Rows) -> npt.NDArray[np.intp]:
        """Sets are counted by their first machine."""
        is_first = self._sets.first[rows.home] == np.arange(self._machines)
        return np.asarray(is_first.sum(axis=1), dtype=np.intp)


def is_small(instance: Instance) -> bool:
    """Whether every plan is tried whatever the time limit, if there are not too many."""
    return len(instance.pieces) <= SMALL_PIECES and count_of_sets(instance) <= SMALL_SETS


def stages_of(places: Iterable[tuple[int, ...]]) -> list[Placed]:
    """Stages from the machines of every piece."""
    pieces: dict[tuple[int, ...], list[int]] = {}
    for piece, machines in enumerate(places):
        pieces.setdefault(machines, []).append(piece)
    return [Placed(machines, tuple(each)) for machines, each in pieces.items()]


def _machines_used(rows: _Rows) -> npt.NDArray[np.intp]:
    return np.asarray((rows.home >= 0).sum(axis=1), dtype=np.intp)
