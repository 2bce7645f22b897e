"""Build the graph that a picture of a plan shows: layers on their machines, in few enough nodes to be readable."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm_split.model import Model
from tvm_split.planner.graph import LayerGraph, grouped
from tvm_split.planner.plan import Plan

MOST_SINGLE_NODES = 40
"""The most layers for which every layer has a node of its own."""
MOST_NODES = 60


@dataclass(frozen=True)
class PictureNode:
    """Layers that are drawn as one node.

    ``machines`` are usually one; several are replicas, or compute shards if ``sharded``. The client's inputs and
    outputs have no machines, and their ``stage`` is None.
    """

    layers: tuple[str, ...]
    machines: tuple[str, ...]
    stage: int | None
    sharded: bool = False

    @property
    def placement(self) -> tuple[tuple[str, ...], int | None]:
        """The machines of the node, with the stage if it is sharded; values between different placements are
        transferred."""
        return self.machines, self.stage if self.sharded else None


@dataclass(frozen=True)
class PictureEdge:
    """An edge between nodes, by their numbers; ``bytes`` are those that it transfers to another machine.

    A value counts only on the first edge to each machine, and there with its whole size, also if a sharded stage sends
    or receives parts of it.
    """

    source: int
    destination: int
    crosses: bool
    bytes: int


@dataclass(frozen=True)
class PictureGraph:
    """Nodes in topological order, inputs first, outputs last; ``hidden`` layers need no input and are not drawn."""

    nodes: tuple[PictureNode, ...]
    edges: tuple[PictureEdge, ...]
    hidden: tuple[str, ...]


@dataclass(frozen=True)
class _Flow:
    """A tensor with the numbers of the units that produce and use it."""

    source: int
    destinations: frozenset[int]
    bytes: int


def picture_graph(model: Model, plan: Plan) -> PictureGraph:
    """Return the graph to draw for a plan, which must fit the model.

    Layers that need each other's results are one node. With more than `MOST_SINGLE_NODES` nodes, each run of layers of
    one stage without branches becomes a node. If more than `MOST_NODES` are left, consecutive
    runs of a stage are merged.
    """
    graph = model.graph
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    units: list[tuple[str, ...]] = [(), *graph.units, ()]
    stages = [stage_of[unit[0]] if unit else None for unit in units]
    flows = _flows(graph, units)
    groups = _group(stages, flows)
    merged = [tuple(layer for unit in group for layer in units[unit]) for group in groups]
    nodes = tuple(
        PictureNode(layers, (), None)
        if stage is None
        else PictureNode(layers, plan.stages[stage].machines, stage, plan.stages[stage].sharding is not None)
        for layers, stage in zip(merged, (stages[group[0]] for group in groups), strict=True)
    )
    number_of = {unit: number for number, group in enumerate(groups) for unit in group}
    hidden = tuple(layer for layer in graph.layers if layer in graph.independent)
    return PictureGraph(nodes, _edges(nodes, flows, number_of), hidden)


def _flows(graph: LayerGraph, units: Sequence[tuple[str, ...]]) -> list[_Flow]:
    """Return the tensors between units; unit 0 is the model's inputs, the last unit its outputs."""
    unit_of = {layer: number for number, unit in enumerate(units) for layer in unit}
    flows = []
    for value in (*graph.inputs, *graph.values):
        source = unit_of.get(value.producer, 0)
        needed = {unit_of[layer] for layer in value.consumers if layer in unit_of}
        destinations = frozenset(needed | ({len(units) - 1} if value.is_output else set())) - {source}
        if destinations:
            flows.append(_Flow(source, destinations, value.size_bytes))
    return flows


def _group(stages: Sequence[int | None], flows: Sequence[_Flow]) -> list[list[int]]:
    """Group units that are drawn as one node, in topological order."""
    single = [[unit] for unit in range(len(stages))]
    if len(single) <= MOST_SINGLE_NODES:
        return single
    runs = _without_branches(stages, flows)
    return runs if len(runs) <= MOST_NODES else _merged(stages, runs)


def _without_branches(stages: Sequence[int | None], flows: Sequence[_Flow]) -> list[list[int]]:
    after: dict[int, set[int]] = {unit: set() for unit in range(len(stages))}
    before: dict[int, set[int]] = {unit: set() for unit in range(len(stages))}
    for flow in flows:
        for destination in flow.destinations:
            after[flow.source].add(destination)
            before[destination].add(flow.source)
    runs = [
        (min(needed), unit)
        for unit, needed in before.items()
        if len(needed) == 1 and stages[unit] is not None and stages[min(needed)] == stages[unit]
    ]
    return [list(group) for group in grouped(before, [run for run in runs if len(after[run[0]]) == 1])]


def _merged(stages: Sequence[int | None], runs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Merge consecutive runs of one stage so that about `MOST_NODES` are left."""
    size = -(-len(runs) // MOST_NODES)
    merged: list[list[int]] = []
    for _, of_stage in itertools.groupby(runs, key=lambda run: stages[run[0]]):
        same_stage = list(of_stage)
        for start in range(0, len(same_stage), size):
            merged.append([unit for run in same_stage[start : start + size] for unit in run])
    return merged


def _edges(
    nodes: Sequence[PictureNode], flows: Iterable[_Flow], number_of: Mapping[int, int]
) -> tuple[PictureEdge, ...]:
    crossing: dict[tuple[int, int], int] = {}
    placements = [node.placement for node in nodes]
    for flow in flows:
        source = number_of[flow.source]
        seen_placements = set()
        for destination in sorted({number_of[destination] for destination in flow.destinations} - {source}):
            first = placements[destination] != placements[source] and placements[destination] not in seen_placements
            seen_placements.add(placements[destination])
            edge = (source, destination)
            crossing[edge] = crossing.get(edge, 0) + (flow.bytes if first else 0)
    return tuple(
        PictureEdge(source, destination, placements[source] != placements[destination], size)
        for (source, destination), size in crossing.items()
    )
