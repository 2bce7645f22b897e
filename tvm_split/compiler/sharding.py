"""Replace each sharded stage of a plan by stages that run on one machine each.

`relay_passes.shards` rewrites a sharded stage into ordinary operations of the graph, each placed on one machine. The
operations of a machine form one stage per level. The level rises by one where a value comes from another machine: a
stage receives all its inputs before it starts, and sends its outputs when it ends. All machines have the same levels.

The rewrite also adds *cuts* (slices of a value) and *joins* (concatenations or sums of shards), placed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from graphlib import TopologicalSorter
from operator import itemgetter
from typing import NamedTuple

from tvm import relax

from relay_passes.input_cuts import cut_inputs, range_of
from relay_passes.ir import dependent_names, main_function, operations_of, returned_fields, used_variables
from relay_passes.shards.channels import require_channels, split_channels
from relay_passes.shards.direct_joins import Place, with_direct_joins
from relay_passes.shards.region import Region, Sharded, ShardError, part_name
from relay_passes.shards.rows import computed_rows, split_rows
from tvm_split.compiler.describe import size_bytes
from tvm_split.compiler.partition import Partition, stages_of
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Axis, Stage

Rewrite = Callable[..., Sharded]
REWRITES: Mapping[Axis, Rewrite] = {
    "batch": partial(split_rows, axis=0),
    "rows": partial(split_rows, axis=2),
    "columns": partial(split_rows, axis=3),
    "channels": partial(split_channels, unit_by="channels"),
    "heads": partial(split_channels, unit_by="heads"),
}
LOOKS: Mapping[Axis, Callable[..., Mapping[tuple[str, str], float] | None]] = {
    "batch": partial(computed_rows, axis=0),
    "rows": partial(computed_rows, axis=2),
    "columns": partial(computed_rows, axis=3),
    "channels": partial(require_channels, unit_by="channels"),
    "heads": partial(require_channels, unit_by="heads"),
}


def partition(model: Model, plan: Plan) -> Partition:
    """Place each operation of a model by a plan, and split the sharded stages by machine.

    Raises:
        PlanError: `stages_of` raises it, or a stage cannot be sharded that way; names the layer.
    """
    stage_of = stages_of(model, plan)
    inputs = tuple(main_function(model.module).params)
    if not any(stage.sharding for stage in plan.stages):
        return Partition(model, plan, stage_of, inputs, tuple(range(len(plan.stages))))
    homes: dict[str, _Home] = {}
    source_of: dict[str, str] = {}
    layers = dict(model.layers)
    for index, stage in enumerate(plan.stages):
        if stage.sharding is None:
            homes.update({name: _Home(index) for name, of in stage_of.items() if of == index})
            continue
        sharded = _shared(model, stage, [name for name, of in stage_of.items() if of == index])
        # A slice of the model's input belongs to the layer that takes it.
        layers.update({name: layers.get(source, stage.layers[0]) for name, source in sharded.source_of.items()})
        homes.update({name: _Home(index, machine) for name, machine in sharded.machine_of.items()})
        source_of.update(sharded.source_of)
        model = replace(model, module=sharded.module)
        model = replace(model, layers={each.var.name: layers[each.var.name] for each in _operations(model)})
    model, homes = _placed_cuts_and_joins(model, plan, {name: homes[name] for name in model.layers}, source_of)
    module, cuts = cut_inputs(model.module, _cuts_of_inputs(model, plan, homes, source_of))
    for each in cuts:
        del homes[each.var.name]
    model = replace(model, module=module, layers={name: model.layers[name] for name in homes})
    return replace(_placed_by(model, plan, _leveled(model, plan, homes, source_of), inputs), cuts=cuts)


@dataclass(frozen=True)
class _Home:
    """The placement of an operation: a stage of the plan, and in a sharded stage also the machine and the level.

    Cuts and joins have no machine at first.
    """

    stage: int
    machine: str | None = None
    level: int = 0


def _operations(model: Model) -> list[relax.VarBinding]:
    return operations_of(main_function(model.module))


def _shared(model: Model, stage: Stage, names: Sequence[str]) -> Sharded:
    """Split one stage's operations over its machines and return the rewritten module."""
    assert stage.sharding is not None  # noqa: S101  (the caller has looked)
    region = _region(model, stage, names)
    with _said_of(model, stage):
        return REWRITES[stage.sharding.axis](model.module, region, exchange=stage.sharding.exchange)


def computed_shares(model: Model, stage: Stage) -> Mapping[tuple[str, str], float]:
    """Return the share of each variable's elements that each machine of a sharded stage computes.

    Nothing is rewritten; errors are those of `partition`. Keys are (variable, machine). A share exceeds the
    machine's own where several machines compute a halo. Empty for channels and heads, which have no halo.
    """
    assert stage.sharding is not None  # noqa: S101  (the caller has looked)
    layers = set(stage.layers)
    region = _region(model, stage, [name for name, layer in model.layers.items() if layer in layers])
    with _said_of(model, stage):
        return LOOKS[stage.sharding.axis](model.module, region, exchange=stage.sharding.exchange) or {}


@contextmanager
def _said_of(model: Model, stage: Stage) -> Iterator[None]:
    """Turn a `ShardError` inside the block into a `PlanError` that names layers instead of variables."""
    try:
        yield
    except ShardError as error:
        said = re.sub("'([^']+)'", lambda name: repr(model.layers.get(name[1], name[1])), str(error))
        raise PlanError(f"{stage.name} on {', '.join(stage.machines)} cannot be shared: {said}") from error


def _region(model: Model, stage: Stage, names: Sequence[str]) -> Region:
    same = {part_name("", machine): machine for machine in stage.machines}
    alike = next((machine for machine in stage.machines if machine not in same.values()), None)
    if alike is not None:
        raise PlanError(
            f"{stage.name} is shared by {alike!r} and {same[part_name('', alike)]!r}, whose parts would have the same "
            "names, in which - is _; rename one of the machines"
        )
    order = list(model.layers)
    begin, end = order.index(names[0]), order.index(names[-1])
    inside = set(names)
    between = next((name for name in order[begin:end] if name not in inside), None)
    if between is not None:
        before, behind = model.layers[order[order.index(between) - 1]], model.layers[names[-1]]
        raise PlanError(
            f"{stage.name} on {', '.join(stage.machines)} cannot be shared: layer {model.layers[between]!r} is "
            f"executed between {before!r} and {behind!r}; put it into the shard, or end the shard before it"
        )
    return Region(tuple(names), stage.machines, stage.shares)


def _placed_cuts_and_joins(
    model: Model, plan: Plan, homes: Mapping[str, _Home], source_of: dict[str, str]
) -> tuple[Model, dict[str, _Home]]:
    """Give every cut and join a machine; add the original variable of each new one to ``source_of``.

    A cut is computed where its operand is. A join is computed on every machine that uses it, in the first stage there
    that does. A returned join is computed on the machine with the largest share.
    """
    used = {each.var.name: {of.name for of in used_variables(each.value)} for each in _operations(model)}
    is_open = [name for name, home in homes.items() if _is_shared(home, plan) and home.machine is None]
    cuts = {name for name in is_open if source_of[name] in used[name]}
    holders = {name: _holder(plan.stages[homes[name].stage]) for name in is_open}
    places = {
        name: Place((home.machine,) if home.machine is not None else plan.stages[home.stage].machines, home.stage)
        for name, home in homes.items()
        if name not in holders
    }
    spread = with_direct_joins(model.module, places, cuts, {name: (holders[name],) for name in holders})
    source_of.update({name: source_of.get(source, source) for name, source in spread.source_of.items()})
    layers = {**model.layers, **{name: model.layers[source] for name, source in spread.source_of.items()}}
    model = replace(model, module=spread.module)
    model = replace(model, layers={each.var.name: layers[each.var.name] for each in _operations(model)})
    found: dict[str, _Home] = {}
    for binding in _operations(model):
        name = binding.var.name
        if name in spread.beside:
            found[name] = homes[spread.beside[name]]
        elif name in cuts:
            (operand,) = (each.name for each in used_variables(binding.value))
            found[name] = found[operand]
        elif name in holders:
            found[name] = replace(homes[name], machine=holders[name])
        else:
            found[name] = homes[name]
    return model, found


def _holder(stage: Stage) -> str:
    """The machine with the largest share; the first of equal ones."""
    return max(zip(stage.shares, stage.machines, strict=True), key=itemgetter(0))[1]


def _cuts_of_inputs(model: Model, plan: Plan, homes: Mapping[str, _Home], source_of: Mapping[str, str]) -> list[str]:
    """Names of cuts of model inputs whose machine uses only slices of that input, together smaller than the input."""
    function = main_function(model.module)
    sizes = {each.name: size_bytes(each.ty) for each in function.params}
    returned = {each.name for each in returned_fields(function)}
    parts: dict[tuple[str, str], list[relax.VarBinding]] = {}
    whole: set[tuple[str, str]] = set()
    for binding in operations_of(function):
        name, home = binding.var.name, homes[binding.var.name]
        machines = (home.machine,) if home.machine is not None else plan.stages[home.stage].machines
        for used in used_variables(binding.value):
            if used.name in sizes and source_of.get(name) == used.name and range_of(binding) and name not in returned:
                parts.setdefault((used.name, machines[0]), []).append(binding)
            elif used.name in sizes:
                whole.update((used.name, machine) for machine in machines)
    return [
        binding.var.name
        for (name, machine), cuts in parts.items()
        if (name, machine) not in whole and sum(size_bytes(each.var.ty) for each in cuts) < sizes[name]
        for binding in cuts
    ]


class _Peers(NamedTuple):
    """The variables that a stage's machines make of one value of the original graph, after ``crossings`` transfers.

    The shards themselves have 0 crossings; a shard with its halo, or a sum of partial sums, has more."""

    stage: int
    source: str
    crossings: int


def _leveled(model: Model, plan: Plan, homes: Mapping[str, _Home], source_of: Mapping[str, str]) -> Mapping[str, _Home]:
    """Return the placements with levels: above the level of values from other machines, and equal for a value's peers.

    Peers share a level even if a machine's shard needs fewer values from others. Otherwise one machine would make in
    its next level what another machine's last level waits for, and they would compute one after the other. Operations
    that depend on no input join the first level of their machine that has others: alone they would be no stage.
    """
    dependent = dependent_names(main_function(model.module))
    peers: dict[str, _Peers] = {}
    rises: dict[_Peers, dict[_Peers, int]] = {}
    for binding in _operations(model):
        name, home = binding.var.name, homes[binding.var.name]
        if not _is_shared(home, plan):
            continue
        inside = [
            (peers[each.name], int(homes[each.name].machine != home.machine))
            for each in used_variables(binding.value)
            if each.name in peers and homes[each.name].stage == home.stage
        ]
        source = source_of[name]
        crossings = (rise + (of.crossings if of.source == source else 0) for of, rise in inside)
        peers[name] = own = _Peers(home.stage, source, max(crossings, default=0))
        before = rises.setdefault(own, {})
        for other, rise in inside:
            if other != own:
                before[other] = max(before.get(other, 0), rise)
    levels: dict[_Peers, int] = {}
    for each in TopologicalSorter(rises).static_order():
        levels[each] = max((levels[other] + rise for other, rise in rises[each].items()), default=0)
    level_of = {name: levels[own] for name, own in peers.items() if name in dependent}
    first: dict[_Home, int] = {}
    for name, level in level_of.items():
        first[homes[name]] = min(level, first.get(homes[name], level))
    return {name: replace(home, level=level_of.get(name, first.get(home, 0))) for name, home in homes.items()}


def _is_shared(home: _Home, plan: Plan) -> bool:
    return plan.stages[home.stage].sharding is not None


def _placed_by(model: Model, plan: Plan, homes: Mapping[str, _Home], inputs: tuple[relax.Var, ...]) -> Partition:
    order = {home: place for place, home in enumerate(dict.fromkeys(homes.values()))}
    keys = sorted(order, key=lambda home: (home.stage, home.level, order[home]))
    contents: dict[_Home, list[str]] = {home: [] for home in keys}
    for name, home in homes.items():
        contents[home].append(name)
    stages = []
    for home, names in contents.items():
        stage = plan.stages[home.stage]
        layers = tuple(dict.fromkeys(model.layers[name] for name in names))
        if home.machine is None:
            stages.append(replace(stage, layers=layers))
        else:
            name = f"{part_name(stage.name, home.machine)}_{home.level}"
            stages.append(Stage((home.machine,), layers, name=name))
    stage_of = {name: index for index, names in enumerate(contents.values()) for name in names}
    origins = tuple(home.stage for home in contents)
    return Partition(model, replace(plan, stages=tuple(stages), prediction=None), stage_of, inputs, origins)
