"""Plans on several machines as a mixed-integer linear program, and its linear relaxation, solved with HiGHS.

A binary variable places a piece on a machine. A variable of each tensor and pair of machines is 1 if it goes from the
first to the second; flow constraints tie it to both ends, which keeps the relaxation tight. Binary variables order the
machines; every tensor follows that order, so stages have no cycle. The period is at least the compute, receive and send
time of every machine. The latency uses a start time per machine, with a big-M constant where no tensor passes, and the
longest path over pieces, which is weaker but needs no such constant. Times are in units of the best known value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import highspy
import numpy as np
from highspy.highs import highs_linear_expression, highs_var

from tvm_split.errors import PlanError
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.candidate import Candidate, Placement, candidate, fits, within_limits
from tvm_split.planner.search.instance import Floats, Instance, Tensor

SOLVER_TOLERANCE = 1e-6
"""Relative tolerance of what HiGHS proves; bounds are lowered by it."""
NODE_WORK = 4000
"""Units of work of one node of the branch-and-bound tree, per row."""
MOST_NODES = 2**31 - 1
FEASIBILITY = 1e-7
"""Largest violation of a row that HiGHS accepts, for numbers scaled to about 1."""
Expression = highs_linear_expression
qsum = highspy.Highs.qsum


@dataclass(frozen=True)
class _Result:
    """Values of all variables, None if there are none; and a lower bound on the cost, infinite if infeasible."""

    values: Floats | None
    bound: float


def _solver() -> highspy.Highs:
    """Return an empty program, which is minimised on one thread."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver


def _solved(solver: highspy.Highs, budget: Budget, relative_gap: float) -> _Result:
    """Solve within a budget; one of work alone limits the nodes of the tree."""
    nodes = min(budget.work_left / (NODE_WORK * max(1, solver.getNumRow())), MOST_NODES)
    for option, value in (
        ("time_limit", max(budget.seconds_left, 0.01)),
        ("mip_max_nodes", MOST_NODES if math.isfinite(budget.seconds_left) else int(nodes)),
        ("mip_rel_gap", relative_gap),
        ("mip_abs_gap", 0.0),
        ("mip_feasibility_tolerance", FEASIBILITY),
    ):
        solver.setOptionValue(option, value)
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return _Result(None, math.inf)
    is_mixed = len(solver.getLp().integrality_) > 0
    bound = info.mip_dual_bound if is_mixed else info.objective_function_value
    is_bound = math.isfinite(bound) and (is_mixed or status == highspy.HighsModelStatus.kOptimal)
    has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return _Result(
        np.array(solver.getSolution().col_value) if has_values else None,
        max(0.0, bound) * (1 - SOLVER_TOLERANCE) if is_bound else 0.0,
    )


class PlacementProgram:
    """The mixed-integer program of one instance.

    Args:
        known: a plan to start from, or None; only better plans are searched.
        lower_bound: a proven lower bound on the objective, in seconds.
    """

    def __init__(self, instance: Instance, known: Candidate | None, lower_bound: float) -> None:
        problem = instance.problem
        self._instance, self._known = instance, known
        self._longest = longest_latency(instance)
        self._unit = (known.value(problem) if known else self._longest) or 1.0
        self._solver = solver = _solver()
        self._machines = range(len(instance.machines))
        self._moved: dict[tuple[int, int], list[tuple[highs_var, Tensor]]] = {}
        """By pair of machines, or the client: the tensors that may pass, with variables that are 1 if they do."""
        self._place = [
            {m: solver.addBinary() for m in self._machines if math.isfinite(instance.seconds[piece, m])}
            for piece in range(len(instance.pieces))
        ]
        for places in self._place:
            solver.addConstr(qsum(places.values()) == 1.0)
        self._used = [solver.addBinary() for _ in self._machines]
        self._limit_machines()
        self._order = {pair: solver.addBinary() for pair in itertools.combinations(self._machines, 2)}
        for a, b, c in itertools.permutations(self._machines, 3):
            solver.addConstr(self._before(a, b) + self._before(b, c) + self._before(c, a) <= 2.0)
        for tensor in instance.tensors:
            self._add_transfers(tensor)
        self._add_period(lower_bound)
        if problem.objective == "latency" or problem.maximum_latency_seconds < math.inf:
            self._add_latency(lower_bound)

    def solve(self, budget: Budget, relative_gap: float) -> tuple[float, Candidate | None]:
        """Return a lower bound in seconds on all plans of several machines, and the best plan found or None."""
        instance = self._instance
        start = self._start()
        columns = np.array([variable.index for variable in start], dtype=np.int32)
        self._solver.setSolution(len(start), columns, np.array(list(start.values()), dtype=np.float64))
        result = _solved(self._solver, budget, relative_gap)
        bound, values = result.bound * self._unit, result.values
        if values is None:
            return bound, None
        held: dict[int, list[int]] = {}
        for piece, places in enumerate(self._place):
            held.setdefault(max(places, key=lambda m: float(values[places[m].index])), []).append(piece)
        try:
            plan = candidate(instance, [Placement((machine,), tuple(pieces)) for machine, pieces in held.items()])
        except PlanError:  # HiGHS accepted a value as an integer that is not one
            return bound, None
        return bound, plan if fits(instance, plan) and within_limits(instance.problem, plan.flow) else None

    def _start(self) -> dict[highs_var, float]:
        """Return the values of the known plan, if it has several stages."""
        stages = self._known.stages if self._known else ()
        if len(stages) < 2:
            return {}
        machine_of = {piece: stage.machines[0] for stage in stages for piece in stage.pieces}
        rank = {stage.machines[0]: place for place, stage in enumerate(stages)}
        order = [*rank, *(m for m in self._machines if m not in rank)]
        return {
            **{v: float(machine_of[p] == m) for p, places in enumerate(self._place) for m, v in places.items()},
            **{self._used[m]: float(m in rank) for m in self._machines},
            **{v: float(order.index(first) < order.index(second)) for (first, second), v in self._order.items()},
        }

    def _limit_machines(self) -> None:
        solver, problem = self._solver, self._instance.problem
        for m, used in enumerate(self._used):
            placements = [places[m] for places in self._place if m in places]
            for placed in placements:
                solver.addConstr(placed <= used)
            solver.addConstr(used <= qsum(placements))
        if problem.stages is not None:
            solver.addConstr(qsum(self._used) == float(problem.stages))
        solver.addConstr(qsum(self._used) <= float(self._instance.machine_limit))

    def _before(self, first: int, second: int) -> Expression:
        """Return the expression that is 1 if a machine comes before another one."""
        return (
            Expression(self._order[first, second]) if first < second else Expression(1.0) - self._order[second, first]
        )

    def _add_transfers(self, tensor: Tensor) -> None:
        instance, solver, client = self._instance, self._solver, self._instance.client
        arrivals = self._arrivals(tensor)
        if tensor.source == client:
            for m, arrives in arrivals.items():
                self._moved.setdefault((client, m), []).append((arrives, tensor))
            return
        sources = self._place[tensor.source]
        if client in tensor.destinations:
            for m, placed in sources.items():
                self._moved.setdefault((m, client), []).append((placed, tensor))
        for b, arrives in arrivals.items():
            ways = {a: solver.addVariable(0.0, 1.0) for a in sources if a == b or instance.linked[a, b]}
            for a, way in ways.items():
                solver.addConstr(way <= sources[a])
                if a != b:
                    self._moved.setdefault((a, b), []).append((way, tensor))
                    solver.addConstr(way <= self._before(a, b))
            solver.addConstr(qsum(ways.values()) == arrives)

    def _arrivals(self, tensor: Tensor) -> dict[int, highs_var]:
        """Return, by machine, the variable that is 1 if the machine holds any destination of a tensor."""
        ends = [self._place[piece] for piece in tensor.destinations if piece != self._instance.client]
        if len(ends) == 1:
            return ends[0]
        able = [m for m in self._machines if any(m in places for places in ends)]
        arrivals = {m: self._solver.addVariable(0.0, 1.0) for m in able}
        for places in ends:
            for m, placed in places.items():
                self._solver.addConstr(placed <= arrivals[m])
        return arrivals

    def _add_period(self, lower_bound: float) -> None:
        """Limit the period, which is minimised for throughput, by the loads of machines, links and shared cores."""
        instance, problem, solver = self._instance, self._instance.problem, self._solver
        throughput, most, least = problem.objective == "throughput", problem.maximum_period_seconds, 0.0
        if throughput:
            most = min(most, self._known.flow.period_seconds * (1 + SOLVER_TOLERANCE)) if self._known else most
            least = lower_bound * (1 - SOLVER_TOLERANCE) / self._unit
        period = solver.addVariable(least, most * (1 + 1e-9) / self._unit, float(throughput))
        client_costs = problem.client_transfer_seconds, problem.client_transfer_seconds_per_byte
        busy = {instance.client: self._transfer_seconds(instance.client, *client_costs)}
        for m in self._machines:
            compute = self._seconds(m, float(instance.contention[m])) + self._transfer_seconds(
                m, float(instance.transfer_seconds[m]), float(instance.transfer_seconds_per_byte[m])
            )
            busy[m] = compute * problem.machines[m].cores
            for load in (
                compute,
                qsum(self._wire(pair) for pair in self._moved if pair[1] == m),
                qsum(self._wire(pair) for pair in self._moved if pair[0] == m),
            ):
                solver.addConstr(load <= period)
            if instance.memory[m] < math.inf:
                self._limit_memory(m)
        for members, cores in instance.core_sets:
            solver.addConstr(qsum(busy[m] for m in members) <= float(cores) * period)

    def _transfer_seconds(self, m: int, seconds: float, per_byte: float) -> Expression:
        """Return the computing time that sends and receives take on a machine or the client."""
        moved = (transfer for pair, passed in self._moved.items() if m in pair for transfer in passed)
        return qsum(variable * ((seconds + tensor.bytes * per_byte) / self._unit) for variable, tensor in moved)

    def _limit_memory(self, m: int) -> None:
        instance, solver = self._instance, self._solver
        memory = float(instance.memory[m]) or 1.0
        largest = solver.addVariable()
        placements = [(piece, places[m]) for piece, places in enumerate(self._place) if m in places]
        for piece, placed in placements:
            solver.addConstr(placed * float(instance.activations[piece] / memory) <= largest)
        weights = qsum(placed * float(instance.weights[piece] / memory) for piece, placed in placements)
        moved = (transfer for pair, passed in self._moved.items() if m in pair for transfer in passed)
        buffers = qsum(variable * (instance.problem.buffers * tensor.bytes / memory) for variable, tensor in moved)
        solver.addConstr(largest + weights + buffers <= float(instance.memory[m]) / memory)

    def _add_latency(self, lower_bound: float) -> None:
        """Limit the latency, or minimise it: stages start when all inputs have arrived."""
        instance, solver, problem, client = self._instance, self._solver, self._instance.problem, self._instance.client
        limit, least = min(problem.maximum_latency_seconds, self._longest), 0.0
        if problem.objective == "latency":
            limit = min(limit, self._known.flow.latency_seconds) if self._known else limit
            least = lower_bound * (1 - SOLVER_TOLERANCE) / self._unit
        large = limit * (1 + 1e-9) / self._unit
        latency = solver.addVariable(min(least, large), large, float(problem.objective == "latency"))
        starts = [solver.addVariable(0.0, large) for _ in self._machines]
        ends = [start + self._seconds(m, 1.0) for m, start in enumerate(starts)]
        for end in ends:
            solver.addConstr(end <= latency)
        for (a, b), passed in self._moved.items():
            crosses = solver.addVariable(0.0, 1.0) if client in (a, b) else solver.addBinary()
            for variable, _ in passed:
                solver.addConstr(variable <= crosses)
            arrival = self._wire((a, b)) + crosses * (float(instance.latency[a, b]) / self._unit)
            if a == client:
                solver.addConstr(arrival <= starts[b])
            elif b == client:
                solver.addConstr(ends[a] + arrival <= latency)
            else:
                solver.addConstr(ends[a] + arrival + crosses * large <= starts[b] + large)
        self._limit_paths(latency, large)

    def _limit_paths(self, latency: highs_var, large: float) -> None:
        """Bound the latency by the longest path: a piece ends after its predecessors and the transfers between them."""
        instance, solver = self._instance, self._solver
        seconds = [
            qsum(v * float(instance.seconds[piece, m] / self._unit) for m, v in places.items())
            for piece, places in enumerate(self._place)
        ]
        done = [solver.addVariable(0.0, large) for _ in instance.pieces]
        for piece, end in enumerate(done):
            solver.addConstr(seconds[piece] <= end)
            solver.addConstr(end <= latency)
        for tensor in instance.tensors:
            ends = [piece for piece in tensor.destinations if instance.client not in (piece, tensor.source)]
            arrival = self._link_seconds(tensor) if len(tensor.destinations) == 1 else 0.0
            for piece in ends:
                solver.addConstr(done[tensor.source] + seconds[piece] + arrival <= done[piece])

    def _link_seconds(self, tensor: Tensor) -> Expression:
        """Return the time of one tensor on the link that it takes, if any."""
        lag = {pair: float(self._instance.latency[pair]) / self._unit for pair in self._moved}
        return qsum(
            variable * (self._tensor_wire(tensor, pair) + lag[pair])
            for pair, passed in self._moved.items()
            for variable, moved in passed
            if moved is tensor
        )

    def _seconds(self, m: int, factor: float) -> Expression:
        """Return the computing time of a machine."""
        placements = ((piece, places[m]) for piece, places in enumerate(self._place) if m in places)
        return qsum(
            placed * float(self._instance.seconds[piece, m] * factor / self._unit) for piece, placed in placements
        )

    def _wire(self, pair: tuple[int, int]) -> Expression:
        """Return the time that tensors take on the link of a pair of machines, without its latency."""
        return qsum(variable * self._tensor_wire(tensor, pair) for variable, tensor in self._moved[pair])

    def _tensor_wire(self, tensor: Tensor, pair: tuple[int, int]) -> float:
        return tensor.bytes * float(self._instance.seconds_per_byte[pair]) / self._unit


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
    able = np.isfinite(instance.seconds)
    unit = float(np.where(able, instance.seconds, 0.0).sum(axis=0).max()) or 1.0
    solver = _solver()
    period = solver.addVariable(obj=1.0)
    place = [{m: solver.addVariable(0.0, 1.0) for m in np.flatnonzero(row).tolist()} for row in able]
    for places in place:
        solver.addConstr(qsum(places.values()) == 1.0)
    busy = {instance.client: Expression()}
    for m in range(len(instance.machines)):
        placements = [(piece, places[m]) for piece, places in enumerate(place) if m in places]
        contended = instance.seconds[:, m] * (instance.contention[m] / unit)
        compute = qsum(placed * float(contended[piece]) for piece, placed in placements)
        solver.addConstr(compute <= period)
        busy[m] = compute * instance.problem.machines[m].cores
        if not instance.problem.replicas and 0 < instance.memory[m] < math.inf:
            held = qsum(placed * float(instance.weights[piece] / instance.memory[m]) for piece, placed in placements)
            solver.addConstr(held <= 1.0)
    for members, cores in instance.core_sets:
        solver.addConstr(qsum(busy[m] for m in members) <= float(cores) * period)
    return _solved(solver, budget, 0.0).bound * unit
