"""The graph of a model's layers, as numbers and names: what depends on what, and where a model may be cut. Pure.

A kernel that computes several layers would fall apart where they are cut, so its layers are one piece. The pieces, as
nodes, must not need each other in a circle, and no layer may be torn (`LayerGraph.units`).
"""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from rpc_runtime.program.routes import CLIENT
from tvm_split.planner.problem import Edge

Key = TypeVar("Key", str, int)


@dataclass(frozen=True)
class Value:
    """What a variable of ``size_bytes`` bytes holds, the layer that makes it and the layers that need it.

    The producer of a model's input is ``"client"``. What is no tensor, but several, cannot leave its machine.
    """

    size_bytes: int
    producer: str
    consumers: frozenset[str]
    name: str = ""
    is_output: bool = False
    is_tensor: bool = True


@dataclass(frozen=True)
class Call:
    """One operation: its floating-point operations, and the bytes of its operands and results."""

    operations: float
    bytes: int


@dataclass(frozen=True)
class LayerGraph:
    """Layers in the order of execution, and for each the layers whose results it needs.

    ``independent`` are the layers that depend on no input of the model: tables and masks. They are computed where they
    are needed and never make a stage of their own. ``values`` are what layers make for other layers or for the user,
    ``inputs`` the model's own.
    """

    layers: tuple[str, ...]
    predecessors: Mapping[str, frozenset[str]]
    independent: frozenset[str]
    values: tuple[Value, ...] = ()
    inputs: tuple[Value, ...] = ()

    @property
    def dependent(self) -> dict[str, frozenset[str]]:
        """The layers that depend on inputs, and for each the layers whose results it needs."""
        return {layer: self.predecessors[layer] for layer in self.layers if layer not in self.independent}

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """The layers that depend on inputs, each unit after those it needs, else in the order of execution.

        A unit is one layer, or several that need each other's results and so can only run together.
        """
        return grouped(self.dependent)


@dataclass(frozen=True)
class ModelDescription:
    """What a planner needs to know of a model: its layers, and what each of them computes and holds.

    ``weight_bytes`` are those of the constants that a layer takes, as the source stores them.
    """

    name: str
    graph: LayerGraph
    calls: Mapping[str, tuple[Call, ...]]
    weight_bytes: Mapping[str, int]


def grouped(
    predecessors: Mapping[Key, Collection[Key]], common: Iterable[Collection[Key]] = ()
) -> tuple[tuple[Key, ...], ...]:
    """The keys of ``predecessors`` in groups, each group after those it needs, else in the order of the keys.

    Those of each collection in ``common`` share a group, and so do groups that need each other in a circle.
    """
    position = {key: place for place, key in enumerate(predecessors)}
    members = {place: [key] for key, place in position.items()}
    group_of = dict(position)

    def join(keys: Iterable[Key]) -> None:
        first, *others = sorted({group_of[key] for key in keys if key in group_of}) or [0]
        for key in [key for other in others for key in members.pop(other)]:
            group_of[key] = first
            members[first].append(key)

    for keys in common:
        join(keys)
    while True:
        needs = {
            group: {group_of.get(before, group) for key in keys for before in predecessors[key]} - {group}
            for group, keys in members.items()
        }
        sorter = graphlib.TopologicalSorter(needs)
        try:
            sorter.prepare()
            break
        except graphlib.CycleError as error:
            join(members[group][0] for group in error.args[1])
    found, ready = [], list[int]()
    while sorter.is_active():
        for group in sorter.get_ready():
            heapq.heappush(ready, group)
        first = heapq.heappop(ready)
        sorter.done(first)
        found.append(tuple(sorted(members[first], key=position.__getitem__)))
    return tuple(found)


def pieces_of(graph: LayerGraph, kernels: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The layers that depend on inputs, in pieces in topological order, each in the order of execution.

    ``kernels`` are the layers of every kernel, on every target that matters. A layer that has no kernel (it is folded
    into another, or only looks at memory in another way) goes with a layer before it, else with one after it.

    Layers that depend on no input (``graph.independent``) are in no piece: whoever needs them computes them himself, so
    it does not matter where a plan puts them (`tvm_split.planner.by_hand.with_independent_layers`).
    """
    common = [list(layers) for layers in kernels]
    with_kernel = {layer for layers in common for layer in layers}
    common += _adopted(graph, with_kernel)
    for value in graph.values:
        if not value.is_tensor:  # only tensors can travel
            common.append([value.producer, *value.consumers])
    return grouped(graph.dependent, common)


def piece_edges(graph: LayerGraph, pieces: Sequence[Sequence[str]]) -> tuple[Edge, ...]:
    """What passes between pieces, by their names, and from and to ``"client"``.

    Every edge names its tensor, which crosses once to each machine however many pieces need it there.
    """
    piece_of = {layer: piece[0] for piece in pieces for layer in piece}
    found: dict[tuple[str, str, str], Edge] = {}
    for value in (*graph.inputs, *graph.values):
        source = piece_of.get(value.producer, CLIENT)
        takers = sorted({piece_of[layer] for layer in value.consumers if layer in piece_of})
        for destination in [*takers, *([CLIENT] if value.is_output else [])]:
            if source != destination:
                edge = Edge(source, destination, float(value.size_bytes), value.name)
                found[source, destination, value.name] = edge
    position = {CLIENT: -1, **{piece[0]: index for index, piece in enumerate(pieces)}}
    return tuple(sorted(found.values(), key=lambda edge: (position[edge.source], position[edge.destination])))


def pieces_of_kernels(
    pieces: Sequence[Sequence[str]], kernels: Sequence[Sequence[str]], consumers: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """For every kernel, in the order of their calls, the position of the piece that pays for it.

    ``kernels`` are their layers, ``consumers`` the positions of the kernels that read their results. A kernel without a
    layer of a piece (a change of layout, a table) is paid for by the first kernel that needs its result, else, at the
    end of the model, by the kernel before it.
    """
    piece_of = {layer: index for index, piece in enumerate(pieces) for layer in piece}
    found: list[int | None] = [
        next((piece_of[layer] for layer in layers if layer in piece_of), None) for layers in kernels
    ]
    for position in reversed(range(len(found))):
        if found[position] is None:
            found[position] = next((found[after] for after in consumers[position] if found[after] is not None), None)
    last = 0
    for position, piece in enumerate(found):
        found[position] = last = last if piece is None else piece
    return tuple(piece for piece in found if piece is not None)


def _adopted(graph: LayerGraph, with_kernel: set[str]) -> Iterator[list[str]]:
    """Each layer without a kernel, with the latest layer before it, or the first after it, that has one."""
    successors: dict[str, list[str]] = {}
    for layer in graph.layers:
        for before in graph.predecessors[layer]:
            successors.setdefault(before, []).append(layer)
    position = {layer: index for index, layer in enumerate(graph.layers)}
    homeless = [layer for layer in graph.dependent if layer not in with_kernel]
    adopted = set(with_kernel)
    for layers, near_of, chosen in (
        (homeless, graph.predecessors, max),
        (homeless[::-1], successors, min),
    ):
        for layer in layers:
            near = [other for other in near_of.get(layer, ()) if other in adopted]
            if layer not in adopted and near:
                adopted.add(layer)
                yield [layer, chosen(near, key=position.__getitem__)]
