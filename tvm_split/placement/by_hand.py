"""What the user decides: which layers go to which machine, and which layers machines compute together (shards)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from tvm_split.errors import PlanError
from tvm_split.placement.graph import LayerGraph, grouped
from tvm_split.placement.problem import SHARES_TOLERANCE, Axis, Exchange, Sharding, Share, Stage
from tvm_split.units import ShownFields, count_text, known_names
from tvm_split.values import sentence

FORM = "FIRST..LAST:AXIS:MACHINE=SHARE,MACHINE=SHARE[:EXCHANGE]"
"""The text form of a shard, for command lines."""


@dataclass(frozen=True, repr=False)
class Shard(ShownFields):
    """The layers from ``first`` to ``last``, in the order of execution, sharded over machines.

    A name stands for the layer of that name and all below it. ``shares`` are the machines' parts of the work and add up
    to 1. Weights are sharded the same way for ``"channels"`` and ``"heads"``; otherwise each machine has all of them.

    ``axis`` is what is sharded: ``"rows"`` or ``"columns"`` of feature maps, output ``"channels"`` of layers,
    ``"heads"`` of attention, samples of a ``"batch"``. ``exchange`` is what the machines transfer: with ``"fused"`` as
    little as possible (halo rows are computed twice; a column-parallel product is followed by a row-parallel one, and
    the partial sums are transferred), with ``"each"`` after every layer what the next one needs.
    """

    first: str
    last: str
    axis: Axis
    shares: Mapping[str, Share]
    exchange: Exchange = "fused"

    def __str__(self) -> str:
        return f"the shard of {self.axis} from {self.first!r} to {self.last!r}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse a shard from a text of the `FORM`, or from YAML in braces with the fields of this class.

        A single layer is both the first and the last. Names that contain ``..`` need YAML.

        Raises:
            PlanError: the text has another form, or an invalid axis, share or exchange.
        """
        axes, exchanges = get_args(Axis), get_args(Exchange)
        if text.lstrip().startswith("{"):
            return _from_yaml(text)
        match = re.fullmatch(rf"(.+):({'|'.join(axes)}):(.*=[^:]*?)(?::([^:=]*))?", text, re.DOTALL)
        if match is None:
            raise PlanError(f"{text!r} is not {FORM} (AXIS is {', '.join(axes)}; EXCHANGE {' or '.join(exchanges)})")
        names, axis, shares, exchange = match.groups(default="")
        first, _, last = names.partition("..")
        if match[4] is not None and exchange not in exchanges:
            raise PlanError(f"{text!r} has the exchange {exchange!r}; it can be {' or '.join(exchanges)}")
        ends = first.strip(), (last or first).strip()
        return cls(*ends, cast(Axis, axis), _shares(text, shares), cast(Exchange, exchange or exchanges[0]))


def _shares(text: str, shares_text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in shares_text.split(","):
        machine, separator, share = (field.strip() for field in part.rpartition("="))
        if not (machine and separator):
            raise PlanError(f"{text!r} has {part!r}, which is not MACHINE=SHARE")
        if machine in shares:
            raise PlanError(f"{text!r} has two shares for {machine!r}; give it their sum")
        try:
            shares[machine] = float(share)
        except ValueError:
            raise PlanError(f"{text!r} gives {machine!r} {share!r}, which is no share like 0.5") from None
    return shares


def _from_yaml(text: str) -> Shard:
    try:
        return TypeAdapter(Shard).validate_python(yaml.safe_load(text), extra="forbid")
    except yaml.YAMLError as error:
        raise PlanError(f"{text!r} is no shard in YAML: {error}") from error
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, problem['loc']))}: {sentence(problem)}" for problem in error.errors())
        raise PlanError(f"{text!r} is no shard: {'; '.join(wrong)}") from error


def sharding_words(stage: Stage) -> str:
    """A description of how a stage is sharded over its machines; empty for a stage without a sharding."""
    if stage.sharding is None:
        return ""
    axis = stage.sharding.axis
    parts = [f"{machine} {share:.2g}" for machine, share in zip(stage.machines, stage.shares, strict=True)]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{listed} of the {axis}; {_exchanges(axis, stage.sharding.exchange)}"


def _exchanges(axis: Axis, exchange: Exchange) -> str:
    if axis == "batch":
        return "nothing is exchanged"
    if axis in ("rows", "columns"):
        return f"{axis} beyond a part are " + ("computed twice" if exchange == "fused" else "exchanged at each window")
    return (
        "partial sums are exchanged, once for two layers"
        if exchange == "fused"
        else "outputs are gathered for each product"
    )


Split = Mapping[str, tuple[str, ...]]
"""Names of layers by machine."""


def stages_by_hand(
    graph: LayerGraph,
    split: Split,
    machine_names: Sequence[str],
    stages: int | None = None,
    shards: Sequence[Shard] = (),
) -> tuple[Stage, ...]:
    """Stages that follow a split by hand, or shards, or shards with a split for the other layers.

    A name stands for the layer of that name and all below it; if several names match a layer, the longest counts.
    Layers that no name matches go with the layers before them, those at the start with the first named layer. Without
    a split, layers after a shard go to the machine with its largest share, and so do those before the first. A machine
    gets one stage, or more if a single stage would depend on its own results.

    Raises:
        PlanError: an unknown machine or layer, a layer given to two machines, a number of stages other than ``stages``,
            or layers on several machines that need each other's results; shares that do not add up to 1, shards that
            overlap, or a split that gives one of their layers to a machine.
    """
    owners: Mapping[str, Shard | str] = assign_layers(graph, split, machine_names) if split else {}
    if shards:
        owners = _with_shards(graph, shards, split, owners, machine_names)
    owner_of = {layer: str(owner) for layer, owner in owners.items()}
    groups = group_stages(graph, owner_of)
    if stages is not None and len(groups) != stages:
        raise PlanError(_wrong_count(owner_of, groups, stages))
    # Layers that depend on no input may be of another owner.
    firsts = [next((layer for layer in group if layer not in graph.independent), group[0]) for group in groups]
    return named(_stage(owners[first], group) for first, group in zip(firsts, groups, strict=True))


def assign_layers(graph: LayerGraph, split: Split, machine_names: Sequence[str]) -> dict[str, str]:
    """The machine of every layer; errors as of `stages_by_hand`."""
    owner_of_name: dict[str, str] = {}
    for machine, layer_names in split.items():
        if machine not in machine_names:
            raise PlanError(f"split names machine {machine!r}; the cluster has {known_names(machine_names, machine)}")
        for name in layer_names:
            _places(graph, name, f"split gives machine {machine!r} the")
            if owner_of_name.setdefault(name, machine) != machine:
                raise PlanError(f"split gives layer {name!r} to both {owner_of_name[name]!r} and {machine!r}")
    fitting = {
        layer: max((name for name in owner_of_name if covers(name, layer)), key=len, default=None)
        for layer in graph.layers
    }
    current = next(owner_of_name[name] for name in fitting.values() if name is not None)
    machine_of: dict[str, str] = {}
    for layer, match in fitting.items():
        if match is not None:
            current = owner_of_name[match]
        machine_of[layer] = current
    return machine_of


def group_stages(graph: LayerGraph, machine_of: Mapping[str, str]) -> list[list[str]]:
    """Stages as lists of layers, in topological order, each convex and on one machine, or in one shard.

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
    """Return the stages, renamed to ``stage_0``, ``stage_1``, …"""
    return tuple(replace(stage, name=f"stage_{index}") for index, stage in enumerate(stages))


def completed(graph: LayerGraph, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages, named by `named`, and add each layer that depends on no input to the nearest stage."""
    groups = with_independent_layers(graph, [list(stage.layers) for stage in stages])
    return named(replace(stage, layers=tuple(group)) for stage, group in zip(stages, groups, strict=True))


def covers(name: str, layer: str) -> bool:
    """Whether ``name`` is the layer, or a prefix of it that ends at a separator of its path."""
    return layer == name or (layer.startswith(name) and (layer[len(name)] in "./@" or name.endswith(("/", "."))))


def _places(graph: LayerGraph, name: str, who: str) -> list[int]:
    """Return the positions of all layers that ``name`` stands for; the message of a `PlanError` begins with ``who``."""
    places = [place for place, layer in enumerate(graph.layers) if covers(name, layer)]
    if not places:
        raise PlanError(f"{who} layer {name!r}, {why_unknown(graph, name)}")
    return places


def why_unknown(graph: LayerGraph, name: str) -> str:
    """The end of an error message on a name that no layer has: nothing is computed for it, or it is unknown."""
    owners = [owner for empty, owner in graph.empty_layers.items() if covers(name, empty)]
    if owners:
        owner = next(filter(None, owners), "")
        remedy = f"its result is that of layer {owner!r}, so name this one" if owner else "leave it out"
        return f"for which nothing is computed; {remedy}"
    close = difflib.get_close_matches(name, graph.layers, n=3, cutoff=0.4) or list(graph.layers[:3])
    return (
        f"which the model does not have; near it are {', '.join(map(repr, close))} "
        f"(`tvm-split plan MODEL --layers` lists all {len(graph.layers)})"
    )


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
            nearest = min(group_of, key=lambda candidate: abs(position[candidate] - position[layer]))
            groups[group_of[nearest]].append(layer)
    return [sorted(group, key=position.__getitem__) for group in groups]


def _wrong_count(machine_of: Mapping[str, str], groups: Sequence[Sequence[str]], stages: int) -> str:
    machines = [machine_of[group[0]] for group in groups]
    chain = " → ".join(f"{group[0]} … {group[-1]} ({machine})" for group, machine in zip(groups, machines, strict=True))
    return (
        f"the split makes {count_text(len(groups), 'stage')}, stages={stages} was asked for: {chain}. A machine has "
        f"several where one stage would wait on itself; move layers, or ask for stages={len(groups)}"
    )


def _with_shards(
    graph: LayerGraph,
    shards: Sequence[Shard],
    split: Split,
    machine_of: Mapping[str, Shard | str],
    machine_names: Sequence[str],
) -> dict[str, Shard | str]:
    """Return the shard or the machine of every layer; ``machine_of`` has each layer's machine by the split alone."""
    shard_of: dict[str, Shard] = {}
    for shard in shards:
        _check(shard, machine_names)
        for place in _range(graph, shard):
            layer = graph.layers[place]
            if shard_of.setdefault(layer, shard) is not shard:
                raise PlanError(f"layer {layer!r} is in {shard_of[layer]} and in {shard}; end one before the other")
    for machine, name in ((machine, name) for machine, names in split.items() for name in names):
        places = _places(graph, name, f"split gives machine {machine!r} the")
        consumers = [shard_of.get(graph.layers[place]) for place in places]
        if None not in consumers:
            raise PlanError(
                f"split gives machine {machine!r} the layer {name!r}, which is in {consumers[0]}; take it out of the "
                "split, which is for the other layers, or end the shard before it"
            )
    owners: dict[str, Shard | str] = {}
    nearest = next(shard_of[layer] for layer in graph.layers if layer in shard_of)
    for layer in graph.layers:
        nearest = shard_of.get(layer, nearest)
        nearest_machine = max(nearest.shares, key=nearest.shares.__getitem__)
        owners[layer] = shard_of.get(layer) or machine_of.get(layer, nearest_machine)
    return owners


def _check(shard: Shard, machine_names: Sequence[str]) -> None:
    unknown = next((machine for machine in shard.shares if machine not in machine_names), None)
    if unknown is not None:
        raise PlanError(f"{shard} names machine {unknown!r}; the cluster has {known_names(machine_names, unknown)}")
    if len(shard.shares) < 2:
        raise PlanError(
            f"{shard} names {len(shard.shares)} of the machines; give shares to two at least, or leave it out"
        )
    whole = sum(shard.shares.values())
    if abs(whole - 1) > SHARES_TOLERANCE:
        raise PlanError(f"the shares of {shard} add up to {whole:g}; they are parts of the whole, so make them 1")


def _range(graph: LayerGraph, shard: Shard) -> range:
    begin, end = (_places(graph, name, f"{shard} names") for name in (shard.first, shard.last))
    if end[-1] < begin[0]:
        raise PlanError(
            f"{shard} ends before it begins: {shard.last!r} is executed before {shard.first!r}; exchange them"
        )
    return range(begin[0], end[-1] + 1)


def _stage(owner: Shard | str, layers: Sequence[str]) -> Stage:
    if isinstance(owner, str):
        return Stage((owner,), tuple(layers))
    whole = sum(owner.shares.values())
    shares = tuple(share / whole for share in owner.shares.values())
    return Stage(tuple(owner.shares), tuple(layers), shares, sharding=Sharding(owner.axis, owner.exchange))
