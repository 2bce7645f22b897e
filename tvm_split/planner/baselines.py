"""Plans by simple rules: one machine, or all with equal layers, parameters, memory, or estimated cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import named, with_independent_layers
from tvm_split.planner.graph import LayerGraph
from tvm_split.planner.problem import Problem, Stage

if TYPE_CHECKING:
    from tvm_split.cluster.machine import Machine

ONE_MACHINE = "one machine"
EQUAL_LAYERS = "equal layers"
EQUAL_PARAMETERS = "equal parameters"
BY_MEMORY = "layers by memory"
WIRE_BYTES_PER_SECOND = 1.5e9
"""Rate at which one core serialises, sends or receives through gRPC when it does little else."""


def baseline_stages(problem: Problem, layers_of: Mapping[str, int]) -> dict[str, tuple[Stage, ...]]:
    """Map the name of each baseline to its stages. Splits use all machines, in the problem's order.

    ``layers_of`` has the number of layers of each piece. *Equal layers* is the usual split where nothing was measured;
    *equal parameters* balances the weights; *layers by memory* gives each machine layers in proportion to its memory,
    as exo's ring partitioning does.
    """
    machines = [machine.name for machine in problem.machines]
    pieces = [piece.name for piece in problem.pieces]
    found: dict[str, tuple[Stage, ...]] = {
        f"{ONE_MACHINE}, {name}": (Stage((name,), tuple(pieces)),) for name in machines
    }
    if len(machines) == 1 or len(pieces) < len(machines):
        return found
    layers = [float(layers_of[piece]) for piece in pieces]
    parameters = [float(piece.weight_bytes) for piece in problem.pieces]
    memory = [machine.memory_bytes for machine in problem.machines]
    equal = [1.0] * len(machines)
    for name, weights, shares in (
        (EQUAL_LAYERS, layers, equal),
        (EQUAL_PARAMETERS, parameters, equal),
        (BY_MEMORY, layers, memory if max(memory) < float("inf") else equal),
    ):
        cuts = proportional_cuts(weights, shares)
        found[name] = tuple(
            Stage((machine,), tuple(pieces[start:end]))
            for machine, (start, end) in zip(machines, itertools.pairwise(cuts), strict=True)
        )
    return found


def proportional_cuts(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Cut positions, from 0 to the length, that split a sequence into parts whose sums are near ``shares``.

    Every part gets at least one element.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    cuts = [0]
    wanted = 0.0
    for index, share in enumerate(shares[:-1]):
        wanted += share / sum(shares) * sums[-1]
        first, last = cuts[-1] + 1, len(weights) - (len(shares) - 1 - index)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(sums[cut] - wanted)))
    return [*cuts, len(weights)]


def stages_of_equal_cost(
    graph: LayerGraph, seconds: Mapping[str, float], machines: Sequence[Machine]
) -> tuple[Stage, ...]:
    """Cut the layers, in the order of execution, into one stage per entry of ``machines``.

    ``seconds`` are the layers' estimates on one core; a machine with twice the threads is assumed to be twice as fast.
    A stage's cost includes serialising the bytes that it receives and sends, which takes time of its cores. The linear
    partition is exact: dynamic programming over cut points.

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

    # best[end] for the stages so far: (cost of the slowest stage, where the last stage starts)
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
    """For each ``p`` from 0 to the number of units: bytes that a cut before ``graph.units[p]`` transfers."""
    place = {layer: index for index, unit in enumerate(graph.units) for layer in unit}
    crossing = [0] * (len(graph.units) + 1)
    for value in graph.values:
        last = max((place[layer] for layer in value.consumers if layer in place), default=0)
        for position in range(place.get(value.producer, last) + 1, last + 1):
            crossing[position] += value.size_bytes
    return crossing
