"""The graph of a model's layers: what depends on what, and where a model may be cut."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from tvm import relax

from relay_passes.contract import bindings_of, main_function, returned_fields, used_variables
from rpc_runtime.program.routes import CLIENT
from tvm_split.planner.tensor_types import size_bytes

if TYPE_CHECKING:
    from tvm_split.model import Model

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


def layer_graph(model: Model) -> LayerGraph:
    """Built anew; a model keeps its own as ``model.graph``."""
    function = main_function(model.module)
    bindings = [each for each in bindings_of(function) if each.var.name in model.layers]
    inputs = {parameter.name for parameter in function.params}
    returned = {getattr(field, "name", "") for field in returned_fields(function)}
    depends_on_input = set(inputs)
    consumers: dict[str, set[str]] = {}
    predecessors: dict[str, set[str]] = {layer: set() for layer in model.layer_names}
    for binding in bindings:
        layer = model.layers[binding.var.name]
        for used in used_variables(binding.value):
            if used.name in depends_on_input:
                depends_on_input.add(binding.var.name)
            if used.name in inputs or used.name in model.layers:
                consumers.setdefault(used.name, set()).add(layer)
            if model.layers.get(used.name, layer) != layer:
                predecessors[layer].add(model.layers[used.name])
    # A table that the model returns has to be made somewhere, so it counts like any other layer.
    dependent = {layer for name, layer in model.layers.items() if name in depends_on_input or name in returned}
    independent = frozenset(model.layer_names) - dependent
    return LayerGraph(
        layers=model.layer_names,
        predecessors={layer: frozenset(before - independent) for layer, before in predecessors.items()},
        independent=independent,
        values=tuple(
            Value(
                size_bytes(binding.var.ty),
                model.layers[name],
                # What depends on no input does not travel between layers: each computes it again.
                frozenset(consumers.get(name, ()) if name in depends_on_input else ()),
                name,
                name in returned,
                isinstance(binding.var.ty, relax.TensorType),
            )
            for binding in bindings
            if (name := binding.var.name) in returned or (name in depends_on_input and name in consumers)
        ),
        inputs=tuple(
            Value(size_bytes(each.ty), CLIENT, frozenset(consumers.get(name, ())), name, name in returned)
            for each in function.params
            if (name := each.name)
        ),
    )
