"""Stages from shards by hand: the user says which layers several machines compute together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from numbers import Real
from typing import get_args

from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import assign_layers, covers, near_names
from tvm_split.planner.graph import LayerGraph
from tvm_split.planner.problem import SHARES_TOLERANCE, Axis, Exchange, Sharding, Stage
from tvm_split.planner.request import Split
from tvm_split.planner.shard import Shard
from tvm_split.units import short_list


def stages_with_shards(
    graph: LayerGraph, shards: Sequence[Shard], split: Split | None, machine_names: Sequence[str]
) -> tuple[Stage, ...]:
    """Stages of which some are sharded; the others follow ``split``.

    Without a split, layers after a shard go to the machine with its largest share, and so do those before the first.

    Raises:
        PlanError: an unknown machine, layer, axis or exchange; shares that are not above 0 or do not add up to 1;
            shards that overlap; or a split that gives one of their layers to a machine.
    """
    owner: list[Shard | str | None] = [None] * len(graph.layers)
    for shard in shards:
        _check(shard, machine_names)
        for place in _places(graph, shard):
            taken = owner[place]
            if isinstance(taken, Shard):
                raise PlanError(f"layer {graph.layers[place]!r} is in {taken} and in {shard}; end one before the other")
            owner[place] = shard
    machine_of = assign_layers(graph, split, machine_names) if split else {}
    for machine, name in ((machine, name) for machine, names in (split or {}).items() for name in names):
        takers = [owner[place] for place, layer in enumerate(graph.layers) if covers(name, layer)]
        if None not in takers:
            raise PlanError(
                f"split gives machine {machine!r} the layer {name!r}, which is in {takers[0]}; take it out of the "
                "split, which is for the other layers, or end the shard before it"
            )
    nearest = next(each for each in owner if isinstance(each, Shard))
    for place, layer in enumerate(graph.layers):
        found = owner[place]
        if isinstance(found, Shard):
            nearest = found
        else:
            owner[place] = machine_of.get(layer) or max(nearest.shares, key=nearest.shares.__getitem__)
    stages = (
        _stage(key, [layer for layer, _ in group])
        for key, group in groupby(zip(graph.layers, owner, strict=True), lambda pair: pair[1])
    )
    return tuple(_with_independent(graph, stages))


def _check(shard: Shard, machine_names: Sequence[str]) -> None:
    for name, known in (("axis", Axis), ("exchange", Exchange)):
        if getattr(shard, name) not in get_args(known):
            raise PlanError(f"{shard} has the {name} {getattr(shard, name)!r}; it can be {', '.join(get_args(known))}")
    for name in ("first", "last"):
        if not isinstance(getattr(shard, name), str):
            raise PlanError(f"{shard} has the {name} layer {getattr(shard, name)!r}; give a layer's name")
    if not isinstance(shard.shares, Mapping):
        raise PlanError(f"{shard} has the shares {shard.shares!r}; give each machine's, like {{'machine-a': 0.5}}")
    unknown = [machine for machine in shard.shares if machine not in machine_names]
    if unknown:
        raise PlanError(f"{shard} names machine {unknown[0]!r}; the cluster has {short_list(machine_names)}")
    if len(shard.shares) < 2:
        raise PlanError(
            f"{shard} names {len(shard.shares)} of the machines; give shares to two at least, or leave it out"
        )
    for machine, share in shard.shares.items():
        if not isinstance(share, Real):
            raise PlanError(f"{shard} gives {machine!r} a share of {share!r}; a share is a number, like 0.5")
        if not (math.isfinite(share) and share > 0):
            raise PlanError(f"{shard} gives {machine!r} a share of {share!r}; leave it out, or give it more than 0")
    whole = sum(shard.shares.values())
    if abs(whole - 1) > SHARES_TOLERANCE:
        raise PlanError(f"the shares of {shard} add up to {whole:g}; they are parts of the whole, so make them 1")


def _places(graph: LayerGraph, shard: Shard) -> range:
    found = []
    for name in (shard.first, shard.last):
        places = [place for place, layer in enumerate(graph.layers) if covers(name, layer)]
        if not places:
            raise PlanError(f"{shard} names layer {name!r}, which the model does not have; {near_names(graph, name)}")
        found.append(places)
    begin, end = found[0][0], found[1][-1]
    if end < begin:
        raise PlanError(
            f"{shard} ends before it begins: {shard.last!r} is executed before {shard.first!r}; exchange them"
        )
    return range(begin, end + 1)


def _stage(key: Shard | str | None, layers: Sequence[str]) -> Stage:
    if not isinstance(key, Shard):
        return Stage((str(key),), tuple(layers))
    whole = sum(key.shares.values())
    shares = tuple(share / whole for share in key.shares.values())
    return Stage(tuple(key.shares), tuple(layers), shares, sharding=Sharding(key.axis, key.exchange))


def _with_independent(graph: LayerGraph, stages: Iterable[Stage]) -> Iterable[Stage]:
    """The stages, with each one whose layers all depend on no input merged into the next stage, or the last one."""
    waiting: tuple[str, ...] = ()
    last: Stage | None = None
    for stage in stages:
        if all(layer in graph.independent for layer in stage.layers):
            waiting += stage.layers
            continue
        if last is not None:
            yield last
        last, waiting = replace(stage, layers=(*waiting, *stage.layers)), ()
    if last is not None:
        yield replace(last, layers=(*last.layers, *waiting))
