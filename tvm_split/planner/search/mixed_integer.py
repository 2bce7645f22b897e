"""Plans on several machines as a mixed-integer linear program.

x[p, m] places piece p on machine m. z[e, a, b] is 1 if tensor e goes from machine a to b; flow constraints tie it to
both ends, which keeps the relaxation tight. u[a, b] orders the machines; every tensor follows that order, so stages
have no cycle. The period is at least the compute, receive and send time of every machine. The latency uses a start time
per machine, with a big-M constant where no tensor passes, and the longest path over pieces, which is weaker but needs
no such constant. Times are in units of the best known value.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.candidate import Candidate, candidate, fits, within_limits
from tvm_split.planner.search.instance import Instance, Tensor
from tvm_split.planner.search.linear_program import LinearProgram
from tvm_split.planner.search.placement import Placement

SOLVER_TOLERANCE = 1e-6
"""Relative tolerance of what HiGHS proves; bounds are lowered by it."""


class PlacementProgram:
    """The mixed-integer program of one instance.

    Args:
        known: a plan to start from, or None; only better plans are searched.
        lower_bound: a proven lower bound on the objective, in seconds.
    """

    def __init__(self, instance: Instance, known: Candidate | None, lower_bound: float) -> None:
        problem = instance.problem
        self._instance = instance
        self._known = known
        self._longest = longest_latency(instance)
        self._unit = (known.value(problem) if known else self._longest) or 1.0
        self._program = LinearProgram()
        self._machines = range(len(instance.machines))
        throughput = problem.objective == "throughput"
        most = problem.maximum_period_seconds
        if throughput and known is not None:
            most = min(most, known.flow.period_seconds * (1 + SOLVER_TOLERANCE))
        least = lower_bound * (1 - SOLVER_TOLERANCE) / self._unit
        self._period = self._program.column(
            self._scaled(most), lower=least if throughput else 0.0, cost=float(throughput)
        )
        self._least_latency = 0.0 if throughput else least
        self._wants_latency = not throughput or problem.maximum_latency_seconds < math.inf
        self._place = [
            {m: self._program.binary() for m in self._machines if math.isfinite(instance.seconds[piece, m])}
            for piece in range(len(instance.pieces))
        ]
        for columns in self._place:
            self._program.equal([(column, 1.0) for column in columns.values()], 1.0)
        self._used = [self._program.binary() for _ in self._machines]
        self._limit_machines()
        self._before = self._order()
        self._arrives = [self._arrivals(tensor) for tensor in instance.tensors]
        self._moves = [self._transfers(index, tensor) for index, tensor in enumerate(instance.tensors)]
        self._limit_loads()
        if self._wants_latency:
            self._limit_latency(float(not throughput))

    def solve(self, budget: Budget, relative_gap: float) -> tuple[float, Candidate | None]:
        """Return a lower bound in seconds on all plans of several machines, and the best plan found or None."""
        instance = self._instance
        found = self._program.solve(budget, relative_gap, self._start())
        if found.infeasible:
            return math.inf, None
        bound = max(0.0, found.bound) * (1 - SOLVER_TOLERANCE) * self._unit
        if found.values is None:
            return bound, None
        values = found.values
        held: dict[int, list[int]] = {}
        for piece, columns in enumerate(self._place):
            held.setdefault(max(columns, key=lambda m: float(values[columns[m]])), []).append(piece)
        try:
            plan = candidate(instance, [Placement((machine,), tuple(pieces)) for machine, pieces in held.items()])
        except PlanError:  # HiGHS accepted a value as an integer that is not one
            return bound, None
        return bound, plan if fits(instance, plan) and within_limits(instance.problem, plan.flow) else None

    def _scaled(self, seconds: float) -> float:
        return seconds * (1 + 1e-9) / self._unit

    def _start(self) -> dict[int, float]:
        stages = self._known.stages if self._known else ()
        if len(stages) < 2:
            return {}
        machine_of = {piece: stage.machines[0] for stage in stages for piece in stage.pieces}
        values = {
            column: float(machine_of[piece] == m)
            for piece, columns in enumerate(self._place)
            for m, column in columns.items()
        }
        rank = {stage.machines[0]: place for place, stage in enumerate(stages)}
        order = [*sorted(rank, key=lambda m: rank[m]), *(m for m in self._machines if m not in rank)]
        values |= {self._used[m]: float(m in rank) for m in self._machines}
        for (one, other), (column, sign) in self._before.items():
            if sign > 0:
                values[column] = float(order.index(one) < order.index(other))
        return values

    def _limit_machines(self) -> None:
        program, problem = self._program, self._instance.problem
        for m in self._machines:
            for columns in self._place:
                if m in columns:
                    program.at_most([(columns[m], 1.0), (self._used[m], -1.0)], 0.0)
            program.at_most(
                [(self._used[m], 1.0), *((columns[m], -1.0) for columns in self._place if m in columns)], 0.0
            )
        every = [(column, 1.0) for column in self._used]
        if problem.stages is not None:
            program.equal(every, problem.stages)
        elif self._instance.machine_limit < len(self._used):
            program.at_most(every, self._instance.machine_limit)

    def _order(self) -> dict[tuple[int, int], tuple[int, float]]:
        """Return the order column of each pair of machines, and a sign: +1 for the column, -1 for 1 − the column."""
        before: dict[tuple[int, int], tuple[int, float]] = {}
        for one, other in itertools.combinations(self._machines, 2):
            column = self._program.binary()
            before[one, other], before[other, one] = (column, 1.0), (column, -1.0)
        for a, b, c in itertools.permutations(self._machines, 3):
            terms = [before[a, b], before[b, c], before[c, a]]
            negative = sum(sign < 0 for _, sign in terms)
            self._program.at_most(terms, 2.0 - negative)
        return before

    def _arrivals(self, tensor: Tensor) -> dict[int, int]:
        """Return, by machine, the column that is 1 if the machine holds any destination of a tensor."""
        ends = [piece for piece in tensor.destinations if piece != self._instance.client]
        if len(ends) == 1:
            return self._place[ends[0]]
        columns = {}
        for m in self._machines:
            placed = [self._place[piece][m] for piece in ends if m in self._place[piece]]
            if placed:
                columns[m] = self._program.column(1.0)
                for column in placed:
                    self._program.at_most([(column, 1.0), (columns[m], -1.0)], 0.0)
        return columns

    def _transfers(self, index: int, tensor: Tensor) -> dict[tuple[int, int], int]:
        """Return, by pair of machines, the column that is 1 if a tensor goes from the first to the second."""
        instance, program = self._instance, self._program
        if tensor.source == instance.client:
            return {}
        sources, ends = self._place[tensor.source], self._arrives[index]
        columns: dict[tuple[int, int], int] = {}
        for b, arrives in ends.items():
            from_here = []
            for a, placed in sources.items():
                if a != b and not instance.linked[a, b]:
                    continue
                column = program.column(1.0)
                from_here.append((column, 1.0))
                program.at_most([(column, 1.0), (placed, -1.0)], 0.0)
                if a != b:
                    columns[a, b] = column
                    before, sign = self._before[a, b]
                    program.at_most([(column, 1.0), (before, -sign)], 0.0 if sign > 0 else 1.0)
            program.equal([*from_here, (arrives, -1.0)], 0.0)
        return columns

    def _limit_loads(self) -> None:
        instance, program, period = self._instance, self._program, (self._period, -1.0)
        problem = instance.problem
        computing: dict[int, list[tuple[int, float]]] = {instance.client: self._transfers_of_client()}
        for m in self._machines:
            compute = self._computing(m, float(instance.contention[m]))
            receive: list[tuple[int, float]] = []
            send: list[tuple[int, float]] = []
            exchanged: list[tuple[int, float]] = []
            for index, tensor in enumerate(instance.tensors):
                into = [(column, a) for (a, b), column in self._moves[index].items() if b == m]
                outof = [(column, b) for (a, b), column in self._moves[index].items() if a == m]
                if tensor.source == instance.client and m in self._arrives[index]:
                    into = [(self._arrives[index][m], -1)]
                if instance.client in tensor.destinations and m in self._place[tensor.source]:
                    outof.append((self._place[tensor.source][m], -1))
                cost = float(instance.transfer_seconds[m] + tensor.bytes * instance.transfer_seconds_per_byte[m])
                compute += [(column, cost / self._unit) for column, _ in (*into, *outof)]
                exchanged += [(column, tensor.bytes) for column, _ in (*into, *outof)]
                receive += [(column, self._wire(tensor, a, m)) for column, a in into]
                send += [(column, self._wire(tensor, m, b)) for column, b in outof]
            for load in (compute, receive, send):
                if load:
                    program.at_most([*load, period], 0.0)
            computing[m] = [(column, seconds * problem.machines[m].cores) for column, seconds in compute]
            if instance.memory[m] < math.inf:
                self._limit_memory(m, [(column, problem.buffers * size) for column, size in exchanged])

        for members, cores in instance.core_sets:
            busy = [term for m in members for term in computing.get(m, [])]
            program.at_most([*busy, (self._period, -float(cores))], 0.0)

    def _transfers_of_client(self) -> list[tuple[int, float]]:
        """Return the terms for the client's computing time of sends and receives."""
        instance, problem = self._instance, self._instance.problem
        found = []
        for index, tensor in enumerate(instance.tensors):
            cost = problem.client_transfer_seconds + tensor.bytes * problem.client_transfer_seconds_per_byte
            columns: list[int] = []
            if tensor.source == instance.client:
                columns += self._arrives[index].values()
            if instance.client in tensor.destinations:
                columns += self._place[tensor.source].values()
            found += [(column, cost / self._unit) for column in columns]
        return found

    def _limit_memory(self, m: int, buffers: list[tuple[int, float]]) -> None:
        instance, program = self._instance, self._program
        memory = float(instance.memory[m]) or 1.0
        largest = program.column()
        terms = [(largest, 1.0), *((column, size / memory) for column, size in buffers)]
        for piece, columns in enumerate(self._place):
            if m in columns:
                terms.append((columns[m], float(instance.weights[piece]) / memory))
                program.at_most([(columns[m], float(instance.activations[piece]) / memory), (largest, -1.0)], 0.0)
        program.at_most(terms, float(instance.memory[m]) / memory)

    def _limit_latency(self, cost: float) -> None:
        instance, program, problem = self._instance, self._program, self._instance.problem
        limit = min(problem.maximum_latency_seconds, self._longest)
        if problem.objective == "latency" and self._known is not None:
            limit = min(limit, self._known.flow.latency_seconds)
        large = self._scaled(limit)
        latency = program.column(large, lower=min(self._least_latency, large), cost=cost)
        starts = [program.column(large) for _ in self._machines]
        computing = [self._computing(m, 1.0) for m in self._machines]
        for m in self._machines:
            home = self._latency_of_client(m)
            program.at_most([(starts[m], 1.0), *computing[m], *home[1], (latency, -1.0)], 0.0)
            program.at_most([*home[0], (starts[m], -1.0)], 0.0)
        for a, b in itertools.permutations(self._machines, 2):
            moved = [(moves[a, b], index) for index, moves in enumerate(self._moves) if (a, b) in moves]
            if not moved:
                continue
            crosses = program.column(1.0, integer=True)
            terms = [(starts[a], 1.0), *computing[a], (starts[b], -1.0)]
            terms.append((crosses, large + float(instance.latency[a, b]) / self._unit))
            for column, index in moved:
                program.at_most([(column, 1.0), (crosses, -1.0)], 0.0)
                terms.append((column, self._wire(instance.tensors[index], a, b)))
            program.at_most(terms, large)
        self._limit_paths(latency, large)

    def _latency_of_client(self, m: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return the terms for transfers from the client before a machine starts, and to the client at its end."""
        instance, program, client = self._instance, self._program, self._instance.client
        sides: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
        for index, tensor in enumerate(instance.tensors):
            if tensor.source == client and m in self._arrives[index]:
                sides[0].append((self._arrives[index][m], self._wire(tensor, client, m)))
            if client in tensor.destinations and m in self._place[tensor.source]:
                sides[1].append((self._place[tensor.source][m], self._wire(tensor, m, client)))
        for side, pair in zip(sides, ((client, m), (m, client)), strict=True):
            if side and instance.latency[pair] > 0:
                any_of_them = program.column(1.0)
                for column, _ in side:
                    program.at_most([(column, 1.0), (any_of_them, -1.0)], 0.0)
                side.append((any_of_them, float(instance.latency[pair]) / self._unit))
        return sides

    def _limit_paths(self, latency: int, large: float) -> None:
        """Bound the latency by the longest path: a piece ends after its predecessors and the transfers between them."""
        instance, program = self._instance, self._program
        done = [program.column(large) for _ in instance.pieces]
        for piece, column in enumerate(done):
            program.at_most([*self._piece_seconds(piece), (column, -1.0)], 0.0)
            program.at_most([(column, 1.0), (latency, -1.0)], 0.0)
        for index, tensor in enumerate(instance.tensors):
            if tensor.source == instance.client:
                continue
            ends = [piece for piece in tensor.destinations if piece != instance.client]
            links: list[tuple[int, float]] = []
            if len(ends) == 1:
                links = [
                    (column, self._wire(tensor, a, b) + float(instance.latency[a, b]) / self._unit)
                    for (a, b), column in self._moves[index].items()
                ]
            for piece in ends:
                terms = [(done[tensor.source], 1.0), *self._piece_seconds(piece), *links, (done[piece], -1.0)]
                program.at_most(terms, 0.0)

    def _piece_seconds(self, piece: int) -> list[tuple[int, float]]:
        seconds = self._instance.seconds[piece]
        return [(column, float(seconds[m]) / self._unit) for m, column in self._place[piece].items()]

    def _computing(self, m: int, factor: float) -> list[tuple[int, float]]:
        seconds = self._instance.seconds[:, m]
        return [
            (columns[m], float(seconds[piece]) * factor / self._unit)
            for piece, columns in enumerate(self._place)
            if m in columns
        ]

    def _wire(self, tensor: Tensor, source: int, end: int) -> float:
        return tensor.bytes * float(self._instance.seconds_per_byte[source, end]) / self._unit


def longest_latency(instance: Instance) -> float:
    """Return an upper bound on latency in seconds: pieces on slowest machines, tensors on slowest links, in turn."""
    seconds = math.fsum(max(value for value in row if math.isfinite(value)) for row in instance.seconds)
    slowest = float(instance.seconds_per_byte.max())
    sizes = math.fsum(tensor.bytes * len(tensor.destinations) for tensor in instance.tensors)
    stops = sum(len(tensor.destinations) for tensor in instance.tensors)
    return seconds + sizes * slowest + stops * float(instance.latency.max())


def period_bound(instance: Instance, budget: Budget) -> float:
    """Return a lower bound in seconds on the period of plans of several machines; 0 if the budget does not suffice.

    Pieces are divided freely over machines, without transfers, within memory and cores: the linear relaxation of
    scheduling on unrelated machines (Lenstra, Shmoys and Tardos 1990). Replicas share the time, but each holds all
    weights, so with replicas memory is not limited.
    """
    unit = float(np.where(np.isfinite(instance.seconds), instance.seconds, 0.0).sum(axis=0).max()) or 1.0
    program = LinearProgram()
    period = program.column(cost=1.0)
    machines = range(len(instance.machines))
    place = [
        {m: program.column(1.0) for m in machines if math.isfinite(instance.seconds[piece, m])}
        for piece in range(len(instance.pieces))
    ]
    for columns in place:
        program.equal([(column, 1.0) for column in columns.values()], 1.0)
    computing: dict[int, list[tuple[int, float]]] = {}
    for m in machines:
        here = [(piece, columns[m]) for piece, columns in enumerate(place) if m in columns]
        contention = float(instance.contention[m]) / unit
        terms = [(column, float(instance.seconds[piece, m]) * contention) for piece, column in here]
        program.at_most([*terms, (period, -1.0)], 0.0)
        computing[m] = [(column, seconds * instance.problem.machines[m].cores) for column, seconds in terms]
        if not instance.problem.replicas and 0 < instance.memory[m] < math.inf:
            terms = [(column, float(instance.weights[piece] / instance.memory[m])) for piece, column in here]
            program.at_most(terms, 1.0)
    for members, cores in instance.core_sets:
        busy = [term for m in members for term in computing.get(m, [])]
        program.at_most([*busy, (period, -float(cores))], 0.0)
    found = program.solve(budget, 0.0, {})
    return max(0.0, found.bound) * (1 - SOLVER_TOLERANCE) * unit
