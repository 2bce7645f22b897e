"""The graph of a model's layers: what depends on what, and where a model may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from relay_passes.contract import bindings_of, main_function, returned_fields, used_variables
from tvm_split.model import Model


@dataclass(frozen=True)
class LayerGraph:
    """Layers in the order of execution, and for each the layers whose results it needs.

    ``independent`` are the layers that depend on no input of the model: tables and masks. They are computed where they
    are needed and never make a stage of their own.
    """

    layers: tuple[str, ...]
    predecessors: Mapping[str, frozenset[str]]
    independent: frozenset[str]
    spans: Mapping[str, tuple[int, int]]

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """Positions ``p`` such that the layers before ``layers[p]`` can be one side of a cut, the others the other.

        A layer whose operations lie on both sides would have to be in both stages, so such positions are left out.
        """
        points = []
        for position in range(1, len(self.layers)):
            start = self.spans[self.layers[position]][0]
            if all(self.spans[layer][1] < start for layer in self.layers[:position]):
                points.append(position)
        return tuple(points)


def layer_graph(model: Model) -> LayerGraph:
    function = main_function(model.module)
    layers = model.layer_names
    depends_on_input = {parameter.name for parameter in function.params}
    predecessors: dict[str, set[str]] = {layer: set() for layer in layers}
    spans: dict[str, tuple[int, int]] = {}
    dependent_layers: set[str] = set()
    for position, binding in enumerate(bindings_of(function)):
        name = binding.var.name
        if name not in model.layers:
            continue
        layer = model.layers[name]
        spans[layer] = (spans.get(layer, (position, position))[0], position)
        for used in used_variables(binding.value):
            if used.name in depends_on_input:
                depends_on_input.add(name)
            producer = model.layers.get(used.name)
            if producer is not None and producer != layer:
                predecessors[layer].add(producer)
        if name in depends_on_input:
            dependent_layers.add(layer)
    for field in returned_fields(function):
        # A table that the model returns has to be made somewhere, so it counts like any other layer.
        if getattr(field, "name", None) in model.layers:
            dependent_layers.add(model.layers[field.name])
    independent = frozenset(layers) - dependent_layers
    return LayerGraph(
        layers=layers,
        predecessors={layer: frozenset(before - independent) for layer, before in predecessors.items()},
        independent=independent,
        spans=spans,
    )
