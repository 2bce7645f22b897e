"""What a set of stages does, exactly: the model that every search in this package optimises."""

from __future__ import annotations

import graphlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.problem import CoresLoad, Evaluation, MachineLoad, Problem, Stage
from tvm_split.planner.search.instance import TOLERANCE, Instance, instance_of, names_of, over_links
from tvm_split.planner.shared_cores import cores_loads, limit_of


@dataclass(frozen=True)
class Placed:
    """A stage by numbers: the pieces in topological order, and the machines that share its micro-batches."""

    machines: tuple[int, ...]
    pieces: tuple[int, ...]


def evaluate(problem: Problem, stages: Sequence[Stage], *, by_shares: bool = False) -> Evaluation:
    """The period, latency and loads of a plan.

    - The period is the largest over machines of compute, receive and send. Compute is the sum of the pieces' seconds,
      times the contention where the plan uses several machines, and for each tensor that comes in or goes out
      ``transfer_seconds + bytes × transfer_seconds_per_byte``. Receive is the sum over sources of bytes / bandwidth,
      send that over destinations; a link's latency does not limit a stream.
    - The latency is the critical path of a single micro-batch: a stage starts when all that it needs has arrived,
      computes all its pieces, then sends; a link takes its latency + all bytes of that pair of stages / bandwidth.
    - Replicas share micro-batches in proportion to their speeds: with tₘ of each alone, the set computes one every
      1 / Σ(1/tₘ). A link to or from a set has the longest latency and the least bandwidth of its members' links, and
      every member is charged all that the stage receives and sends: replicas make computing faster, never a link. The
      latency takes the slowest replica.
    - Of machines that share cores (`Problem.shared_cores`), what they compute together, each on its ``cores``, and what
      sending and receiving take of the client, if it is among them, is at most cores × period.
    - Memory, in every replica: the sum of weights, the largest activation, and ``buffers`` times what crosses.

    With ``by_shares`` replicas have the shares that their stages say, as turns give them, and the slowest one by that
    is the stage's.

    Pins, limits and memory are not checked: an evaluation says what a plan does, whether or not it is wanted.

    Raises:
        PlanError: the problem or a name is wrong, a piece is missing or given twice, a machine holds two stages or has
            no time for a piece, stages wait for each other in a circle, or a link is missing.
    """
    instance = instance_of(problem)
    return measure(instance, placed(instance, stages), shares_given(instance, stages) if by_shares else None)[1]


def shares_given(instance: Instance, stages: Sequence[Stage]) -> dict[int, float]:
    """By machine, those of replicas; machines that there are not have none."""
    return {
        instance.machine_number[machine]: share
        for stage in stages
        if len(stage.machines) > 1
        for machine, share in zip(stage.machines, stage.shares, strict=True)
        if machine in instance.machine_number
    }


def measure(
    instance: Instance, stages: Sequence[Placed], share_of: Mapping[int, float] | None = None
) -> tuple[tuple[Placed, ...], Evaluation]:
    """`evaluate` for stages by numbers, with the stages in the order in which values flow.

    Replicas have shares in proportion to their speeds, or those in ``share_of``, by machine.
    """
    crossings = crossings_of(instance, stages)
    order = _stage_order(instance, stages, crossings)
    stages = tuple(stages[number] for number in order)
    place = {number: place for place, number in enumerate(order)} | {instance.client: instance.client}
    crossings = {(place[source], place[end]): crossing for (source, end), crossing in crossings.items()}
    contended = sum(len(stage.machines) for stage in stages) > 1
    loads: list[MachineLoad] = []
    limits: list[tuple[float, str]] = []
    arriving, leaving = _by_end(crossings)
    for number, stage in enumerate(stages):
        into, outof = arriving.get(number, {}), leaving.get(number, {})
        receive = math.fsum(each.stream_seconds for each in into.values())
        send = math.fsum(each.stream_seconds for each in outof.values())
        received, sent = (math.fsum(each.bytes for each in side.values()) for side in (into, outof))
        count = sum(each.tensors for side in (into, outof) for each in side.values())
        pieces = list(stage.pieces)
        full = _full_seconds(instance, stage, count, received + sent, contended)
        compute, shares = shared(full)
        computes = [
            compute if len(full) > 1 and each > 0 else part * each for each, part in zip(full, shares, strict=True)
        ]
        if share_of and len(stage.machines) > 1:
            shares = tuple(share_of[machine] for machine in stage.machines)
            computes = [part * each for each, part in zip(full, shares, strict=True)]
            compute = max(computes)
        names = names_of([instance.machines[machine] for machine in stage.machines])
        suffix = " together (replicas)" if len(stage.machines) > 1 else ""
        limits += [
            (compute, f"compute of {names}{suffix}"),
            (receive, f"receiving on {names}{_over(instance, stages, into, 'from')}"),
            (send, f"sending on {names}{_over(instance, stages, outof, 'to')}"),
        ]
        for machine, seconds, share in zip(stage.machines, computes, shares, strict=True):
            loads.append(
                MachineLoad(
                    machine=instance.machines[machine],
                    compute_seconds=seconds,
                    receive_seconds=receive,
                    send_seconds=send,
                    weight_bytes=math.fsum(instance.weights[pieces]),
                    activation_bytes=float(instance.activations[pieces].max()),
                    buffer_bytes=instance.problem.buffers * (received + sent),
                    bytes_received=received,
                    bytes_sent=sent,
                    share=share,
                )
            )
    cores: tuple[CoresLoad, ...] = ()
    if instance.problem.shared_cores:
        client = [*arriving.get(instance.client, {}).values(), *leaving.get(instance.client, {}).values()]
        moved = sum(each.tensors for each in client), math.fsum(each.bytes for each in client)
        cores = cores_loads(instance.problem, loads, *moved)
        limits += map(limit_of, cores)
    period = max(value for value, _ in limits)
    limiting = next(text for value, text in limits if value >= period * (1 - TOLERANCE))
    return stages, Evaluation(period, _latency(instance, stages, crossings), tuple(loads), limiting, cores)


@dataclass(frozen=True)
class Crossing:
    """What passes between two stages: tensors and bytes; seconds of a single micro-batch and of a stream of them."""

    tensors: int
    bytes: float
    seconds: float
    stream_seconds: float


Ends = dict[int, Crossing]


def crossings_of(instance: Instance, stages: Sequence[Placed]) -> dict[tuple[int, int], Crossing]:
    """What passes between stages, by their positions; the client's is `Instance.client`.

    Raises:
        PlanError: a link is missing.
    """
    stage_of = {piece: number for number, stage in enumerate(stages) for piece in stage.pieces}
    stage_of[instance.client] = instance.client
    totals: dict[tuple[int, int], list[float]] = {}
    for tensor in instance.tensors:
        source = stage_of[tensor.source]
        for end in dict.fromkeys(stage_of[piece] for piece in tensor.destinations):
            if end != source:
                total = totals.setdefault((source, end), [0, 0.0])
                total[0] += 1
                total[1] += tensor.bytes
    return {
        pair: _crossing(instance, _machines(stages, pair[0]), _machines(stages, pair[1]), int(count), size)
        for pair, (count, size) in totals.items()
    }


def _crossing(
    instance: Instance, sources: Sequence[int], destinations: Sequence[int], count: int, size: float
) -> Crossing:
    pairs = np.ix_(sources, destinations)
    missing = np.argwhere(~instance.linked[pairs])
    if len(missing):
        source, end = sources[missing[0, 0]], destinations[missing[0, 1]]
        raise PlanError(
            f"there is no link from {_name(instance, source)} to {_name(instance, end)}, over which this plan "
            f"sends {size:g} bytes; add the link, or place the stages otherwise"
        )
    stream = size * float(instance.seconds_per_byte[pairs].max())
    return Crossing(count, size, float(instance.latency[pairs].max()) + stream, stream)


def _by_end(crossings: Mapping[tuple[int, int], Crossing]) -> tuple[dict[int, Ends], dict[int, Ends]]:
    """What arrives at each stage, by where it comes from, and what leaves it, by where it goes."""
    into: dict[int, Ends] = {}
    outof: dict[int, Ends] = {}
    for (source, end), crossing in crossings.items():
        into.setdefault(end, {})[source] = crossing
        outof.setdefault(source, {})[end] = crossing
    return into, outof


def _stage_order(
    instance: Instance, stages: Sequence[Placed], crossings: dict[tuple[int, int], Crossing]
) -> tuple[int, ...]:
    graph: dict[int, set[int]] = {number: set() for number in range(len(stages))}
    for source, end in crossings:
        if instance.client not in (source, end):
            graph[end].add(source)
    try:
        return tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        names = [names_of([instance.machines[m] for m in stages[number].machines]) for number in error.args[1]]
        raise PlanError(f"the stages wait for each other in a circle: {' → '.join(reversed(names))}") from error


def shared(seconds: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """The period of replicas that take ``seconds`` each by themselves, and each one's share of the micro-batches."""
    idle = sum(each == 0 for each in seconds)
    if idle:
        return 0.0, tuple((each == 0) / idle for each in seconds)
    rates = [1.0 / each for each in seconds]
    whole = math.fsum(rates)
    return (seconds[0] if len(seconds) == 1 else 1.0 / whole), tuple(rate / whole for rate in rates)


def _full_seconds(instance: Instance, stage: Placed, count: int, size: float, contended: bool) -> list[float]:
    """What each machine of a stage would compute for every micro-batch, with ``count`` tensors of ``size`` bytes."""
    pieces = list(stage.pieces)
    longer = instance.contention if contended else instance.alone_contention
    transfer = instance.transfer_seconds if contended else instance.alone_transfer_seconds
    return [
        math.fsum(instance.times[pieces, machine]) * float(longer[machine])
        + count * float(transfer[machine])
        + size * float(instance.transfer_seconds_per_byte[machine])
        for machine in stage.machines
    ]


def _latency(
    instance: Instance,
    stages: Sequence[Placed],
    crossings: dict[tuple[int, int], Crossing],
) -> float:
    into, _ = _by_end(crossings)
    finish = {instance.client: 0.0}
    for number, stage in enumerate(stages):
        arrivals = [finish[source] + each.seconds for source, each in into.get(number, {}).items()]
        pieces = list(stage.pieces)
        compute = max(math.fsum(instance.times[pieces, machine]) for machine in stage.machines)
        finish[number] = max(arrivals, default=0.0) + compute
    delivered = [finish[source] + each.seconds for source, each in into.get(instance.client, {}).items()]
    return max([*finish.values(), *delivered])


def placed(instance: Instance, stages: Sequence[Stage]) -> list[Placed]:
    """Stages by numbers; raises as `evaluate` does."""
    holder: dict[str, str] = {}
    used: set[str] = set()
    found = []
    for stage in stages:
        if not stage.layers or not stage.machines:
            raise PlanError(f"a stage on {stage.machines or 'no machine'} with {len(stage.layers)} pieces is no stage")
        for machine in stage.machines:
            if machine not in instance.machine_number:
                raise PlanError(f"the plan names machine {machine!r}; there are {', '.join(instance.machines)}")
            if machine in used:
                raise PlanError(
                    f"machine {machine!r} has two stages; it holds one, so join them or use another machine"
                )
            used.add(machine)
        for piece in stage.layers:
            if piece not in instance.piece_number:
                raise PlanError(f"the plan places piece {piece!r}, which the problem does not have")
            if piece in holder:
                raise PlanError(f"piece {piece!r} is placed twice: on {holder[piece]} and on {stage.machines[0]}")
            holder[piece] = stage.machines[0]
            for machine in stage.machines:
                if math.isinf(instance.times[instance.piece_number[piece], instance.machine_number[machine]]):
                    raise PlanError(f"piece {piece!r} has no seconds for machine {machine!r}; it cannot run there")
        found.append(
            Placed(
                tuple(instance.machine_number[machine] for machine in stage.machines),
                tuple(sorted(instance.piece_number[piece] for piece in stage.layers)),
            )
        )
    missing = [piece for piece in instance.pieces if piece not in holder]
    if missing:
        raise PlanError(f"the plan places no piece {missing[0]!r}, which the problem has")
    return found


def _machines(stages: Sequence[Placed], number: int) -> tuple[int, ...]:
    return (Instance.client,) if number == Instance.client else stages[number].machines


def _name(instance: Instance, machine: int) -> str:
    return "the client" if machine == instance.client else instance.machines[machine]


def _over(instance: Instance, stages: Sequence[Placed], ends: dict[int, Crossing], word: str) -> str:
    names = [names_of([_name(instance, each) for each in _machines(stages, number)]) for number in ends]
    return over_links(names, word)
