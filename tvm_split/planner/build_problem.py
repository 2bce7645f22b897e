"""Build a planning problem from a model's profile, and convert between stages of pieces and stages of layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import memory_of
from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import covers, named, near_names, with_independent_layers
from tvm_split.planner.graph import LayerGraph
from tvm_split.planner.problem import Edge, Piece, Pin, Problem, ProblemLink, ProblemMachine, Stage
from tvm_split.planner.profile import Bus, ClusterProfile, LinkProfile, MachineProfile, StreamingCost
from tvm_split.planner.request import PlanRequest
from tvm_split.units import short_list

BUFFERS = 3
"""Micro-batches of a tensor that the runtime may buffer between neighbouring stages: `routes.queue_depth`."""


def model_problem(
    profile: ClusterProfile, edges: Sequence[Edge], memory_limits: Mapping[str, int | None], request: PlanRequest
) -> Problem:
    """The search problem of a profiled model.

    ``memory_limits`` are the user's, in bytes; where one is None, the limit is the memory that was free on the machine.

    Raises:
        PlanError: a pin names a layer or machine that does not exist.
    """
    client_costs = _beside_client(profile)
    buses = {machine.machine: machine.bus for machine in profile.machines if machine.bus is not None}
    return Problem(
        objective=request.objective,
        machines=tuple(_machine(machine, memory_limits.get(machine.machine)) for machine in profile.machines),
        links=tuple(_link(link, buses) for link in profile.links),
        pieces=tuple(
            Piece(
                piece.name,
                {machine.machine: machine.pieces[piece.name].seconds for machine in profile.machines},
                piece.weight_bytes,
                piece.activation_bytes,
            )
            for piece in profile.pieces
        ),
        edges=tuple(edges),
        replicas=request.replicas,
        pins=(*_pins(profile, request.pairs("pin"), False), *_pins(profile, request.pairs("keep_off"), True)),
        maximum_machines=request.maximum_machines,
        stages=request.stages,
        maximum_period_seconds=request.maximum_period_seconds,
        maximum_latency_seconds=request.latency_limit_seconds,
        buffers=BUFFERS,
        shared_cores=profile.shared_cores,
        client_transfer_seconds=statistics.fmean(cost.client_transfer_seconds for cost in client_costs),
        client_transfer_seconds_per_byte=statistics.fmean(
            cost.client_transfer_seconds_per_byte for cost in client_costs
        ),
    )


def _link(link: LinkProfile, buses: Mapping[str, Bus]) -> ProblemLink:
    """A link combined with the GPU buses at its ends, in series: a tensor is sent after it was copied from the device.

    A transport from GPU to GPU uses neither bus: its link was measured from GPU to GPU. The destination uploads a
    tensor while it receives the next one, so a stream may be faster than this.
    """
    ends = () if memory_of(link.transport) == "device" else (link.source, link.destination)
    passed = [buses[end] for end in ends if end in buses]
    bytes_per_second = link.bytes_per_second
    latency_seconds = link.latency_seconds
    for bus in passed:
        bytes_per_second = 1 / (1 / bytes_per_second + 1 / bus.bytes_per_second)
        latency_seconds += bus.latency_seconds
    return ProblemLink(link.source, link.destination, bytes_per_second, latency_seconds)


def _beside_client(profile: ClusterProfile) -> list[StreamingCost]:
    """Streaming costs of the machines that share cores with the client."""
    near = {name for shared in profile.shared_cores if CLIENT in shared.machines for name in shared.machines}
    return [machine.streaming for machine in profile.machines if machine.machine in near] or [StreamingCost()]


def _machine(machine: MachineProfile, limit: int | None) -> ProblemMachine:
    streaming = machine.streaming
    alone = sum(piece.seconds for piece in machine.pieces.values())
    contended = sum(piece.contended_seconds for piece in machine.pieces.values())
    slower = max(1.0, contended / alone) if alone > 0 else 1.0
    return ProblemMachine(
        name=machine.machine,
        memory_bytes=limit if limit is not None else machine.memory_free_bytes,
        transfer_seconds=streaming.transfer_seconds,
        transfer_seconds_per_byte=streaming.transfer_seconds_per_byte,
        contention=slower,
        cores=machine.cores,
    )


def require_known_pins(graph: LayerGraph, request: PlanRequest, machines: Sequence[str]) -> None:
    """Check, before anything is measured, that pins name machines of the cluster and layers of the model.

    Raises:
        PlanError: a pin does not; the message names similar layers.
    """
    for pairs, what in ((request.pairs("pin"), "pinned to"), (request.pairs("keep_off"), "kept off")):
        for name, machine in pairs:
            demand = f"layer {name!r} is to be {what} machine {machine!r}"
            if machine not in machines:
                raise PlanError(f"{demand}; the cluster has {short_list(machines)}")
            if not any(covers(name, layer) for layer in graph.layers):
                raise PlanError(f"{demand}, and the model has none of that name or prefix; {near_names(graph, name)}")


def _pins(profile: ClusterProfile, pairs: Iterable[tuple[str, str]], forbidden: bool) -> list[Pin]:
    pins = []
    for name, machine in pairs:
        pieces = [piece.name for piece in profile.pieces if any(covers(name, layer) for layer in piece.layers)]
        if not pieces:
            raise PlanError(
                f"layer {name!r} is to be {'kept off' if forbidden else 'pinned to'} {machine!r}, and takes no time "
                "of its own: it goes with the layers beside it"
            )
        pins += [Pin(piece, **{"not_on" if forbidden else "on": machine}) for piece in pieces]
    return pins


def stages_of_layers(graph: LayerGraph, profile: ClusterProfile, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """A solution's stages with layers in place of pieces, including nearby layers that depend on no input."""
    layers_of = {piece.name: piece.layers for piece in profile.pieces}
    groups = [[layer for piece in stage.layers for layer in layers_of[piece]] for stage in stages]
    completed = with_independent_layers(graph, groups)
    return named(replace(stage, layers=tuple(group)) for stage, group in zip(stages, completed, strict=True))


def stages_of_pieces(profile: ClusterProfile, stages: Sequence[Stage]) -> tuple[Stage, ...] | None:
    """A plan's stages as stages of pieces; None if a stage ends inside a piece, or if a stage is sharded.

    In both cases parts of a piece are computed, and these were not measured.
    """
    if any(stage.sharding for stage in stages):
        return None
    stage_of = {layer: index for index, stage in enumerate(stages) for layer in stage.layers}
    pieces: list[list[str]] = [[] for _ in stages]
    for piece in profile.pieces:
        where = {stage_of.get(layer) for layer in piece.layers}
        if len(where) != 1 or None in where:
            return None
        pieces[where.pop() or 0].append(piece.name)
    return tuple(
        Stage(stage.machines, tuple(held), tuple(share / math.fsum(stage.shares) for share in stage.shares))
        for stage, held in zip(stages, pieces, strict=True)
        if held
    )
