"""Lower bounds on a plan's value: from machine prices, client links, the longest path and freely divided pieces.

Prices are the dual of the linear relaxation that divides every piece freely over the machines (`period_bound`). Let y
be prices of the machines' time that add up to 1. Then no plan of several machines has a period below Σ over pieces of
min over machines of y · seconds.
"""

import math
from dataclasses import dataclass, replace
from operator import attrgetter

import highspy
import numpy as np
import numpy.typing as npt
from highspy.highs import highs_linear_expression

from tvm_split.placement.problem import TOLERANCE, Problem
from tvm_split.placement.search.budget import Budget
from tvm_split.placement.search.instance import Floats, Instance, instance_of

SOLVER_TOLERANCE = 1e-6
"""Relative tolerance of what HiGHS proves; bounds are lowered by it."""
STEPS = 60
"""Iterations of `fair_prices`. On the problems of `make bench NAME=planner`, 240 raise its bounds by 0.01 %."""
SHARPNESS = (4.0, 1600.0)
"""Inverse temperature in the first and in the last iteration of `fair_prices`.

At 400 instead of 1,600 the bounds are 0.15 % lower, at 400 from the beginning up to 80 % on small random problems.
"""
SHORTEST = 1e-100
"""Seconds assumed for a piece that takes no time, so that ratios of times exist."""
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


def fair_prices(seconds: Floats, counts: npt.NDArray[np.intp], budget: Budget) -> Prices:
    """Search for the prices that give the greatest lower bound on the period, by deterministic annealing.

    This is the discrete invisible-hand algorithm (Kosowsky, Yuille 1994, "The invisible hand algorithm: solving the
    assignment problem with statistical physics") with seconds as demand. Each piece is shared over the machines by a
    soft minimum of price × seconds, at a temperature that falls. Each price is multiplied by the machine's load to the
    power of the temperature: machines with much load become more expensive. The bound holds for any prices.

    It starts with prices by speed, which are optimal if the machines' speed ratios are the same for all pieces. Exact
    prices by HiGHS raise the bounds by at most 0.06 %. For 1,024 unlike machines they take 125 s, this takes 0.7 s.

    Args:
        seconds: (n, K) seconds of each piece on each class, under contention; infinite where it cannot run.
        counts: (K,) number of machines of each class.
    """
    seconds = np.maximum(seconds, SHORTEST)
    prices = _normalised((seconds.min(axis=1, keepdims=True) / seconds).mean(axis=0), counts)
    best, work = _prices(seconds, prices), np.where(np.isinf(seconds), 0.0, seconds)
    for sharpness in np.geomspace(*SHARPNESS, STEPS).tolist():
        if budget.is_used_up or len(counts) == 1:
            break
        budget.spend(10 * seconds.size)
        costs = seconds * prices
        amounts = counts * (costs / costs.min(axis=1, keepdims=True)) ** -sharpness
        amounts /= amounts.sum(axis=1, keepdims=True)
        loads = (amounts * work).sum(axis=0) / counts
        prices = _normalised(prices * loads ** (1.0 / sharpness), counts)
        best = max(best, _prices(seconds, prices), key=attrgetter("bound"))
    return best


def _normalised(prices: Floats, counts: npt.NDArray[np.intp]) -> Floats:
    """Return prices that are all positive and add up to 1 over all machines."""
    prices = np.maximum(prices, LEAST * prices.max())
    return np.asarray(prices / (counts @ prices))


def _prices(seconds: Floats, prices: Floats) -> Prices:
    pieces = np.min(seconds * prices, axis=1)
    return Prices(prices, pieces, max(float(pieces.sum()) - len(pieces) * SHORTEST, 0.0))  # no price is above 1


def client_bound(instance: Instance) -> float:
    """Return a lower bound on the period, in seconds, from each piece's tensors from and to the client.

    Each piece uses its best client link. A stage receives everything that the client sends to any of its pieces; each
    replica is charged for all of it. The bound is lowered by `TOLERANCE`.
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
        best = np.where(able, slow, math.inf).min(axis=1)[sizes > 0]
        bound = max(bound, float((sizes[sizes > 0] * best).max(initial=0.0)))
    return bound * (1 - TOLERANCE)


def period_bound(instance: Instance, budget: Budget) -> float:
    """Return a lower bound in seconds on the period of plans of several machines; 0 if the budget does not suffice.

    Pieces are divided freely over machines, within memory and cores, and only the transfers from and to the client
    cost time: the linear relaxation of scheduling on unrelated machines (Lenstra, Shmoys and Tardos 1990). Replicas
    share the time, but each holds all weights, so with replicas memory is not limited.
    """
    problem, classes, qsum = instance.problem, instance.classes, highspy.Highs.qsum
    transfers, client_seconds = client_transfers(instance)
    first = [members[0] for members in classes]
    contended = (instance.seconds * instance.contention + transfers)[:, first]
    able = np.isfinite(contended)
    unit = float(np.where(able, contended, 0.0).sum(axis=0).max()) or 1.0
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, setting in (("output_flag", False), ("threads", 1), ("time_limit", max(budget.seconds_left, 0.01))):
        solver.setOptionValue(option, setting)
    period = solver.addVariable(obj=1.0)
    place = [{index: solver.addVariable(0.0, 1.0) for index in np.flatnonzero(row).tolist()} for row in able]
    for places in place:
        solver.addConstr(qsum(places.values()) == 1.0)
    busy = {instance.client: highs_linear_expression(client_seconds / unit)}
    for index, members in enumerate(classes):
        placements = [(piece, places[index]) for piece, places in enumerate(place) if index in places]
        compute = qsum(placed * float(contended[piece, index] / unit) for piece, placed in placements)
        solver.addConstr(compute <= float(len(members)) * period)
        busy[members[0]] = compute * problem.machines[members[0]].cores
        memory = float(instance.memory_bytes[members[0]])
        if not problem.replicas and 0 < memory < math.inf:
            held = qsum(placed * float(instance.weight_bytes[piece] / memory) for piece, placed in placements)
            solver.addConstr(held <= float(len(members)))
    for sharing, cores in instance.core_sets:
        solver.addConstr(qsum(seconds for m, seconds in busy.items() if m in sharing) <= float(cores) * period)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return math.inf
    is_solved = status == highspy.HighsModelStatus.kOptimal
    return max(0.0, solver.getInfo().objective_function_value) * (1 - SOLVER_TOLERANCE) * unit if is_solved else 0.0


def client_transfers(instance: Instance) -> tuple[Floats, float]:
    """Return (n, M) seconds by which tensors from and to the client lengthen a piece, and the client's own seconds.

    A tensor that several pieces read is sent at least once, to the stage of the first of them.
    """
    problem, seconds, client_seconds = instance.problem, np.zeros(instance.seconds.shape), 0.0
    for tensor in instance.tensors:
        ends = [piece for piece in (tensor.source, *tensor.destinations) if piece != instance.client]
        if ends and instance.client in (tensor.source, *tensor.destinations):
            seconds[ends[0]] += instance.transfer_seconds + tensor.bytes * instance.transfer_seconds_per_byte
            client_seconds += problem.client_transfer_seconds + tensor.bytes * problem.client_transfer_seconds_per_byte
    return seconds, client_seconds


def longest_path(instance: Instance) -> float:
    """Return a lower bound on the latency of every plan in seconds; exact for chains without limits.

    It is the longest path over the pieces, each placed on the best machine for that path, lowered by `TOLERANCE`.
    """
    first = [members[0] for members in instance.classes]
    slow, lag = instance.class_links
    is_same = np.eye(len(first), dtype=bool)
    size: dict[tuple[int, int], float] = {}
    for tensor in instance.tensors:
        for end in tensor.destinations:
            size[tensor.source, end] = size.get((tensor.source, end), 0.0) + tensor.bytes
    rest = instance.seconds[:, first].copy()  # from the begin of a piece, by its machine class
    for piece in reversed(range(len(rest))):
        ahead = np.zeros(len(first))
        for reader in instance.behind[piece]:
            transfer = np.where(is_same, 0.0, lag[:-1, :-1] + size[piece, reader] * slow[:-1, :-1])
            ahead = np.maximum(ahead, (transfer + rest[reader]).min(axis=1))
        if (piece, instance.client) in size:
            ahead = np.maximum(ahead, lag[:-1, -1] + size[piece, instance.client] * slow[:-1, -1])
        rest[piece] += ahead
    for piece in range(len(rest)):
        if (instance.client, piece) in size:
            rest[piece] += lag[-1, :-1] + size[instance.client, piece] * slow[-1, :-1]
    return float(rest.min(axis=1).max()) * (1 - TOLERANCE)


def longest_latency(instance: Instance) -> float:
    """Return an upper bound on latency in seconds: pieces on slowest machines, tensors on slowest links, in turn."""
    seconds = math.fsum(max(value for value in row if math.isfinite(value)) for row in instance.seconds)
    slowest = float(instance.seconds_per_byte.max())
    sizes = math.fsum(tensor.bytes * len(tensor.destinations) for tensor in instance.tensors)
    stops = sum(len(tensor.destinations) for tensor in instance.tensors)
    return seconds + sizes * slowest + stops * float(instance.latency.max())


def division_bound(problem: Problem) -> float:
    """Return a lower bound, in seconds of the objective, for plans in which machines share a stage by sharding.

    Every piece is divided freely, without transfers. A part is assumed to take at least its share of the piece's time;
    a part that fits into a cache, where the whole piece does not, may be faster than that. For the latency, the input
    crosses at least one link between machines (to gather the shards) and the fastest links from and to the client. Like
    every latency, it includes no contention for cores.
    """
    if problem.objective == "throughput":
        return period_bound(instance_of(problem), Budget(DIVISION_SECONDS))
    alone = tuple(
        replace(machine, contention=1.0, transfer_seconds=0.0, transfer_seconds_per_byte=0.0)
        for machine in problem.machines
    )
    instance = instance_of(replace(problem, machines=alone, shared_cores=()))
    machines = range(len(instance.machines))
    between = [float(instance.latency[a, b]) for a in machines for b in machines if a != b and instance.linked[a, b]]
    divided = max(period_bound(instance, Budget(DIVISION_SECONDS)), min(between, default=0.0))
    is_fed = any(tensor.source == instance.client for tensor in instance.tensors)
    is_read = any(instance.client in tensor.destinations for tensor in instance.tensors)
    for is_used, ends in ((is_fed, (-1, slice(None))), (is_read, (slice(None), -1))):
        latency = instance.latency[ends][instance.linked[ends]]
        divided += float(np.min(latency, initial=math.inf)) if is_used else 0.0
    return divided
