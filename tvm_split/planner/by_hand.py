"""A plan from the user's own words: which layers go to which machine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from tvm_split.errors import PlanError
from tvm_split.planner.layer_graph import LayerGraph
from tvm_split.planner.plan import PlannedStage

Split = Mapping[str, Sequence[str]]


def stages_by_hand(
    graph: LayerGraph, split: Split, machine_names: Sequence[str], stages: int | None
) -> tuple[PlannedStage, ...]:
    """Stages that follow a split.

    A name takes the layer of that name and all below it; where several names fit a layer, the longest counts. Layers
    that no name fits go with the layers before them, those at the start with the first named layer. A machine gets one
    stage, or as many as it takes so that none waits on itself.

    Raises:
        PlanError: an unknown machine or layer, a layer given to two machines, or more stages than ``stages``.
    """
    machine_of = assign_layers(graph, split, machine_names)
    groups = group_stages(graph, machine_of)
    if stages is not None and len(groups) != stages:
        raise PlanError(_wrong_count(graph, machine_of, groups, stages))
    return name_stages([(machine_of[group[0]], group) for group in groups])


def assign_layers(graph: LayerGraph, split: Split, machine_names: Sequence[str]) -> dict[str, str]:
    """The machine of every layer."""
    owner_of_name: dict[str, str] = {}
    for machine, layer_names in split.items():
        if machine not in machine_names:
            raise PlanError(f"split names machine {machine!r}; the cluster has {', '.join(machine_names)}")
        if isinstance(layer_names, str):
            raise PlanError(f"split gives machine {machine!r} the string {layer_names!r}; give a list of layer names")
        if not layer_names:
            raise PlanError(f"split gives machine {machine!r} no layers; leave it out, or name a layer for it")
        for name in layer_names:
            _require_known_layer(graph, name, machine)
            if owner_of_name.setdefault(name, machine) != machine:
                raise PlanError(f"split gives layer {name!r} to both {owner_of_name[name]!r} and {machine!r}")
    if not owner_of_name:
        raise PlanError("split names no layer; give each machine a list of layers, or leave split out")
    named = {layer: _longest_match(layer, owner_of_name) for layer in graph.layers}
    current = next(owner_of_name[name] for name in named.values() if name is not None)
    machine_of: dict[str, str] = {}
    for layer, fitting in named.items():
        if fitting is not None:
            current = owner_of_name[fitting]
        machine_of[layer] = current
    return machine_of


def group_stages(graph: LayerGraph, machine_of: Mapping[str, str]) -> list[list[str]]:
    """Stages as lists of layers, in topological order, each convex and on one machine.

    Every layer first gets a level, which rises by one where a value changes machines: layers of one level and machine
    form a stage, since a path that leaves the machine and comes back ends on a higher level. Then stages of one machine
    are joined wherever that makes no circle, so that a machine has as few as it can.
    """
    level: dict[str, int] = {}
    groups: dict[tuple[int, str], list[str]] = {}
    for unit in graph.units:
        machine = _machine_of_unit(unit, machine_of)
        before = {layer for member in unit for layer in graph.predecessors[member]} - set(unit)
        height = max((level[layer] + (machine_of[layer] != machine) for layer in before), default=0)
        level.update(dict.fromkeys(unit, height))
        groups.setdefault((height, machine), []).extend(unit)
    joined = _join_where_possible(graph, list(groups.values()), machine_of)
    return with_independent_layers(graph, _sort_groups(graph, joined))


def name_stages(stages: Sequence[tuple[str, Sequence[str]]]) -> tuple[PlannedStage, ...]:
    """Stages named ``stage_0``, ``stage_1``, … from pairs of machine and layers."""
    return tuple(
        PlannedStage(f"stage_{index}", machine, tuple(layers)) for index, (machine, layers) in enumerate(stages)
    )


def _longest_match(layer: str, names: Mapping[str, str]) -> str | None:
    fitting = [name for name in names if covers(name, layer)]
    return max(fitting, key=len) if fitting else None


def covers(name: str, layer: str) -> bool:
    """Whether ``name`` is the layer, or a prefix of it that ends where a part of its path ends."""
    return layer == name or (layer.startswith(name) and (layer[len(name)] in "./@" or name.endswith(("/", "."))))


def _require_known_layer(graph: LayerGraph, name: str, machine: str) -> None:
    if any(covers(name, layer) for layer in graph.layers):
        return
    close = difflib.get_close_matches(name, graph.layers, n=3, cutoff=0.4) or list(graph.layers[:3])
    raise PlanError(
        f"split gives machine {machine!r} the layer {name!r}, which the model does not have; "
        f"near it are {', '.join(map(repr, close))} (`tvm-split plan MODEL --layers` lists all {len(graph.layers)})"
    )


def _machine_of_unit(unit: Sequence[str], machine_of: Mapping[str, str]) -> str:
    machines = sorted({machine_of[layer] for layer in unit})
    if len(machines) > 1:
        raise PlanError(
            f"the split would wait on itself: {' and '.join(map(repr, unit))} need each other's results and lie on "
            f"{' and '.join(machines)}; put them on one machine"
        )
    return machines[0]


def _join_where_possible(graph: LayerGraph, groups: list[list[str]], machine_of: Mapping[str, str]) -> list[list[str]]:
    joined = list(groups)
    first = 0
    while first < len(joined):
        for second in range(first + 1, len(joined)):
            if machine_of[joined[first][0]] != machine_of[joined[second][0]]:
                continue
            candidate = [
                *joined[:first],
                joined[first] + joined[second],
                *joined[first + 1 : second],
                *joined[second + 1 :],
            ]
            if _sorted_or_none(graph, candidate) is not None:
                joined = candidate
                break
        else:
            first += 1
    return joined


def _sort_groups(graph: LayerGraph, groups: list[list[str]]) -> list[list[str]]:
    ordered = _sorted_or_none(graph, groups)
    if ordered is None:
        raise PlanError("the split would wait on itself")
    position = {layer: index for index, layer in enumerate(graph.layers)}
    return [sorted(group, key=position.__getitem__) for group in ordered]


def _sorted_or_none(graph: LayerGraph, groups: list[list[str]]) -> list[list[str]] | None:
    """The groups in topological order, or None if they need each other in a circle."""
    group_of = {layer: index for index, group in enumerate(groups) for layer in group}
    needs = [
        {group_of[before] for layer in group for before in graph.predecessors[layer]} - {index}
        for index, group in enumerate(groups)
    ]
    order: list[int] = []
    while len(order) < len(groups):
        ready = [index for index in range(len(groups)) if index not in order and needs[index] <= set(order)]
        if not ready:
            return None
        order.append(ready[0])
    return [groups[index] for index in order]


def with_independent_layers(graph: LayerGraph, groups: list[list[str]]) -> list[list[str]]:
    """Put each layer without inputs into the stage that stands around it in the order of execution."""
    if not groups:
        return [list(graph.layers)]
    position = {layer: index for index, layer in enumerate(graph.layers)}
    group_of = {layer: index for index, group in enumerate(groups) for layer in group}
    for layer in graph.layers:
        if layer in graph.independent:
            nearest = min(group_of, key=lambda other: abs(position[other] - position[layer]))
            groups[group_of[nearest]].append(layer)
    return [sorted(group, key=position.__getitem__) for group in groups]


def _wrong_count(graph: LayerGraph, machine_of: Mapping[str, str], groups: Sequence[Sequence[str]], stages: int) -> str:
    machines = [machine_of[group[0]] for group in groups]
    chain = " → ".join(f"{group[0]} … {group[-1]} ({machine})" for group, machine in zip(groups, machines, strict=True))
    text = f"the split makes {len(groups)} stages, stages={stages} was asked for: {chain}"
    repeated = sorted({machine for machine in machines if machines.count(machine) > 1})
    if len(groups) > stages and repeated:
        text += (
            f". As a single stage {repeated[0]} would wait on itself: it needs what another machine computes from its "
            f"own result; move layers, or ask for stages={len(groups)}"
        )
    return text
