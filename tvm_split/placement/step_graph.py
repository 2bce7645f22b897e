"""Steps and transfers: the work of a plan's machines for one micro-batch. Names and numbers only.

A step is what a machine computes without waiting for another machine in between: a stage of whole layers, or the part
of a sharded stage that one machine computes between two exchanges. A timetable says when each step computes for one
input alone.
"""

import graphlib
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import PlanError
from tvm_split.placement.problem import Amount, Piece, Problem, Stage
from tvm_split.units import known_names, names_of


@dataclass(frozen=True)
class Step:
    """The computation of one machine, or of each of several replicas for its own micro-batches.

    For each machine: ``shares`` of the micro-batches (if empty, they follow from the speeds), ``seconds`` of one
    micro-batch alone, ``contended_seconds`` while others of the same host compute the same stage, and
    ``estimated_shares``, the shares of the seconds that were not measured.
    """

    name: str
    stage: str
    machines: tuple[str, ...]
    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    contended_seconds: tuple[float, ...]
    estimated_shares: tuple[float, ...]
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """A tensor sent from a step, or ``"client"``, to steps that run on one machine or one set of replicas.

    Without targets it goes to the client. Between steps of one machine no link is used, but the target waits for the
    source.
    """

    tensor: str
    source: str
    targets: tuple[str, ...]
    bytes: Amount


@dataclass(frozen=True)
class StepGraph:
    """All steps of a plan in topological order, and all transfers between them."""

    steps: tuple[Step, ...]
    transfers: tuple[Transfer, ...]


def lower(problem: Problem, stages: Sequence[Stage], estimated: Container[tuple[str, str]] = frozenset()) -> StepGraph:
    """The steps of stages of whole layers, one for each stage, in topological order.

    A step has the name of its stage; if that is empty, ``stage_0`` and so on. ``estimated`` are pairs of a piece and a
    machine whose seconds were not measured.

    Raises:
        PlanError: a name is wrong, a piece is missing or placed twice, a machine holds two stages or has no seconds for
            a piece, or stages wait for each other in a cycle.
    """
    pieces = {piece.name: piece for piece in problem.pieces}
    stage_of = _stage_of(problem, pieces, stages)
    sent = list(_sent(problem, stage_of))
    edges = [(source, end) for _, source, end, _ in sent]
    order = topological_order(len(stages), edges, lambda number: stages[number].machines)
    names = {number: stages[number].name or f"stage_{place}" for place, number in enumerate(order)} | {None: CLIENT}
    return StepGraph(
        tuple(
            _step(names[number], stages[number], [pieces[name] for name in stages[number].layers], estimated)
            for number in order
        ),
        tuple(
            Transfer(tensor, names[source], () if end is None else (names[end],), size)
            for tensor, source, end, size in sent
        ),
    )


def _step(name: str, stage: Stage, pieces: Sequence[Piece], estimated: Container[tuple[str, str]]) -> Step:
    seconds = tuple(math.fsum(piece.seconds[machine] for piece in pieces) for machine in stage.machines)
    unmeasured = (
        math.fsum(piece.seconds[machine] for piece in pieces if (piece.name, machine) in estimated)
        for machine in stage.machines
    )
    return Step(
        name,
        name,
        stage.machines,
        stage.shares,
        seconds,
        seconds,
        tuple(part / whole if whole > 0 else 0.0 for part, whole in zip(unmeasured, seconds, strict=True)),
        math.fsum(piece.weight_bytes for piece in pieces),
        max(piece.activation_bytes for piece in pieces),
    )


def _stage_of(problem: Problem, pieces: dict[str, Piece], stages: Sequence[Stage]) -> dict[str, int]:
    """The position of the stage that holds each piece; errors as of `lower`."""
    machines = {machine.name for machine in problem.machines}
    used: set[str] = set()
    stage_of: dict[str, int] = {}
    for number, stage in enumerate(stages):
        if not stage.layers or not stage.machines:
            raise PlanError(f"a stage on {stage.machines or 'no machine'} with {len(stage.layers)} pieces is no stage")
        if stage.shares and len(stage.shares) != len(stage.machines):
            raise PlanError(f"a stage has {len(stage.machines)} machines and {len(stage.shares)} shares; give one each")
        for machine in stage.machines:
            if machine not in machines:
                names = known_names([machine.name for machine in problem.machines], machine)
                raise PlanError(f"the plan names machine {machine!r}; there are {names}")
            if machine in used:
                raise PlanError(
                    f"machine {machine!r} has two stages; it holds one, so join them or use another machine"
                )
            used.add(machine)
        for name in stage.layers:
            if name not in pieces:
                raise PlanError(f"the plan places piece {name!r}, which the problem does not have")
            if name in stage_of:
                where = stages[stage_of[name]].machine
                raise PlanError(f"piece {name!r} is placed twice: on {where} and on {stage.machine}")
            stage_of[name] = number
            for machine in stage.machines:
                if machine not in pieces[name].seconds:
                    raise PlanError(f"piece {name!r} has no seconds for machine {machine!r}; it cannot run there")
    missing = next((name for name in pieces if name not in stage_of), None)
    if missing is not None:
        raise PlanError(f"the plan places no piece {missing!r}, which the problem has")
    return stage_of


def _sent(problem: Problem, stage_of: dict[str, int]) -> Iterator[tuple[str, int | None, int | None, float]]:
    """The transfers between stages, once to each stage: tensor, source, end (None is the client) and bytes."""
    sent: dict[tuple[str, str | int, int | None], None] = {}
    names: dict[str, tuple[str, str | int]] = {}
    for index, edge in enumerate(problem.edges):
        source, end = stage_of.get(edge.source), stage_of.get(edge.destination)
        key = edge.source, index if edge.tensor is None else edge.tensor
        if source == end or (*key, end) in sent:
            continue
        sent[*key, end] = None
        name = edge.tensor or f"{edge.source} to {edge.destination}"
        while names.setdefault(name, key) != key:  # tensors of several pieces may have the same name
            name += f" of {edge.source}"
        yield name, source, end, edge.bytes


def topological_order(
    count: int, edges: Iterable[tuple[int | None, int | None]], machines_of: Callable[[int], Sequence[str]]
) -> list[int]:
    """The numbers of stages in topological order, from edges between them; other ends, such as the client, are ignored.

    Raises:
        PlanError: stages wait for each other in a cycle; names their machines by ``machines_of``.
    """
    before: dict[int, set[int]] = {number: set() for number in range(count)}
    for source, end in edges:
        if source in before and end in before:
            before[end].add(source)
    try:
        return list(graphlib.TopologicalSorter(before).static_order())
    except graphlib.CycleError as error:
        names = [names_of(machines_of(number)) for number in reversed(error.args[1])]
        raise PlanError(f"the stages wait for each other in a cycle: {' → '.join(names)}") from error


CLIENT_NUMBER = -1

MachineSet = tuple[int, ...]
"""Machines as numbers: all replicas of a step, or `CLIENT_NUMBER` alone for the client."""


class NumberedTransfer(NamedTuple):
    """A `Transfer` with steps as positions; the client is `CLIENT_NUMBER` as a source, and has no entry as a target."""

    source: int
    targets: tuple[int, ...]
    bytes: float


class Timetable(NamedTuple):
    """The seconds from the input to the start of each step (None if it never starts), and to the last result."""

    starts: list[float | None]
    latency_seconds: float


def timetable(
    placements: Sequence[MachineSet],
    seconds: Sequence[float],
    transfers: Sequence[NumberedTransfer],
    link: Callable[[MachineSet, MachineSet], tuple[float, float]],
) -> Timetable:
    """The timetable of one input, by an event simulation.

    A machine computes one step at a time: of the steps that could begin, the last in the plan's order, as in the
    runtime (`rpc_runtime.execution.scheduler`). A link sends one tensor at a time, in the order in which they are
    produced; each arrives after the link's latency. Links work in parallel with each other and with computing.

    Args:
        placements, seconds: the machines of each step, and the seconds that it computes.
        link: returns latency in seconds and seconds per byte of the link between two placements.
    """
    placements = [*placements, (CLIENT_NUMBER,)]
    made_by: defaultdict[int, list[NumberedTransfer]] = defaultdict(list)
    lacking = [0] * len(seconds)
    for transfer in transfers:
        made_by[transfer.source].append(transfer)
        for target in transfer.targets:
            lacking[target] += 1
    ready: defaultdict[MachineSet, list[int]] = defaultdict(list)
    for step, count in enumerate(lacking):
        if not count:
            ready[placements[step]].append(step)
    starts: list[float | None] = [None] * len(seconds)
    busy: set[int] = set()
    link_free: dict[tuple[MachineSet, MachineSet], float] = {}
    # Time, a number that keeps the order of simultaneous events, and the step that ends or the tensor that arrives.
    events: list[tuple[float, int, int | NumberedTransfer]] = []
    numbers = itertools.count()

    def send(source: int) -> None:
        for transfer in made_by[source]:
            ends = placements[source], placements[transfer.targets[0] if transfer.targets else CLIENT_NUMBER]
            arrival = now
            if ends[0] != ends[1]:
                latency, seconds_per_byte = link(*ends)
                link_free[ends] = max(now, link_free.get(ends, 0.0)) + transfer.bytes * seconds_per_byte
                arrival = link_free[ends] + latency
            heapq.heappush(events, (arrival, next(numbers), transfer))

    def finish(event: int | NumberedTransfer) -> None:
        if isinstance(event, int):
            busy.difference_update(placements[event])
            send(event)
            return
        for target in event.targets:
            lacking[target] -= 1
            if not lacking[target]:
                ready[placements[target]].append(target)

    def begin() -> None:
        for placement, steps in list(ready.items()):
            if busy.isdisjoint(placement):
                step = max(steps)
                steps.remove(step)
                if not steps:
                    del ready[placement]
                busy.update(placement)
                starts[step] = now
                heapq.heappush(events, (now + seconds[step], next(numbers), step))

    now = 0.0
    send(CLIENT_NUMBER)
    begin()
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            finish(heapq.heappop(events)[2])
        begin()
    return Timetable(starts, now)
