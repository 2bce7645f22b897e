"""What a plan does whose machines compute stages together: `search.evaluate`, for parts in place of pieces."""

from __future__ import annotations

import math
from collections import defaultdict

from rpc_runtime.program.program import CLIENT
from tvm_split.errors import PlanError
from tvm_split.planner.parts import Delivery, Part, PartPrediction, PlanParts
from tvm_split.planner.problem import Evaluation, MachineLoad, Problem
from tvm_split.planner.search.instance import TOLERANCE, over_links
from tvm_split.planner.shared_cores import cores_loads, limit_of
from tvm_split.planner.timetable import ends_of, timetable
from tvm_split.units import short_list

Crossings = dict[tuple[str, str], list[Delivery]]


def evaluate_parts(problem: Problem, plan: PlanParts) -> Evaluation:
    """The period, latency and loads of a plan; for one without shared stages what `search.evaluate` says of it.

    - The period is the largest over machines of compute, receive and send, each summed over all of a machine's parts:
      with enough micro-batches under way, one is computed while another waits for an exchange. What machines that share
      cores compute together is at most cores × period.
    - The latency is that of the `timetable`.
    - Memory: the weights of all parts, the largest activation, and the problem's ``buffers`` of what crosses.

    Raises:
        PlanError: a machine or a link is missing.
    """
    machines = {machine.name: machine for machine in problem.machines}
    links = {(link.source, link.destination): link for link in problem.links}
    latency = timetable(plan, links).latency_seconds
    own: dict[str, list[Part]] = {}
    for part in plan.parts:
        if part.machine not in machines:
            raise PlanError(f"the plan names machine {part.machine!r}; there are {short_list(list(machines))}")
        own.setdefault(part.machine, []).append(part)
    crossings = crossings_of(plan)
    taken = {each.name: each for each in predicted_parts(problem, plan, crossings)}
    loads: list[MachineLoad] = []
    limits: list[tuple[float, str]] = []
    for name, parts in own.items():
        received = [each for (_, end), crossing in crossings.items() if end == name for each in crossing]
        sent = [each for (source, _), crossing in crossings.items() if source == name for each in crossing]
        into = {ends: _stream_seconds(links[ends].bytes_per_second, crossings[ends]) for ends in crossings}
        receive = math.fsum(seconds for (_, end), seconds in into.items() if end == name)
        send = math.fsum(seconds for (source, _), seconds in into.items() if source == name)
        compute = math.fsum(taken[part.name].compute_seconds for part in parts)
        limits += [
            (compute, f"compute of {name}"),
            (receive, f"receiving on {name}{_over([source for source, end in crossings if end == name], 'from')}"),
            (send, f"sending on {name}{_over([end for source, end in crossings if source == name], 'to')}"),
        ]
        size_received, size_sent = (math.fsum(each.bytes for each in side) for side in (received, sent))
        loads.append(
            MachineLoad(
                machine=name,
                compute_seconds=compute,
                receive_seconds=receive,
                send_seconds=send,
                weight_bytes=math.fsum(part.weight_bytes for part in parts),
                activation_bytes=max(part.activation_bytes for part in parts),
                buffer_bytes=problem.buffers * (size_received + size_sent),
                bytes_received=size_received,
                bytes_sent=size_sent,
                share=1.0,
            )
        )
    client = [each for ends, crossing in crossings.items() if CLIENT in ends for each in crossing]
    cores = cores_loads(problem, loads, len(client), math.fsum(each.bytes for each in client))
    limits += map(limit_of, cores)
    period = max(value for value, _ in limits)
    limiting = next(text for value, text in limits if value >= period * (1 - TOLERANCE))
    return Evaluation(period, latency, tuple(loads), limiting, cores)


def crossings_of(plan: PlanParts) -> Crossings:
    """What crosses from one machine, or the client, to another, by both, in the order of the plan."""
    machine_of = {part.name: part.machine for part in plan.parts}
    found: defaultdict[tuple[str, str], list[Delivery]] = defaultdict(list)
    for delivery in plan.deliveries:
        source, end = ends_of(delivery, machine_of)
        if source != end:
            found[source, end].append(delivery)
    return dict(found)


def predicted_parts(problem: Problem, plan: PlanParts, crossings: Crossings) -> tuple[PartPrediction, ...]:
    """What each part takes of its machine, in the order of the plan, of which ``crossings`` are the `crossings_of`.

    Of a tensor that several parts of a machine take, the first of them has the cost of receiving.
    """
    machines = {machine.name: machine for machine in problem.machines}
    count = len({part.machine for part in plan.parts})
    moved: defaultdict[str, list[Delivery]] = defaultdict(list)
    for crossing in crossings.values():
        for delivery in crossing:
            moved[delivery.source].append(delivery)
            moved[delivery.takers[0] if delivery.takers else CLIENT].append(delivery)
    found = []
    for part in plan.parts:
        machine, own = machines[part.machine], moved[part.name]
        each = machine.transfer_seconds if count > 1 else machine.transfer_seconds_alone
        transfer = len(own) * each + math.fsum(one.bytes for one in own) * machine.transfer_seconds_per_byte
        computing = part.seconds * machine.contention_among(count)
        found.append(
            PartPrediction(part.name, part.stage, part.machine, computing + transfer, part.together_seconds, transfer)
        )
    return tuple(found)


def lack_of_memory(problem: Problem, evaluation: Evaluation) -> float:
    """Bytes by which a plan is over the machines' memory, summed over them."""
    limits = {machine.name: machine.memory_bytes for machine in problem.machines}
    return math.fsum(max(0.0, load.memory_bytes - limits[load.machine]) for load in evaluation.loads)


def _stream_seconds(bytes_per_second: float, crossing: list[Delivery]) -> float:
    return math.fsum(each.bytes for each in crossing) / bytes_per_second


def _over(ends: list[str], word: str) -> str:
    return over_links(["the client" if each == CLIENT else each for each in ends], word)
