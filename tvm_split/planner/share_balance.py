"""Adjust the shares of a sharded stage by the time, or by the memory, that its machines need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tvm_split.planner.problem import Evaluation, Stage
from tvm_split.planner.step_graph import StepGraph

ROOM = 0.97
"""Fraction of a memory that is too small that parts may fill: their size is not exactly proportional to the share."""


def in_proportion(seconds: Iterable[float]) -> list[float]:
    """Shares with which machines that take ``seconds`` each for the whole finish at the same time."""
    rates = [1.0 / each if each > 0 else 1.0 for each in seconds]
    return [rate / sum(rates) for rate in rates]


def rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """The shares rounded to hundredths, each at least 0.01; the largest one absorbs the rounding."""
    found = [max(0.01, round(share, 2)) for share in shares]
    largest = found.index(max(found))
    found[largest] = round(1.0 - sum(each for place, each in enumerate(found) if place != largest), 2)
    return tuple(found)


def rebalanced(stage: Stage, graph: StepGraph) -> Stage:
    """A sharded stage with shares by which its machines finish at the same time, from the seconds of its steps."""
    if stage.sharding is None:
        return stage
    took: defaultdict[str, float] = defaultdict(float)
    for step in graph.steps:
        if step.stage == stage.name:
            took[step.machines[0]] += step.contended_seconds[0]
    if not all(took[machine] > 0 for machine in stage.machines):
        return stage
    wanted = [share / took[machine] for share, machine in zip(stage.shares, stage.machines, strict=True)]
    return replace(stage, shares=rounded([each / sum(wanted) for each in wanted]))


def lightened(stage: Stage, evaluation: Evaluation, limits: Mapping[str, float]) -> Stage:
    """A sharded stage with smaller shares for machines that exceed their memory, and larger shares for the others.

    ``limits`` are the bytes of memory of each machine. If no machine has memory left, the stage is unchanged.
    """
    fills = dict.fromkeys(stage.machines, 0.0)  # a machine that computes nothing has no load
    fills |= {load.machine: load.memory_bytes / limits[load.machine] for load in evaluation.loads}
    if stage.sharding is None or min(fills[machine] for machine in stage.machines) >= 1:
        return stage
    less = [
        part / fills[machine] * ROOM if fills[machine] > 1 else part
        for machine, part in zip(stage.machines, stage.shares, strict=True)
    ]
    light = sum(part for machine, part in zip(stage.machines, less, strict=True) if fills[machine] <= 1)
    more = (light + 1.0 - sum(less)) / light
    shares = [part * (1 if fills[name] > 1 else more) for name, part in zip(stage.machines, less, strict=True)]
    return replace(stage, shares=rounded(shares))
