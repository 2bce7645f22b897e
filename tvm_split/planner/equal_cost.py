"""A simple automatic rule: a chain of stages whose slowest is as fast as it can be, by estimated cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tvm_split.cluster.machine import Machine
from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import named, with_independent_layers
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
    units, count = graph.units, len(machines)
    if count > max(len(units), 1):
        raise PlanError(
            f"{count} stages were asked for, but the model can be cut into {len(units)} at most; ask for fewer"
        )
    crossing = _crossing_bytes(graph)
    sums = [0.0, *itertools.accumulate(sum(seconds[layer] for layer in unit) for unit in units)]

    def cost(stage: int, start: int, end: int) -> float:
        wire = (crossing[start] + crossing[end]) / WIRE_BYTES_PER_SECOND
        return (sums[end] - sums[start] + wire) / machines[stage].threads

    # best[end] for the stages so far: (slowest stage, where the last one starts)
    best: list[list[tuple[float, int]]] = [[(cost(0, 0, end), 0) for end in range(len(sums))]]
    for stage in range(1, count):
        row = []
        for end in range(len(sums)):
            choices = [(max(best[-1][start][0], cost(stage, start, end)), start) for start in range(stage, end)]
            row.append(min(choices, default=(float("inf"), 0)))
        best.append(row)
    ends = [len(units)]
    for stage in range(count - 1, -1, -1):
        ends.append(best[stage][ends[-1]][1])
    parts = [units[start:end] for end, start in itertools.pairwise(ends)][::-1]
    groups = with_independent_layers(graph, [list(itertools.chain(*part)) for part in parts])
    return named(Stage((machine.name,), tuple(group)) for machine, group in zip(machines, groups, strict=True))


def _crossing_bytes(graph: LayerGraph) -> list[int]:
    """Bytes made before ``graph.units[p]`` and needed from there on, for each ``p`` from 0 to the number of units."""
    place = {layer: index for index, unit in enumerate(graph.units) for layer in unit}
    crossing = [0] * (len(graph.units) + 1)
    for value in graph.values:
        last = max((place[layer] for layer in value.consumers if layer in place), default=0)
        for position in range(place.get(value.producer, last) + 1, last + 1):
            crossing[position] += value.size_bytes
    return crossing
