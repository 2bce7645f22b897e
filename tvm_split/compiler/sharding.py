"""Replace each sharded stage of a plan by stages that run on one machine each.

`relay_passes.sharding` rewrites a sharded stage into ordinary operations of the graph, each placed on one machine. The
operations of a machine form one stage per level. The level rises by one where a value comes from another machine: a
stage receives all its inputs before it starts, and sends its outputs when it ends. All machines have the same levels.
docs/inside-layers.md shows a convolution on two machines.

The rewrite also adds slices of values, and gathers of shards, which get their places here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from graphlib import TopologicalSorter
from operator import itemgetter
from typing import NamedTuple

from tvm import relax

from relay_passes.costs import size_bytes
from relay_passes.ir import dependent_names, main_function, operations_of, returned_fields, used_variables
from relay_passes.sharding.direct_gathers import DirectGathers, Place, range_of
from relay_passes.sharding.emit import shard
from relay_passes.sharding.ranges import computed_shares as shares_of
from relay_passes.sharding.region import Region, ShardError, part_name
from tvm_split.compiler.partition import Partition, stages_of
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.placement.plan import Plan
from tvm_split.placement.problem import Stage


def partition(model: Model, plan: Plan) -> Partition:
    """Place each operation of a model by a plan, and split the sharded stages by machine.

    Raises:
        PlanError: `stages_of` raises it, or a stage cannot be sharded that way; names the layer.
    """
    stage_of = stages_of(model, plan)
    inputs = tuple(main_function(model.module).params)
    if not any(stage.sharding for stage in plan.stages):
        return Partition(model, plan, stage_of, inputs, tuple(range(len(plan.stages))))
    places: dict[str, Place] = {}
    source_of: dict[str, str] = {}
    layers = dict(model.layers)
    for index, stage in enumerate(plan.stages):
        if stage.sharding is None:
            places.update({name: Place(index, stage.machines) for name, of in stage_of.items() if of == index})
            continue
        region = _region(model, stage, [name for name, of in stage_of.items() if of == index])
        with _naming_layers(model, stage):
            sharded = shard(model.module, region, axis=stage.sharding.axis, exchange=stage.sharding.exchange)
        # A slice of the model's input belongs to the layer that takes it.
        layers.update({name: layers.get(source, stage.layers[0]) for name, source in sharded.source_of.items()})
        machines = {name: () if machine is None else (machine,) for name, machine in sharded.machine_of.items()}
        places.update({name: Place(index, of) for name, of in machines.items()})
        source_of.update(sharded.source_of)
        names = [binding.var.name for binding in operations_of(main_function(sharded.module))]
        model = replace(model, module=sharded.module, layers={name: layers[name] for name in names})
    places = {name: places[name] for name in model.layers}
    of_inputs = _cuts_of_inputs(model, places, source_of)
    cuts = tuple(binding for binding in operations_of(main_function(model.module)) if binding.var.name in of_inputs)
    model, with_gathers = _placed_gathers(model, plan, places, source_of, of_inputs)
    return replace(_placed_by(model, plan, _leveled(model, plan, with_gathers, source_of), inputs), cuts=cuts)


def computed_shares(model: Model, stage: Stage) -> Mapping[tuple[str, str], float]:
    """Return the share of each variable's elements that each machine of a sharded stage computes.

    Nothing is rewritten; errors are those of `partition`. Keys are (variable, machine). A share exceeds the
    machine's own where several machines compute a halo. Empty for channels and heads, which have no halo.
    """
    assert stage.sharding is not None  # noqa: S101  (the caller has looked)
    layers = set(stage.layers)
    region = _region(model, stage, [name for name, layer in model.layers.items() if layer in layers])
    with _naming_layers(model, stage):
        return shares_of(model.module, region, axis=stage.sharding.axis, exchange=stage.sharding.exchange)


@contextmanager
def _naming_layers(model: Model, stage: Stage) -> Iterator[None]:
    """Turn a `ShardError` inside the block into a `PlanError` that names layers instead of variables."""
    try:
        yield
    except ShardError as error:
        message = naming_layers(model, error)
        raise PlanError(f"{stage.name} on {', '.join(stage.machines)} cannot be sharded: {message}") from error


def naming_layers(model: Model, error: ShardError) -> str:
    """Return the message of an error with the names of layers instead of variables."""
    return re.sub("'([^']+)'", lambda name: repr(model.layers.get(name[1], name[1])), str(error))


def _region(model: Model, stage: Stage, names: Sequence[str]) -> Region:
    by_ending = {part_name("", machine): machine for machine in stage.machines}
    clash = next((machine for machine in stage.machines if machine not in by_ending.values()), None)
    if clash is not None:
        raise PlanError(
            f"{stage.name} is sharded over {clash!r} and {by_ending[part_name('', clash)]!r}, whose shards would have "
            "the same names, in which - is _; rename one of the machines"
        )
    order = list(model.layers)
    begin, end = order.index(names[0]), order.index(names[-1])
    inside = set(names)
    between = next((name for name in order[begin:end] if name not in inside), None)
    if between is not None:
        before, behind = model.layers[order[order.index(between) - 1]], model.layers[names[-1]]
        raise PlanError(
            f"{stage.name} on {', '.join(stage.machines)} cannot be sharded: layer {model.layers[between]!r} is "
            f"executed between {before!r} and {behind!r}; shard it too, or end the sharded layers before it"
        )
    return Region(tuple(names), stage.machines, stage.shares)


def _placed_gathers(
    model: Model, plan: Plan, places: Mapping[str, Place], source_of: dict[str, str], of_inputs: Sequence[str]
) -> tuple[Model, Mapping[str, Place]]:
    """Give every slice and gather a place; add the original variable of each new one to ``source_of``.

    A gathered output of the model is computed on the machine with the largest share, the first of equal ones.
    """
    placed = {name: place for name, place in places.items() if place.machines and name not in of_inputs}
    holders = {}
    for name, place in places.items():
        if not place.machines:
            stage = plan.stages[place.stage]
            _, holder = max(zip(stage.shares, stage.machines, strict=True), key=itemgetter(0))
            holders[name] = replace(place, machines=(holder,))
    module, all_places, new = DirectGathers(model.module, placed, holders, of_inputs).run()
    source_of.update({name: source_of.get(source, source) for name, source in new.items()})
    layers = {**model.layers, **{name: model.layers[source] for name, source in new.items()}}
    names = [binding.var.name for binding in operations_of(main_function(module))]
    model = replace(model, module=module, layers={name: layers[name] for name in names})
    return model, {name: all_places[name] for name in names}


def _cuts_of_inputs(model: Model, places: Mapping[str, Place], source_of: Mapping[str, str]) -> list[str]:
    """Return the slices of model inputs whose machine uses only slices of that input, together smaller than it."""
    function = main_function(model.module)
    sizes = {parameter.name: size_bytes(parameter.ty) for parameter in function.params}
    returned = {field.name for field in returned_fields(function)}
    parts: dict[tuple[str, str], list[relax.VarBinding]] = {}
    whole: set[tuple[str, str]] = set()
    for binding in operations_of(function):
        name, machines = binding.var.name, places[binding.var.name].machines
        for used in used_variables(binding.value):
            if used.name in sizes and source_of.get(name) == used.name and range_of(binding) and name not in returned:
                parts.setdefault((used.name, machines[0]), []).append(binding)
            elif used.name in sizes:
                whole.update((used.name, machine) for machine in machines)
    return [
        binding.var.name
        for (name, machine), cuts in parts.items()
        if (name, machine) not in whole and sum(size_bytes(cut.var.ty) for cut in cuts) < sizes[name]
        for binding in cuts
    ]


class _Shards(NamedTuple):
    """The shards of one value of the original graph, after so many ``transfers`` between a stage's machines.

    The ranges that machines own have 0 transfers; ranges with a halo, and sums of partial sums, have more."""

    stage: int
    source: str
    transfers: int


def _leveled(
    model: Model, plan: Plan, places: Mapping[str, Place], source_of: Mapping[str, str]
) -> Mapping[str, Place]:
    """Return the placements with levels: above the level of values from other machines, and equal for a value's shards.

    Shards share a level even if one of them needs fewer values from other machines. Otherwise one machine would make in
    its next level what another machine's last level waits for, and they would compute one after the other. Operations
    that depend on no input get the first level of their machine that has others: alone they would be no stage.
    """
    dependent = dependent_names(main_function(model.module))
    shards_of: dict[str, _Shards] = {}
    operands_of: dict[_Shards, dict[_Shards, int]] = {}
    """For each operand 1 if a machine receives a shard of it from another one, else 0."""
    for binding in operations_of(main_function(model.module)):
        name, place = binding.var.name, places[binding.var.name]
        if plan.stages[place.stage].sharding is None:
            continue
        read = [
            (shards_of[used.name], int(places[used.name].machines != place.machines))
            for used in used_variables(binding.value)
            if used.name in shards_of and places[used.name].stage == place.stage
        ]
        source = source_of[name]
        transfers = (received + (operand.transfers if operand.source == source else 0) for operand, received in read)
        shards_of[name] = shards = _Shards(place.stage, source, max(transfers, default=0))
        operands = operands_of.setdefault(shards, {})
        for operand, received in read:
            if operand != shards:
                operands[operand] = max(operands.get(operand, 0), received)
    levels: dict[_Shards, int] = {}
    for shards in TopologicalSorter(operands_of).static_order():
        above = (levels[operand] + received for operand, received in operands_of[shards].items())
        levels[shards] = max(above, default=0)
    level_of = {name: levels[shards] for name, shards in shards_of.items() if name in dependent}
    first: dict[Place, int] = {}
    for name, level in level_of.items():
        first[places[name]] = min(level, first.get(places[name], level))
    return {name: replace(place, level=level_of.get(name, first.get(place, 0))) for name, place in places.items()}


def _placed_by(model: Model, plan: Plan, places: Mapping[str, Place], inputs: tuple[relax.Var, ...]) -> Partition:
    order = {place: index for index, place in enumerate(dict.fromkeys(places.values()))}
    keys = sorted(order, key=lambda place: (place.stage, place.level, order[place]))
    contents: dict[Place, list[str]] = {place: [] for place in keys}
    for name, place in places.items():
        contents[place].append(name)
    stages = []
    for place, names in contents.items():
        stage = plan.stages[place.stage]
        layers = tuple(dict.fromkeys(model.layers[name] for name in names))
        if stage.sharding is None:
            stages.append(replace(stage, layers=layers))
        else:
            name = f"{part_name(stage.name, place.machines[0])}_{place.level}"
            stages.append(Stage(place.machines, layers, name=name))
    stage_of = {name: index for index, names in enumerate(contents.values()) for name in names}
    origins = tuple(place.stage for place in contents)
    return Partition(model, replace(plan, stages=tuple(stages), prediction=None), stage_of, inputs, origins)
