"""The graph that a picture of a plan shows: layers on their machines, few enough nodes to be read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm_split.model import Model
from tvm_split.planner.graph import LayerGraph, grouped
from tvm_split.planner.plan import Plan

MOST_SINGLE_NODES = 40
"""Up to this many, every layer has a node of its own."""
MOST_NODES = 60
FEWEST_NODES = 15
"""Blocks that leave fewer hide too much; then some of the finer ones are drawn together."""
WIDEST_BOUNDARY = 6


@dataclass(frozen=True)
class PictureNode:
    """Layers that are drawn as one.

    ``machines`` are those that take turns at them, or compute them ``together``, mostly one; none at the client's
    inputs and outputs, where ``stage`` is None.
    """

    layers: tuple[str, ...]
    machines: tuple[str, ...]
    stage: int | None
    together: bool = False

    @property
    def home(self) -> tuple[tuple[str, ...], int | None]:
        """What a value has to leave to cross a link: machines, of which each has its part in a stage they share."""
        return self.machines, self.stage if self.together else None


@dataclass(frozen=True)
class PictureEdge:
    """Nodes by their numbers. ``bytes`` cross to another machine here for the first time; 0 if they are there.

    They are those of the whole value, also where machines that compute together send or take parts of it.
    """

    source: int
    destination: int
    crosses: bool
    bytes: int


@dataclass(frozen=True)
class PictureGraph:
    """Nodes in topological order, the inputs first, the outputs last; ``hidden`` layers depend on no input."""

    nodes: tuple[PictureNode, ...]
    edges: tuple[PictureEdge, ...]
    hidden: tuple[str, ...]


@dataclass(frozen=True)
class _Flow:
    """A tensor: where it is made, and where it is needed, as numbers of units."""

    source: int
    destinations: frozenset[int]
    bytes: int


def picture_graph(model: Model, plan: Plan) -> PictureGraph:
    """What to draw of a plan, which must fit the model.

    Layers that need each other's results are one node. With more than `MOST_SINGLE_NODES` nodes, runs of layers of one
    stage without branches become one; if still more than `MOST_NODES` are left, so do whole blocks of a stage between
    places where few tensors are alive.
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
    """Tensors between units; unit 0 stands for the model's inputs, the last one for its outputs."""
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
    """Units that are drawn together, in topological order."""
    single = [[unit] for unit in range(len(stages))]
    if len(single) <= MOST_SINGLE_NODES:
        return single
    runs = _without_branches(stages, flows)
    if len(runs) <= MOST_NODES:
        return runs
    finer = runs
    for width in range(WIDEST_BOUNDARY, 0, -1):
        blocks = _blocks(stages, flows, width)
        if len(blocks) <= MOST_NODES:
            return blocks if len(blocks) >= FEWEST_NODES else _joined(stages, finer)
        finer = blocks
    return _joined(stages, finer)


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


def _blocks(stages: Sequence[int | None], flows: Sequence[_Flow], width: int) -> list[list[int]]:
    """Neighbours of one stage without a place between them where at most ``width`` units' results are alive."""
    last_use = dict.fromkeys(range(len(stages)), -1)
    for flow in flows:
        last_use[flow.source] = max(last_use[flow.source], *flow.destinations)
    groups: list[list[int]] = []
    alive: set[int] = set()
    for unit, stage in enumerate(stages):
        alive = {each for each in alive if last_use[each] >= unit}
        if groups and stage is not None and stages[unit - 1] == stage and len(alive) > width:
            groups[-1].append(unit)
        else:
            groups.append([unit])
        alive.add(unit)
    return groups


def _joined(stages: Sequence[int | None], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """So many neighbouring blocks of one stage together that there are about `MOST_NODES` left."""
    together = -(-len(blocks) // MOST_NODES)
    joined: list[list[int]] = []
    for _, run in itertools.groupby(blocks, key=lambda block: stages[block[0]]):
        of_stage = list(run)
        for start in range(0, len(of_stage), together):
            joined.append([unit for block in of_stage[start : start + together] for unit in block])
    return joined


def _edges(
    nodes: Sequence[PictureNode], flows: Iterable[_Flow], number_of: Mapping[int, int]
) -> tuple[PictureEdge, ...]:
    crossing: dict[tuple[int, int], int] = {}
    homes = [node.home for node in nodes]
    for flow in flows:
        source = number_of[flow.source]
        reached = set()
        for destination in sorted({number_of[each] for each in flow.destinations} - {source}):
            first = homes[destination] != homes[source] and homes[destination] not in reached
            reached.add(homes[destination])
            edge = (source, destination)
            crossing[edge] = crossing.get(edge, 0) + (flow.bytes if first else 0)
    return tuple(
        PictureEdge(source, destination, homes[source] != homes[destination], size)
        for (source, destination), size in crossing.items()
    )
