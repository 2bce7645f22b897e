"""Layer graphs written by hand."""

import itertools
from collections.abc import Sequence

from rpc_runtime.program.routes import CLIENT
from tvm_split.placement.graph import LayerGraph, Value


def graph(edges: dict[str, list[str]], independent: tuple[str, ...] = ()) -> LayerGraph:
    """A graph from a mapping of each layer to the layers that it needs, in the order of execution."""
    layers = tuple(edges)
    return LayerGraph(
        layers=layers,
        predecessors={layer: frozenset(before) - set(independent) for layer, before in edges.items()},
        independent=frozenset(independent),
    )


def chain_graph(layers: Sequence[str], size_bytes: int = 1000) -> LayerGraph:
    """Layers that follow each other; every tensor, the input and the output have ``size_bytes``."""
    pairs = list(itertools.pairwise(layers))
    values = tuple(Value(size_bytes, first, frozenset({second}), f"{first}_out") for first, second in pairs)
    return LayerGraph(
        layers=tuple(layers),
        predecessors={layers[0]: frozenset(), **{second: frozenset({first}) for first, second in pairs}},
        independent=frozenset(),
        values=(*values, Value(size_bytes, layers[-1], frozenset(), "y", is_output=True)),
        inputs=(Value(size_bytes, CLIENT, frozenset({layers[0]}), "x"),),
    )
