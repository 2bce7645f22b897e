"""Stages from a split by hand: the user says which layers go to which machine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tvm_split.errors import PlanError
from tvm_split.planner.graph import LayerGraph, grouped
from tvm_split.planner.problem import Stage
from tvm_split.planner.request import Split
from tvm_split.units import short_list


def stages_by_hand(
    graph: LayerGraph, split: Split, machine_names: Sequence[str], stages: int | None
) -> tuple[Stage, ...]:
    """Stages that follow a split by hand.

    A name stands for the layer of that name and all below it; if several names match a layer, the longest counts.
    Layers that no name matches go with the layers before them, those at the start with the first named layer. A
    machine gets one stage, or more if a single stage would depend on its own results.

    Raises:
        PlanError: an unknown machine or layer, a layer given to two machines, a number of stages other than ``stages``,
            or layers on several machines that need each other's results.
    """
    machine_of = assign_layers(graph, split, machine_names)
    groups = group_stages(graph, machine_of)
    if stages is not None and len(groups) != stages:
        raise PlanError(_wrong_count(machine_of, groups, stages))
    return named(Stage((machine_of[group[0]],), tuple(group)) for group in groups)


def assign_layers(graph: LayerGraph, split: Split, machine_names: Sequence[str]) -> dict[str, str]:
    """The machine of every layer; errors as of `stages_by_hand`."""
    owner_of_name: dict[str, str] = {}
    for machine, layer_names in split.items():
        if machine not in machine_names:
            raise PlanError(f"split names machine {machine!r}; the cluster has {short_list(machine_names)}")
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
    fitting = {layer: _longest_match(layer, owner_of_name) for layer in graph.layers}
    current = next(owner_of_name[name] for name in fitting.values() if name is not None)
    machine_of: dict[str, str] = {}
    for layer, match in fitting.items():
        if match is not None:
            current = owner_of_name[match]
        machine_of[layer] = current
    return machine_of


def group_stages(graph: LayerGraph, machine_of: Mapping[str, str]) -> list[list[str]]:
    """Stages as lists of layers, in topological order, each convex and on one machine.

    Every layer first gets a level, which rises by one where a value changes machines. Layers of one level and machine
    form a stage, since a path that leaves the machine and comes back ends on a higher level. Then stages of one machine
    are merged wherever that makes no cycle, to have as few stages as possible.
    """
    level: dict[str, int] = {}
    groups: dict[tuple[int, str], list[str]] = {}
    for unit in graph.units:
        machine = _machine_of_unit(unit, machine_of)
        before = {layer for member in unit for layer in graph.predecessors[member]} - set(unit)
        height = max((level[layer] + (machine_of[layer] != machine) for layer in before), default=0)
        level.update(dict.fromkeys(unit, height))
        groups.setdefault((height, machine), []).extend(unit)
    return with_independent_layers(graph, _joined(graph, list(groups.values()), machine_of))


def named(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """The stages with the names ``stage_0``, ``stage_1``, …"""
    return tuple(replace(stage, name=f"stage_{index}") for index, stage in enumerate(stages))


def _longest_match(layer: str, names: Mapping[str, str]) -> str | None:
    fitting = [name for name in names if covers(name, layer)]
    return max(fitting, key=len) if fitting else None


def covers(name: str, layer: str) -> bool:
    """Whether ``name`` is the layer, or a prefix of it that ends at a separator of its path."""
    return layer == name or (layer.startswith(name) and (layer[len(name)] in "./@" or name.endswith(("/", "."))))


def _require_known_layer(graph: LayerGraph, name: str, machine: str) -> None:
    if any(covers(name, layer) for layer in graph.layers):
        return
    raise PlanError(
        f"split gives machine {machine!r} the layer {name!r}, which the model does not have; {near_names(graph, name)}"
    )


def near_names(graph: LayerGraph, name: str) -> str:
    """The part of an error message that lists layers with names similar to an unknown one."""
    close = difflib.get_close_matches(name, graph.layers, n=3, cutoff=0.4) or list(graph.layers[:3])
    return f"near it are {', '.join(map(repr, close))} (`tvm-split plan MODEL --layers` lists all {len(graph.layers)})"


def _machine_of_unit(unit: Sequence[str], machine_of: Mapping[str, str]) -> str:
    machines = sorted({machine_of[layer] for layer in unit})
    if len(machines) > 1:
        raise PlanError(
            f"the split would wait on itself: {' and '.join(map(repr, unit))} need each other's results and lie on "
            f"{' and '.join(machines)}; put them on one machine"
        )
    return machines[0]


def _joined(graph: LayerGraph, groups: list[list[str]], machine_of: Mapping[str, str]) -> list[list[str]]:
    """The groups in topological order, with groups of one machine merged wherever that makes no cycle."""
    first = 0
    while first < len(groups):
        for second in range(first + 1, len(groups)):
            if machine_of[groups[first][0]] == machine_of[groups[second][0]]:
                candidate = [*groups[:first], groups[first] + groups[second], *groups[first + 1 :]]
                del candidate[second]
                if len(grouped(graph.dependent, candidate)) == len(candidate):
                    groups = candidate
                    break
        else:
            first += 1
    return [list(group) for group in grouped(graph.dependent, groups)]


def with_independent_layers(graph: LayerGraph, groups: list[list[str]]) -> list[list[str]]:
    """Add each layer that depends on no input to the group with the nearest layer in the order of execution."""
    if not groups:
        return [list(graph.layers)]
    position = {layer: index for index, layer in enumerate(graph.layers)}
    group_of = {layer: index for index, group in enumerate(groups) for layer in group}
    for layer in graph.layers:
        if layer in graph.independent:
            nearest = min(group_of, key=lambda other: abs(position[other] - position[layer]))
            groups[group_of[nearest]].append(layer)
    return [sorted(group, key=position.__getitem__) for group in groups]


def _wrong_count(machine_of: Mapping[str, str], groups: Sequence[Sequence[str]], stages: int) -> str:
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
