"""Build a planning problem from a model's profile, and convert between stages of pieces and stages of layers.

Two measurements of one machine never give the same times. Without averaging the times of identical machines, sixteen
workers of one host would be sixteen device classes instead of one.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import memory_of
from tvm_split.errors import PlanError
from tvm_split.placement.by_hand import completed, covers, named, why_unknown
from tvm_split.placement.graph import LayerGraph
from tvm_split.placement.problem import Edge, Piece, Pin, Problem, ProblemLink, ProblemMachine, Stage
from tvm_split.placement.profile import Bus, ClusterProfile, LinkProfile, MachineProfile, PieceTime, StreamingCost
from tvm_split.placement.request import PlanRequest
from tvm_split.placement.solution import Solution
from tvm_split.placement.step_graph import lower
from tvm_split.units import known_names

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
    near = {name for shared in profile.shared_cores if CLIENT in shared.machines for name in shared.machines}
    # Only machines that share cores with the client say what transfers cost it there; without any, they cost nothing.
    client_costs = [machine.streaming for machine in profile.machines if machine.machine in near] or [StreamingCost()]
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
        maximum_period_seconds=1.0 / request.minimum_throughput if request.minimum_throughput else math.inf,
        maximum_latency_seconds=request.maximum_latency_seconds or math.inf,
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
        PlanError: a pin names an unknown machine or layer; the message suggests similar names.
    """
    for pairs, what in ((request.pairs("pin"), "pinned to"), (request.pairs("keep_off"), "kept off")):
        for name, machine in pairs:
            demand = f"layer {name!r} is to be {what} machine {machine!r}"
            if machine not in machines:
                raise PlanError(f"{demand}; the cluster has {known_names(machines, machine)}")
            if not any(covers(name, layer) for layer in graph.layers):
                raise PlanError(f"{demand}: that is a layer {why_unknown(graph, name)}")


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
    layers = (tuple(layer for piece in stage.layers for layer in layers_of[piece]) for stage in stages)
    return completed(graph, [replace(stage, layers=own) for stage, own in zip(stages, layers, strict=True)])


def in_layers(graph: LayerGraph, profile: ClusterProfile, problem: Problem, solution: Solution) -> Solution:
    """Return a solution of pieces with stages of layers; its steps know which seconds were not measured."""
    stages = named(solution.stages)
    return replace(
        solution,
        stages=stages_of_layers(graph, profile, stages),
        graph=lower(problem, stages, profile.estimated),  # its steps have the stages' names
        alternatives=tuple(in_layers(graph, profile, problem, other) for other in solution.alternatives),
    )


def whole_layers(stages: Sequence[Stage]) -> bool:
    """Return whether no stage is sharded and no machine has two stages."""
    machines = [machine for stage in stages for machine in stage.machines]
    return len(set(machines)) == len(machines) and not any(stage.sharding for stage in stages)


def stages_of_pieces(profile: ClusterProfile, stages: Sequence[Stage]) -> tuple[Stage, ...] | None:
    """A plan's stages as stages of pieces; None if a stage ends inside a piece, or if they are not `whole_layers`.

    Then the measured seconds of pieces say nothing about them.
    """
    if not whole_layers(stages):
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


MOST_APART = 8
"""Up to this number of machines, each keeps its own measured times."""
NOISE = 0.05
"""Relative difference allowed between the total times of identical machines over all pieces."""
SCATTER = 0.15
"""Allowed sum of the differences of single pieces, which scatter more, as a share of that total."""
LINK_NOISE = 0.25
"""Relative difference allowed between the bandwidths, or the latencies, of identical links."""
LEAST_LATENCY = 2e-5
"""Seconds by which the latencies of identical links may always differ: the variation of waking a thread."""

Item = TypeVar("Item")


def with_identical_averaged(profile: ClusterProfile) -> ClusterProfile:
    """The profile with averaged times of identical machines and links, for many machines or oversubscribed cores.

    It is unchanged for at most `MOST_APART` machines of which none is oversubscribed. With averaged times it makes no
    difference which of the identical machines compute, and a chain is planned exactly. Identical machines have equal
    targets, threads and cores, and free memory and times that differ only by noise; identical links have equal
    transports. Machines get means, links medians.
    """
    oversubscribed = any(profile.oversubscription(machine.machine) > 1 for machine in profile.machines)
    if len(profile.machines) <= MOST_APART and not oversubscribed:
        return profile
    links = {
        (link.source, link.destination): link
        for group in _groups(profile.links, lambda link: link.bytes_per_second, _is_identical_link)
        for link in _averaged_links(group)
    }
    machines = {
        machine.machine: machine
        for group in _groups(profile.machines, _whole_seconds, _is_identical)
        for machine in _averaged(group)
    }
    return replace(
        profile,
        machines=tuple(machines[machine.machine] for machine in profile.machines),
        links=tuple(links[link.source, link.destination] for link in profile.links),
    )


def _groups(
    items: Iterable[Item], size: Callable[[Item], float], is_identical: Callable[[Item, Item], bool]
) -> list[list[Item]]:
    """Groups of items in which every item is identical to the smallest one of its group."""
    groups: list[list[Item]] = []
    for item in sorted(items, key=size):
        group = next((group for group in groups if is_identical(group[0], item)), None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    return groups


def _whole_seconds(machine: MachineProfile) -> float:
    return sum(piece.seconds for piece in machine.pieces.values())


def _is_identical(first: MachineProfile, second: MachineProfile) -> bool:
    if (first.target, first.threads, first.cores) != (second.target, second.threads, second.cores):
        return False
    if not _near(first.memory_free_bytes, second.memory_free_bytes, 2 * NOISE):
        return False
    whole = _whole_seconds(first)
    apart = sum(abs(first.pieces[name].seconds - time.seconds) for name, time in second.pieces.items())
    return _near(whole, _whole_seconds(second), NOISE) and apart <= SCATTER * whole


def _is_identical_link(first: LinkProfile, second: LinkProfile) -> bool:
    return (
        (first.transport, first.origin == "given") == (second.transport, second.origin == "given")
        and _near(first.bytes_per_second, second.bytes_per_second, LINK_NOISE)
        and (
            abs(first.latency_seconds - second.latency_seconds) <= LEAST_LATENCY
            or _near(first.latency_seconds, second.latency_seconds, LINK_NOISE)
        )
    )


def _near(first: float, second: float, share: float) -> bool:
    return first == second or abs(first - second) <= share * min(abs(first), abs(second))


def _averaged(machines: Sequence[MachineProfile]) -> list[MachineProfile]:
    """The machines, each with the mean times of all and the least free memory of any."""
    pieces = {
        name: PieceTime(
            statistics.fmean(machine.pieces[name].seconds for machine in machines),
            statistics.fmean(machine.pieces[name].contended_seconds for machine in machines),
            first.origin,
        )
        for name, first in machines[0].pieces.items()
    }
    streaming = StreamingCost(
        *(
            statistics.fmean(getattr(machine.streaming, field.name) for machine in machines)
            for field in fields(StreamingCost)
        )
    )
    memory = min(machine.memory_free_bytes for machine in machines)
    return [replace(machine, pieces=pieces, streaming=streaming, memory_free_bytes=memory) for machine in machines]


def _averaged_links(links: Sequence[LinkProfile]) -> list[LinkProfile]:
    bandwidth = statistics.median(link.bytes_per_second for link in links)
    latency = statistics.median(link.latency_seconds for link in links)
    return [replace(link, bytes_per_second=bandwidth, latency_seconds=latency) for link in links]
