"""From what was measured of a model to the problem that the search solves, and back from its pieces to layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import covers, name_stages
from tvm_split.planner.layer_graph import LayerGraph
from tvm_split.planner.pieces import layers_of_stages
from tvm_split.planner.plan import PlannedReplica, PlannedStage
from tvm_split.planner.problem import (
    Edge,
    Objective,
    Piece,
    Pin,
    Problem,
    ProblemLink,
    ProblemMachine,
    SolvedStage,
)
from tvm_split.planner.profile import ClusterProfile, MachineProfile
from tvm_split.rpc_runtime.program.turns import LONGEST

BUFFERS = 3
"""Micro-batches of a tensor that the runtime may hold between neighbouring stages: `machine_plan.queue_depth`."""


@dataclass(frozen=True)
class Constraints:
    """What a plan must keep to. Layers are given by name or prefix, as in a split.

    ``pins`` keep layers on a machine, ``kept_off`` keep them off machines. The other fields are those of `Problem`.
    """

    stages: int | None = None
    pins: tuple[tuple[str, str], ...] = ()
    kept_off: tuple[tuple[str, str], ...] = ()
    replicas: bool = False
    maximum_machines: int | None = None
    maximum_period_seconds: float = math.inf
    maximum_latency_seconds: float = math.inf


def model_problem(
    profile: ClusterProfile,
    edges: Sequence[Edge],
    memory_limits: Mapping[str, int | None],
    objective: Objective,
    constraints: Constraints,
) -> Problem:
    """The search problem of a profiled model.

    ``memory_limits`` are those the user gave; elsewhere the limit is what was free on the machine.

    Raises:
        PlanError: a pin names a layer or machine that does not exist.
    """
    return Problem(
        objective=objective,
        machines=tuple(_machine(each, memory_limits.get(each.machine)) for each in profile.machines),
        links=_links(profile),
        pieces=tuple(
            Piece(
                piece.name,
                {each.machine: each.pieces[piece.name].seconds for each in profile.machines},
                piece.weight_bytes,
                piece.activation_bytes,
            )
            for piece in profile.pieces
        ),
        edges=tuple(edges),
        replicas=constraints.replicas,
        pins=(*_pins(profile, constraints.pins, False), *_pins(profile, constraints.kept_off, True)),
        maximum_machines=constraints.maximum_machines,
        stages=constraints.stages,
        maximum_period_seconds=constraints.maximum_period_seconds,
        maximum_latency_seconds=constraints.maximum_latency_seconds,
        buffers=BUFFERS,
    )


def corrected(problem: Problem, profile: ClusterProfile) -> Problem:
    """The same problem with the times and links of another profile of the same pieces and machines."""
    seconds = {each.machine: each.pieces for each in profile.machines}
    return dataclasses.replace(
        problem,
        pieces=tuple(
            dataclasses.replace(piece, seconds={name: seconds[name][piece.name].seconds for name in piece.seconds})
            for piece in problem.pieces
        ),
        links=_links(profile),
    )


def _links(profile: ClusterProfile) -> tuple[ProblemLink, ...]:
    return tuple(
        ProblemLink(link.source, link.destination, link.bytes_per_second, link.latency_seconds)
        for link in profile.links
    )


def _machine(machine: MachineProfile, limit: int | None) -> ProblemMachine:
    streaming = machine.streaming
    alone = sum(each.seconds for each in machine.pieces.values())
    contended = sum(each.contended_seconds for each in machine.pieces.values())
    slower = max(1.0, contended / alone) if alone > 0 else 1.0
    return ProblemMachine(
        name=machine.machine,
        memory_bytes=limit if limit is not None else machine.memory_free_bytes,
        transfer_seconds=streaming.transfer_seconds,
        transfer_seconds_per_byte=streaming.transfer_seconds_per_byte,
        # What was measured of streams has contention in it, but that of a stage which lies in a core's cache.
        contention=max(slower * streaming.alone_ratio, streaming.ratio),
        alone_transfer_seconds=streaming.alone_transfer_seconds,
        alone_contention=streaming.alone_ratio,
    )


def _pins(profile: ClusterProfile, wanted: Sequence[tuple[str, str]], forbidden: bool) -> list[Pin]:
    machines = [each.machine for each in profile.machines]
    found = []
    for name, machine in wanted:
        if machine not in machines:
            raise PlanError(f"layer {name!r} is pinned to machine {machine!r}; the cluster has {', '.join(machines)}")
        pieces = [piece.name for piece in profile.pieces if any(covers(name, layer) for layer in piece.layers)]
        if not pieces:
            raise PlanError(
                f"layer {name!r} is pinned, and the model has none of that name or prefix "
                "(`tvm-split plan MODEL --layers` lists all)"
            )
        found += [Pin(piece, machine, forbidden) for piece in pieces]
    return found


def planned_stages(
    graph: LayerGraph, profile: ClusterProfile, stages: Sequence[SolvedStage]
) -> tuple[PlannedStage, ...]:
    """The solved stages as layers, each with the layers without inputs that stand around them."""
    layers_of = {piece.name: piece.layers for piece in profile.pieces}
    completed = layers_of_stages(graph, layers_of, [stage.pieces for stage in stages])
    named = name_stages([(stage.machines[0], group) for stage, group in zip(stages, completed, strict=True)])
    return tuple(
        dataclasses.replace(each, replicas=_replicas(stage)) for each, stage in zip(named, stages, strict=True)
    )


def _replicas(stage: SolvedStage) -> tuple[PlannedReplica, ...]:
    if len(stage.machines) == 1:
        return ()
    return tuple(map(PlannedReplica, stage.machines, stage.shares))


def with_turns(stages: Sequence[SolvedStage]) -> tuple[SolvedStage, ...]:
    """The stages without replicas whose share is less than the shortest turn, which nobody can deal."""
    return tuple(map(_with_turns, stages))


def _with_turns(stage: SolvedStage) -> SolvedStage:
    kept = [each for each in zip(stage.machines, stage.shares, strict=True) if each[1] * LONGEST >= 1 - 1e-9]
    if len(kept) == len(stage.machines):
        return stage
    machines, shares = zip(*kept, strict=True)
    return SolvedStage(machines, stage.pieces, tuple(share / math.fsum(shares) for share in shares))


def solved_stages(profile: ClusterProfile, stages: Sequence[PlannedStage]) -> tuple[SolvedStage, ...] | None:
    """The pieces of planned stages; None if a stage boundary goes through a piece, whose parts were not measured."""
    stage_of = {layer: index for index, stage in enumerate(stages) for layer in stage.layers}
    pieces: list[list[str]] = [[] for _ in stages]
    for piece in profile.pieces:
        where = {stage_of.get(layer) for layer in piece.layers}
        if len(where) != 1 or None in where:
            return None
        pieces[where.pop() or 0].append(piece.name)
    return tuple(
        SolvedStage(stage.machines, tuple(held), _shares(stage))
        for stage, held in zip(stages, pieces, strict=True)
        if held
    )


def _shares(stage: PlannedStage) -> tuple[float, ...]:
    whole = sum(each.share for each in stage.replicas)
    return tuple(each.share / whole for each in stage.replicas) or (1.0,)
