"""Pieces of a model: what is not worth cutting any further, and what passes between them. Pure.

A kernel that computes several layers would fall apart where they are cut, so its layers are one piece. The pieces, as
nodes, must not need each other in a circle, and no layer may be torn (`LayerGraph.units`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tvm_split.planner.by_hand import with_independent_layers
from tvm_split.planner.layer_graph import LayerGraph
from tvm_split.planner.problem import Edge
from tvm_split.rpc_runtime.program.program import CLIENT


def pieces_of(graph: LayerGraph, kernels: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The layers that depend on inputs, in pieces in topological order, each in the order of execution.

    ``kernels`` are the layers of every kernel, on every target that matters. A layer that has no kernel (it is folded
    into another, or only looks at memory in another way) goes with a layer before it, else with one after it.

    Layers that depend on no input (``graph.independent``) are in no piece: whoever needs them computes them himself, so
    it does not matter where a plan puts them; `layers_of_stages` puts them beside their neighbours.
    """
    groups = _Groups(layer for layer in graph.layers if layer not in graph.independent)
    for unit in graph.units:
        groups.join(unit)
    for value in graph.values:
        if not value.is_tensor:  # only tensors can travel
            groups.join([value.producer, *value.consumers])
    with_kernel: set[str] = set()
    for layers in kernels:
        known = [layer for layer in layers if layer in groups]
        with_kernel.update(known)
        groups.join(known)
    _adopt_without_kernel(graph, groups, with_kernel)
    while True:
        joined = _contracted(graph, groups)
        if all(len(unit) == 1 for unit in joined.units):
            break
        for unit in joined.units:
            groups.join(unit)
    members = groups.members()
    return tuple(members[name] for (name,) in joined.units)


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


def layers_of_stages(
    graph: LayerGraph, pieces: Mapping[str, Sequence[str]], stages: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """All layers of a model for stages given as names of pieces, each in the order of execution.

    A layer that depends on no input goes into the stage of the nearest layer in the order of execution.
    """
    groups = [[layer for piece in stage for layer in pieces[piece]] for stage in stages]
    return tuple(map(tuple, with_independent_layers(graph, groups)))


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


class _Groups:
    """Disjoint sets of layers, each known by its first layer in the order of execution."""

    def __init__(self, layers: Iterable[str]) -> None:
        self._order = {layer: index for index, layer in enumerate(layers)}
        self._first = {layer: layer for layer in self._order}

    def __contains__(self, layer: str) -> bool:
        return layer in self._order

    def first(self, layer: str) -> str:
        while self._first[layer] != layer:
            self._first[layer] = layer = self._first[self._first[layer]]
        return layer

    def join(self, layers: Iterable[str]) -> None:
        firsts = sorted({self.first(layer) for layer in layers}, key=self._order.__getitem__)
        for other in firsts[1:]:
            self._first[other] = firsts[0]

    def members(self) -> dict[str, tuple[str, ...]]:
        """The groups by their names, each in the order of execution."""
        found: dict[str, list[str]] = {}
        for layer in self._order:
            found.setdefault(self.first(layer), []).append(layer)
        return {name: tuple(layers) for name, layers in found.items()}


def _adopt_without_kernel(graph: LayerGraph, groups: _Groups, with_kernel: set[str]) -> None:
    """Join each layer without a kernel with the latest layer before it, or the first after it, that has one."""
    successors: dict[str, list[str]] = {}
    for layer in graph.layers:
        for before in graph.predecessors[layer]:
            successors.setdefault(before, []).append(layer)
    position = {layer: index for index, layer in enumerate(graph.layers)}
    homeless = [layer for layer in graph.layers if layer in groups and layer not in with_kernel]
    adopted = set(with_kernel)
    for layer in homeless:
        near = [before for before in graph.predecessors[layer] if before in adopted]
        if near:
            groups.join([layer, max(near, key=position.__getitem__)])
            adopted.add(layer)
    for layer in reversed(homeless):
        near = [after for after in successors.get(layer, []) if after in adopted]
        if layer not in adopted and near:
            groups.join([layer, min(near, key=position.__getitem__)])
            adopted.add(layer)


def _contracted(graph: LayerGraph, groups: _Groups) -> LayerGraph:
    """The graph whose layers are the groups, by their names."""
    predecessors: dict[str, set[str]] = {}
    for layer in graph.layers:
        if layer in groups:
            own = predecessors.setdefault(groups.first(layer), set())
            own |= {groups.first(before) for before in graph.predecessors[layer] if before in groups}
    return LayerGraph(
        layers=tuple(predecessors),
        predecessors={name: frozenset(before - {name}) for name, before in predecessors.items()},
        independent=frozenset(),
        spans={},
    )
