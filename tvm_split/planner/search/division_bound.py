"""What no plan can be below even if layers are split inside: every piece divided at will, and nothing sent for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tvm_split.planner.problem import Problem
from tvm_split.planner.search.instance import instance_of
from tvm_split.planner.search.milp import period_bound


def division_bound(problem: Problem, time_limit_seconds: float = 1.0) -> float:
    """Seconds, by the problem's objective, of any plan in which machines share a stage.

    A part of a piece is taken to need at least its share of the piece's time; one that fits into a cache where the
    whole does not could be below. One input alone crosses at least one link between machines, to become whole again,
    and waits for the quickest link from and to the client; it waits for no core, as in every latency.
    """
    if problem.objective == "throughput":
        return period_bound(instance_of(problem), time_limit_seconds)
    alone = tuple(replace(machine, contention=1.0) for machine in problem.machines)
    instance = instance_of(replace(problem, machines=alone, shared_cores=()))
    machines = range(len(instance.machines))
    between = [float(instance.latency[a, b]) for a in machines for b in machines if a != b and instance.linked[a, b]]
    divided = max(period_bound(instance, time_limit_seconds), min(between, default=0.0))
    is_fed = any(tensor.source == instance.client for tensor in instance.tensors)
    is_read = any(instance.client in tensor.destinations for tensor in instance.tensors)
    for is_used, linked, latency in (
        (is_fed, instance.linked[-1], instance.latency[-1]),
        (is_read, instance.linked[:, -1], instance.latency[:, -1]),
    ):
        divided += float(np.min(latency[linked], initial=math.inf)) if is_used else 0.0
    return divided
