"""The graph of a model's layers: what depends on what, and where a model may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tvm import relax

from tvm_split.model import Model
from tvm_split.planner.tensor_types import size_bytes
from tvm_split.relay_passes.contract import bindings_of, main_function, returned_fields, used_variables
from tvm_split.rpc_runtime.program.program import CLIENT


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
class LayerGraph:
    """Layers in the order of execution, and for each the layers whose results it needs.

    ``independent`` are the layers that depend on no input of the model: tables and masks. They are computed where they
    are needed and never make a stage of their own. ``values`` are what layers make for
    other layers or for the user, ``inputs`` the model's own.
    """

    layers: tuple[str, ...]
    predecessors: Mapping[str, frozenset[str]]
    independent: frozenset[str]
    spans: Mapping[str, tuple[int, int]]
    values: tuple[Value, ...] = ()
    inputs: tuple[Value, ...] = ()

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

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """Bytes made before ``layers[p]`` and needed from there on, for each ``p`` from 0 to the number of layers."""
        place = {layer: index for index, layer in enumerate(self.layers)}
        crossing = [0] * (len(self.layers) + 1)
        for value in self.values:
            if value.consumers:
                last = max(place[layer] for layer in value.consumers)
                for position in range(place[value.producer] + 1, last + 1):
                    crossing[position] += value.size_bytes
        return tuple(crossing)

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """The layers that depend on inputs, each unit after those it needs, else in the order of execution.

        A unit is one layer, or several that need each other's results and so can only run together.
        """
        dependent = [layer for layer in self.layers if layer not in self.independent]
        number = {layer: index for index, layer in enumerate(dependent)}
        # Bit i of needs[layer]: the layer needs, directly or through others, layer i.
        needs = {layer: sum(1 << number[before] for before in self.predecessors[layer]) for layer in dependent}
        changed = True
        while changed:
            changed = False
            for layer in dependent:
                wider = needs[layer]
                for before in self.predecessors[layer]:
                    wider |= needs[before]
                changed |= wider != needs[layer]
                needs[layer] = wider
        units: dict[tuple[str, ...], int] = {}
        for layer in dependent:
            circle = [other for other in dependent if needs[layer] >> number[other] & needs[other] >> number[layer] & 1]
            unit = tuple(circle) if layer in circle else (layer,)
            units.setdefault(unit, needs[layer] & ~sum(1 << number[member] for member in unit))
        order: list[tuple[str, ...]] = []
        done = 0
        while units:
            ready = next(unit for unit, wanted in units.items() if wanted & ~done == 0)
            del units[ready]
            order.append(ready)
            done |= sum(1 << number[member] for member in ready)
        return tuple(order)


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
    consumers = _consumers(model)
    returned = {getattr(field, "name", "") for field in returned_fields(function)}
    values = tuple(
        Value(
            size_bytes(binding.var.ty),
            model.layers[name],
            # What depends on no input does not travel between layers: each computes it again.
            consumers.get(name, frozenset()) if name in depends_on_input else frozenset(),
            name,
            name in returned,
            isinstance(binding.var.ty, relax.TensorType),
        )
        for binding in bindings_of(function)
        if (name := binding.var.name) in model.layers
        and (name in returned or (name in depends_on_input and name in consumers))
    )
    inputs = tuple(
        Value(size_bytes(parameter.ty), CLIENT, consumers.get(parameter.name, frozenset()), parameter.name)
        for parameter in function.params
    )
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
        values=values,
        inputs=inputs,
    )


def _consumers(model: Model) -> dict[str, frozenset[str]]:
    """The layers that need each variable or input."""
    found: dict[str, set[str]] = {}
    inputs = {parameter.name for parameter in main_function(model.module).params}
    for binding in bindings_of(main_function(model.module)):
        if binding.var.name in model.layers:
            for used in used_variables(binding.value):
                if used.name in model.layers or used.name in inputs:
                    found.setdefault(used.name, set()).add(model.layers[binding.var.name])
    return {name: frozenset(layers) for name, layers in found.items()}
