"""Lower bounds that need no search: what no plan of a graph can be below."""

from __future__ import annotations

import math

import numpy as np

from tvm_split.planner.search.ideals import predecessors
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.linear_program import LinearProgram
from tvm_split.planner.search.milp import SOLVER_TOLERANCE


def period_bound(instance: Instance, time_limit_seconds: float) -> float:
    """Of plans of several machines: every piece divided over machines at will, nothing sent, memory kept to.

    The linear relaxation of scheduling on unrelated machines (Lenstra, Shmoys and Tardos 1990). Replicas hold all the
    weights, but share the time, so with them memory is left out. 0 where the time is too short.
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
    for m in machines:
        here = [(piece, columns[m]) for piece, columns in enumerate(place) if m in columns]
        contention = float(instance.contention[m]) / unit
        terms = [(column, float(instance.seconds[piece, m]) * contention) for piece, column in here]
        program.at_most([*terms, (period, -1.0)], 0.0)
        if not instance.problem.replicas and 0 < instance.memory[m] < math.inf:
            terms = [(column, float(instance.weights[piece] / instance.memory[m])) for piece, column in here]
            program.at_most(terms, 1.0)
    found = program.solve(time_limit_seconds, 0.0, {})
    return max(0.0, found.bound) * (1 - SOLVER_TOLERANCE) * unit


def latency_bound(instance: Instance) -> float:
    """The longest path, with every piece on the machine and every transfer over the link that is best for it.

    Exact on chains, since there the best machine of one piece is chosen together with that of the next.
    """
    before = predecessors(instance)
    size = {
        (tensor.source, piece): tensor.bytes for tensor in reversed(instance.tensors) for piece in tensor.destinations
    }
    machines = len(instance.machines)
    done = np.zeros((len(instance.pieces), machines))
    finish = 0.0
    for piece in range(len(instance.pieces)):
        start = np.zeros(machines)
        if (instance.client, piece) in size:
            start = _over(instance, np.zeros(1), size[instance.client, piece], slice(-1, None), slice(machines))
        for other in before[piece]:
            arrival = _over(instance, done[other], size[other, piece], slice(machines), slice(machines))
            start = np.maximum(start, arrival)
        done[piece] = start + instance.seconds[piece]
        finish = max(finish, float(done[piece].min()))
        if (piece, instance.client) in size:
            delivered = _over(
                instance, done[piece], size[piece, instance.client], slice(machines), slice(machines, machines + 1)
            )
            finish = max(finish, float(delivered.min()))
    return finish


def _over(instance: Instance, start: Floats, size: float, sources: slice, ends: slice) -> Floats:
    """When a tensor is at each of ``ends``, by one link from the best of ``sources``, where it is at ``start``."""
    linked, same = instance.linked[sources, ends], np.zeros(instance.linked[sources, ends].shape, dtype=bool)
    if sources == ends:
        np.fill_diagonal(same, True)
    wire = instance.latency[sources, ends] + size * instance.seconds_per_byte[sources, ends]
    seconds = np.where(same, 0.0, np.where(linked, wire, math.inf))
    return np.asarray((start[:, None] + seconds).min(axis=0), dtype=np.float64)
