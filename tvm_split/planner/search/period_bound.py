"""A lower bound on the period that needs no search."""

from __future__ import annotations

import math

import numpy as np

from tvm_split.planner.search.instance import Instance
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
