"""A simple automatic rule: a chain of stages whose slowest is as fast as it can be, by estimated cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tvm_split.cluster.machine import Machine
from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import named
from tvm_split.planner.cost import WIRE_BYTES_PER_SECOND
from tvm_split.planner.layer_graph import LayerGraph
from tvm_split.planner.problem import Stage


def stages_of_equal_cost(
    graph: LayerGraph, seconds: Mapping[str, float], machines: Sequence[Machine]
) -> tuple[Stage, ...]:
    """Cut the layers, in the order of execution, into one stage per entry of ``machines``.

    ``seconds`` are the layers' estimates on one core; a machine with twice the threads is taken to be twice as fast.
    A stage also pays for the bytes it receives and sends, which take the time of its cores. The linear partition is
    exact: dynamic programming over cut points.

    Raises:
        PlanError: the model has fewer places to cut than the stages need.
    """
    bounds = _useful_bounds(graph)
    count = len(machines)
    if count > len(bounds) - 1:
        raise PlanError(
            f"{count} stages were asked for, but the model can be cut into {len(bounds) - 1} at most; ask for fewer"
        )
    crossing = graph.crossing_bytes
    sums = [0.0, *itertools.accumulate(seconds[layer] for layer in graph.layers)]

    def cost(stage: int, start: int, end: int) -> float:
        compute = sums[bounds[end]] - sums[bounds[start]]
        wire = (crossing[bounds[start]] + crossing[bounds[end]]) / WIRE_BYTES_PER_SECOND
        return (compute + wire) / machines[stage].threads

    # best[end] for the stages so far: (slowest stage, where the last one starts)
    best: list[list[tuple[float, int]]] = [[(cost(0, 0, end), 0) for end in range(len(bounds))]]
    for stage in range(1, count):
        row = []
        for end in range(len(bounds)):
            choices = [(max(best[-1][start][0], cost(stage, start, end)), start) for start in range(stage, end)]
            row.append(min(choices, default=(float("inf"), 0)))
        best.append(row)
    ends = [len(bounds) - 1]
    for stage in range(count - 1, 0, -1):
        ends.append(best[stage][ends[-1]][1])
    ends.append(0)
    ends.reverse()
    groups = [graph.layers[bounds[start] : bounds[end]] for start, end in itertools.pairwise(ends)]
    return named(Stage((machine.name,), group) for machine, group in zip(machines, groups, strict=True))


def _useful_bounds(graph: LayerGraph) -> list[int]:
    """Cut points with at least one layer between each that depends on an input, and both ends."""
    bounds = [0]
    for point in [*graph.cut_points, len(graph.layers)]:
        if any(layer not in graph.independent for layer in graph.layers[bounds[-1] : point]):
            bounds.append(point)
    if len(bounds) == 1:
        return [0, len(graph.layers)]
    bounds[-1] = len(graph.layers)
    return bounds
