"""What anyone would do by hand, in a fraction of a second: no plan that is delivered is to be worse."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.search.candidate import Candidate, candidate, fits
from tvm_split.planner.search.evaluate import Placed
from tvm_split.planner.search.instance import Floats, Instance

FINE = 1e-10
"""Share of a period to which it is halved upon."""
CLIENT_LIMITS = 9
"""Speeds of links to the client, below which machines are left out of a plan that deals all of the network out."""


def simple_plans(instance: Instance) -> list[Candidate]:
    """Those that fit: first fit under a halved period and, with replicas, all of the network dealt out."""
    everything = tuple(range(len(instance.pieces)))
    plans = [] if (filled := first_fit(instance)) is None else [filled]
    if instance.problem.replicas:
        plans += [[Placed(each, everything)] for each in whole_sets(instance, range(len(instance.machines)))]
    found = []
    for stages in plans:
        with contextlib.suppress(PlanError):  # a link is missing between stages that are no neighbours
            found.append(candidate(instance, stages))
    return [each for each in found if fits(instance, each)]


def first_fit(instance: Instance) -> list[Placed] | None:
    """From the fastest machine to the slowest, each takes as many pieces as fit under a period that is halved upon.

    Pieces in their order, tensors over the link from the machine before. None if there is no such plan.
    """
    sums = np.concatenate([np.zeros((1, len(instance.machines))), np.cumsum(instance.seconds, axis=0)])
    fastest = np.argsort(instance.seconds.sum(axis=0), kind="stable")
    weights = np.concatenate([[0.0], np.cumsum(instance.weights)])
    cut = cut_bytes(instance)
    low, high = 0.0, 2 * float(np.where(np.isfinite(instance.seconds), instance.seconds, 0.0).max(axis=1).sum())
    best = None
    while high > low * (1 + FINE) and high > 0:
        period = (low + high) / 2
        found = _filled(instance, fastest.tolist(), period, sums, weights, cut)
        if found is None and best is None and period > high * (1 - 1e-3):
            return None
        low, high = (low, period) if found else (period, high)
        best = found or best
    return best


def cut_bytes(instance: Instance) -> Floats:
    """Of all tensors that pass each cut, before the first piece and behind the last included."""
    length, client = len(instance.pieces), instance.client
    steps = np.zeros(length + 2)
    for tensor in instance.tensors:
        last = length if client in tensor.destinations else max(tensor.destinations)
        steps[tensor.source + 1] += tensor.bytes
        steps[last + 1] -= tensor.bytes
    return np.maximum(np.cumsum(steps)[: length + 1], 0.0)


def _filled(
    instance: Instance, machines: Sequence[int], period: float, sums: Floats, weights: Floats, cut: Floats
) -> list[Placed] | None:
    length, client = len(instance.pieces), instance.client
    stages: list[Placed] = []
    start, before = 0, client
    for machine in machines:
        if not instance.linked[before, machine] and cut[start] > 0:
            continue
        if cut[start] * instance.seconds_per_byte[before, machine] > period:
            continue
        # Sums beyond a piece that may not run here are infinite.
        own = sums[start, machine]
        end = start
        if math.isfinite(own):
            end = int(np.searchsorted(sums[:, machine], own + period * (1 + 1e-12), side="right")) - 1
            end = min(end, int(np.searchsorted(weights, weights[start] + instance.memory[machine], side="right")) - 1)
        else:
            own_seconds = itertools.accumulate(instance.seconds[start:, machine].tolist())
            end = start + sum(1 for _ in itertools.takewhile(lambda seconds: seconds <= period, own_seconds))
        while end > start and cut[end] * instance.seconds_per_byte[machine, client] > period:
            end -= 1
        if end > start:
            stages.append(Placed((machine,), tuple(range(start, end))))
            start, before = end, machine
        if start == length:
            return stages
    return None


def whole_sets(instance: Instance, machines: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Those of some machines that can run and hold everything, with ever slower links to the client."""
    able = np.array(machines, dtype=np.intp)
    able = able[np.isfinite(instance.seconds[:, able]).all(axis=0)]
    seconds = instance.seconds[:, able].sum(axis=0)
    able = able[np.argsort(seconds, kind="stable")][: instance.machine_limit]
    slow = np.maximum(instance.seconds_per_byte[-1, able], instance.seconds_per_byte[able, -1])
    sizes = math.fsum(
        tensor.bytes for tensor in instance.tensors if instance.client in (tensor.source, *tensor.destinations)
    )
    needed = math.fsum(instance.weights) + float(instance.activations.max()) + instance.problem.buffers * sizes
    for limit in np.unique(np.quantile(slow, np.linspace(0, 1, CLIENT_LIMITS))) if len(able) else ():
        chosen = able[(slow <= limit * (1 + 1e-9)) & (instance.memory[able] >= needed)]
        if len(chosen):
            yield tuple(sorted(chosen.tolist()))
