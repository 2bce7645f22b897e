"""The graph of a model's layers as names and numbers: dependencies, and where a model may be cut. Pure functions.

A cut between layers that one kernel computes would split the kernel, so these layers are one piece. The graph of
pieces must have no cycle, and layers that need each other's results stay together (`LayerGraph.units`).
"""

import graphlib
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from rpc_runtime.program.routes import CLIENT
from tvm_split.placement.problem import Edge

Key = TypeVar("Key", str, int)


@dataclass(frozen=True)
class Value:
    """A value of ``size_bytes`` bytes, the layer that produces it and the layers that consume it.

    The producer of a model's input is ``"client"``. A tuple of tensors (not ``is_tensor``) cannot leave its machine.
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
    are needed and never form a stage of their own. ``values`` are the results that other layers or the user need,
    ``inputs`` the inputs of the model. ``empty_layers`` are names of the source for which nothing is computed (as a
    dropout), each with the layer that computes its result, or "" if there is none.
    """

    layers: tuple[str, ...]
    predecessors: Mapping[str, frozenset[str]]
    independent: frozenset[str]
    values: tuple[Value, ...] = ()
    inputs: tuple[Value, ...] = ()
    empty_layers: Mapping[str, str] = field(default_factory=dict)

    @property
    def dependent(self) -> dict[str, frozenset[str]]:
        """The layers that depend on inputs, and for each the layers whose results it needs."""
        return {layer: self.predecessors[layer] for layer in self.layers if layer not in self.independent}

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """The layers that depend on inputs, grouped into units: in topological order, ties in the order of execution.

        A unit is one layer, or several that need each other's results and so can only run together.
        """
        return grouped(self.dependent)


@dataclass(frozen=True)
class ModelDescription:
    """A model as the planner sees it: its layers, and the operations and weights of each.

    ``weight_bytes`` are the bytes of the constants that a layer reads, as the source stores them.
    """

    name: str
    graph: LayerGraph
    calls: Mapping[str, tuple[Call, ...]]
    weight_bytes: Mapping[str, int]


def grouped(
    predecessors: Mapping[Key, Collection[Key]], common: Iterable[Collection[Key]] = ()
) -> tuple[tuple[Key, ...], ...]:
    """Return the keys of ``predecessors`` in groups: in topological order, ties in the order of the keys.

    The keys of each collection in ``common`` share a group. Groups that depend on each other in a cycle are merged.
    """
    position = {key: place for place, key in enumerate(predecessors)}
    members = {place: [key] for key, place in position.items()}
    group_of = dict(position)

    def join(keys: Iterable[Key]) -> None:
        first, *merged = sorted({group_of[key] for key in keys if key in group_of}) or [0]
        for key in [key for group in merged for key in members.pop(group)]:
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
    groups, ready = [], list[int]()
    while sorter.is_active():
        for group in sorter.get_ready():
            heapq.heappush(ready, group)
        first = heapq.heappop(ready)
        sorter.done(first)
        groups.append(tuple(sorted(members[first], key=position.__getitem__)))
    return tuple(groups)


def pieces_of(graph: LayerGraph, kernels: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the pieces in topological order, each as the names of its layers in the order of execution.

    ``kernels`` has the layers of each kernel, for all targets of the cluster together. A layer without a kernel (it is
    folded into another, or is only a view of memory) goes with a layer before it, else with one after it.

    Layers that depend on no input (``graph.independent``) are in no piece: every stage that needs them computes them
    itself, so any stage may list them (`tvm_split.placement.by_hand.with_independent_layers`).
    """
    common = [list(layers) for layers in kernels]
    with_kernel = {layer for layers in common for layer in layers}
    common += _joined_to_neighbours(graph, with_kernel)
    for value in graph.values:
        if not value.is_tensor:  # only tensors can be transferred
            common.append([value.producer, *value.consumers])
    return grouped(graph.dependent, common)


def piece_edges(graph: LayerGraph, pieces: Sequence[Sequence[str]]) -> tuple[Edge, ...]:
    """The transfers between pieces, by their names, and from and to ``"client"``.

    Every edge names its tensor, which is sent once to each machine, however many pieces need it there.
    """
    piece_of = {layer: piece[0] for piece in pieces for layer in piece}
    edges: dict[tuple[str, str, str], Edge] = {}
    for value in (*graph.inputs, *graph.values):
        source = piece_of.get(value.producer, CLIENT)
        consumers = sorted({piece_of[layer] for layer in value.consumers if layer in piece_of})
        for destination in [*consumers, *([CLIENT] if value.is_output else [])]:
            if source != destination:
                edge = Edge(source, destination, float(value.size_bytes), value.name)
                edges[source, destination, value.name] = edge
    position = {CLIENT: -1, **{piece[0]: index for index, piece in enumerate(pieces)}}
    return tuple(sorted(edges.values(), key=lambda edge: (position[edge.source], position[edge.destination])))


def pieces_of_kernels(
    pieces: Sequence[Sequence[str]], kernels: Sequence[Sequence[str]], consumers: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """For every kernel, in the order of their calls, the position of the piece to which its time counts.

    ``kernels`` are their layers, ``consumers`` the positions of the kernels that read their results. A kernel without a
    layer of a piece (a change of layout, a table) counts to the piece of the first kernel that needs its result, or, at
    the end of the model, to that of the kernel before it.
    """
    piece_of = {layer: index for index, piece in enumerate(pieces) for layer in piece}
    assigned: list[int | None] = [
        next((piece_of[layer] for layer in layers if layer in piece_of), None) for layers in kernels
    ]
    for position in reversed(range(len(assigned))):
        if assigned[position] is None:
            assigned[position] = next(
                (assigned[after] for after in consumers[position] if assigned[after] is not None), None
            )
    last = 0
    for position, piece in enumerate(assigned):
        assigned[position] = last = last if piece is None else piece
    return tuple(piece for piece in assigned if piece is not None)


def _joined_to_neighbours(graph: LayerGraph, with_kernel: set[str]) -> Iterator[list[str]]:
    """Pairs of a layer without a kernel and the latest layer before it, or the first after it, that has one."""
    successors: dict[str, list[str]] = {}
    for layer in graph.layers:
        for before in graph.predecessors[layer]:
            successors.setdefault(before, []).append(layer)
    position = {layer: index for index, layer in enumerate(graph.layers)}
    without_kernel = [layer for layer in graph.dependent if layer not in with_kernel]
    placed = set(with_kernel)
    for layers, near_of, chosen in ((without_kernel, graph.predecessors, max), (without_kernel[::-1], successors, min)):
        for layer in layers:
            near = [candidate for candidate in near_of.get(layer, ()) if candidate in placed]
            if layer not in placed and near:
                placed.add(layer)
                yield [layer, chosen(near, key=position.__getitem__)]
