"""The graph that a picture of a plan shows: layers on their machines, few enough nodes to be read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm_split.model import Model
from tvm_split.planner.layer_graph import LayerGraph
from tvm_split.planner.plan import Plan
from tvm_split.planner.tensor_types import size_bytes
from tvm_split.relay_passes.contract import bindings_of, main_function, returned_fields, used_variables

MOST_SINGLE_NODES = 40
"""Up to this many, every layer has a node of its own."""
MOST_NODES = 60
FEWEST_NODES = 15
"""Blocks that leave fewer hide too much; then some of the finer ones are drawn together."""
WIDEST_BOUNDARY = 6


@dataclass(frozen=True)
class PictureNode:
    """Layers that are drawn as one.

    ``machines`` are those that take turns at them, mostly one; none at the client's inputs and outputs, where ``stage``
    is None.
    """

    layers: tuple[str, ...]
    machines: tuple[str, ...]
    stage: int | None


@dataclass(frozen=True)
class PictureEdge:
    """Nodes by their numbers. ``bytes`` cross to another machine here for the first time; 0 if they are there."""

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
    flows = _flows(model, graph, units)
    groups = _group(stages, flows)
    merged = [tuple(layer for unit in group for layer in units[unit]) for group in groups]
    nodes = tuple(
        PictureNode(layers, () if stage is None else plan.stages[stage].machines, stage)
        for layers, stage in zip(merged, (stages[group[0]] for group in groups), strict=True)
    )
    number_of = {unit: number for number, group in enumerate(groups) for unit in group}
    hidden = tuple(layer for layer in graph.layers if layer in graph.independent)
    return PictureGraph(nodes, _edges(nodes, flows, number_of), hidden)


def _flows(model: Model, graph: LayerGraph, units: Sequence[tuple[str, ...]]) -> list[_Flow]:
    """Tensors between units; unit 0 stands for the model's inputs, the last one for its outputs."""
    unit_of = {layer: number for number, unit in enumerate(units) for layer in unit}
    function = main_function(model.module)
    needed_by: dict[str, set[int]] = {}
    made_by = {parameter.name: 0 for parameter in function.params}
    sizes = {parameter.name: size_bytes(parameter.ty) for parameter in function.params}
    for binding in bindings_of(function):
        unit = unit_of.get(model.layers.get(binding.var.name, ""))
        if unit is None:
            continue
        made_by[binding.var.name] = unit
        sizes[binding.var.name] = size_bytes(binding.var.ty)
        for used in used_variables(binding.value):
            needed_by.setdefault(used.name, set()).add(unit)
    for field in returned_fields(function):
        needed_by.setdefault(getattr(field, "name", ""), set()).add(len(units) - 1)
    return [
        _Flow(source, destinations, sizes[name])
        for name, source in made_by.items()
        if (destinations := frozenset(needed_by.get(name, set()) - {source}))
    ]


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
    after: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for flow in flows:
        for destination in flow.destinations:
            after.setdefault(flow.source, set()).add(destination)
            before.setdefault(destination, set()).add(flow.source)
    group_of: dict[int, list[int]] = {}
    groups: list[list[int]] = []
    for unit, stage in enumerate(stages):
        (previous,) = before[unit] if len(before.get(unit, ())) == 1 else (None,)
        if previous is not None and stage is not None and stages[previous] == stage and len(after[previous]) == 1:
            group_of[unit] = group_of[previous]
            group_of[unit].append(unit)
        else:
            group_of[unit] = [unit]
            groups.append(group_of[unit])
    # A run of one branch may reach past the first unit of another: what it ends with says where it stands.
    return _in_topological_order(groups, flows)


def _in_topological_order(groups: list[list[int]], flows: Sequence[_Flow]) -> list[list[int]]:
    group_of = {unit: number for number, group in enumerate(groups) for unit in group}
    needs: list[set[int]] = [set() for _ in groups]
    for flow in flows:
        for destination in flow.destinations:
            needs[group_of[destination]].add(group_of[flow.source])
    order: list[int] = []
    placed: set[int] = set()
    waiting = list(range(len(groups)))
    while waiting:
        number = next(each for each in waiting if needs[each] - {each} <= placed)
        waiting.remove(number)
        order.append(number)
        placed.add(number)
    return [groups[number] for number in order]


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
    machines = [node.machines for node in nodes]
    for flow in flows:
        source = number_of[flow.source]
        reached: set[tuple[str, ...]] = set()
        for destination in sorted({number_of[each] for each in flow.destinations} - {source}):
            first = machines[destination] != machines[source] and machines[destination] not in reached
            reached.add(machines[destination])
            edge = (source, destination)
            crossing[edge] = crossing.get(edge, 0) + (flow.bytes if first else 0)
    return tuple(
        PictureEdge(source, destination, machines[source] != machines[destination], size)
        for (source, destination), size in crossing.items()
    )
