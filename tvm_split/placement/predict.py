"""Predict a plan: evaluate its steps and transfers, and compare it with simpler plans."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rpc_runtime.program.round_robin import EVERY, Recurrence, micro_batches_of, schedule_by_share
from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import PlanError
from tvm_split.placement.baselines import baseline_stages
from tvm_split.placement.evaluate import CLIENT_SET, Flow, flow_of, memory_shortage, pin_violations
from tvm_split.placement.prediction import ComparedPlan, LinkPrediction, MachinePrediction, Prediction, StepPrediction
from tvm_split.placement.problem import (
    Evaluation,
    MachineLoad,
    Problem,
    gap_of,
    objective_seconds,
)
from tvm_split.placement.profile import ClusterProfile, Corrections
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.placement.step_graph import MachineSet, Step, StepGraph

CODECS_AFTERWARDS = "; codecs for its links were chosen afterwards"


@dataclass(frozen=True)
class CodedLink:
    """Seconds and bytes of a link with codecs, for a micro-batch of a stream, as shares of those without codecs."""

    seconds: float
    bytes: float


Coded = Mapping[tuple[str, str], CodedLink]
"""The links that have codecs, by source and destination."""


def predict(
    problem: Problem, solution: Solution, profile: ClusterProfile | None = None, coded: Coded | None = None
) -> Prediction:
    """Return the prediction of a solution. Without a ``profile`` it has no baselines.

    ``coded`` has the plan's links with codecs. The lower bound and the alternatives are those of plans without codecs.

    Raises:
        PlanError: a machine or a link is missing, or steps wait for each other in a cycle.
    """
    coded, graph = coded or {}, solution.graph
    used = _coded_problem(problem, coded) if coded else problem
    flow = flow_of(used, graph)
    evaluation = flow.evaluation
    period, latency = evaluation.period_seconds, evaluation.latency_seconds
    value = objective_seconds(problem.objective, evaluation)
    bound = min(solution.lower_bound_seconds, value)
    links = tuple(_links(used, flow, profile))
    return Prediction(
        period_seconds=period,
        latency_seconds=latency,
        bubble=_bubble(evaluation),
        in_flight=(math.ceil(latency / period) if period > 0 else 1) + len(evaluation.loads),
        lower_bound_seconds=bound,
        gap=gap_of(value, bound),
        limiting=evaluation.limiting,
        method=solution.method + (CODECS_AFTERWARDS if coded else ""),
        why_no_more_machines=solution.why_no_more_machines,
        profiled_at=profile.measured_at if profile else 0.0,
        machines=tuple(
            _machine(used, number, load, graph, flow, links)
            for number, load in zip(flow.machines, evaluation.loads, strict=True)
        ),
        links=tuple(_with_coded_bytes(link, coded) for link in links),
        baselines=_baselines(problem, profile.layer_counts) if profile else (),
        alternatives=tuple(
            ComparedPlan.of(other.name, other.stages, other, other.why) for other in solution.alternatives
        ),
        corrections=profile.corrections if profile else Corrections(),
        doubts=profile.doubts if profile else (),
        shared_cores=evaluation.shared_cores,
        steps=tuple(_step(step, place, flow) for place, step in enumerate(graph.steps)),
        transfers=graph.transfers,
        profiled_until=max(profile.moments, default=0.0) if profile else 0.0,
    )


def _coded_problem(problem: Problem, coded: Coded) -> Problem:
    """The problem with the effective bandwidths of links that have codecs."""
    links = tuple(
        replace(link, bytes_per_second=link.bytes_per_second / coded[link.source, link.destination].seconds)
        if (link.source, link.destination) in coded
        else link
        for link in problem.links
    )
    return replace(problem, links=links)


def _with_coded_bytes(link: LinkPrediction, coded: Coded) -> LinkPrediction:
    codec = coded.get((link.source, link.destination))
    return link if codec is None else replace(link, bytes=link.bytes * codec.bytes)


def _bubble(evaluation: Evaluation) -> float:
    """The share of the machines' time in which they wait, once the pipeline is full."""
    period, used = evaluation.period_seconds, len(evaluation.loads)
    busy = sum(load.compute_seconds for load in evaluation.loads) / (used * period) if period > 0 else 1.0
    return max(0.0, 1.0 - busy)


def _baselines(problem: Problem, layers_of: Mapping[str, int]) -> tuple[ComparedPlan, ...]:
    """The baselines that pins, memory and links allow, best first. They may break other demands of the problem."""
    baselines = []
    for name, stages in baseline_stages(problem, layers_of).items():
        try:
            solution = solution_of(problem, stages)
        except PlanError:
            continue  # there is no link, or a machine cannot run a piece
        if memory_shortage(problem, solution.evaluation) == 0 and not any(pin_violations(problem, stages)):
            why = f"{solution.evaluation.limiting} limits it"
            baselines.append(ComparedPlan.of(name, stages, solution, why, layers_of))
    return tuple(sorted(baselines, key=lambda baseline: objective_seconds(problem.objective, baseline)))


def _step(step: Step, place: int, flow: Flow) -> StepPrediction:
    numbers = flow.steps[place].machines
    return StepPrediction(
        step.name,
        step.stage,
        step.machines,
        tuple(flow.shares[place]),
        tuple(flow.full_seconds[place]),
        step.contended_seconds,
        tuple(flow.transfer_seconds(place, machine) for machine in numbers),
    )


def _machine(
    problem: Problem, number: int, load: MachineLoad, graph: StepGraph, flow: Flow, links: Sequence[LinkPrediction]
) -> MachinePrediction:
    """Return the prediction for a machine, averaged over micro-batches; the times of its transfers are from ``links``.

    An `Evaluation` does not have these averages: it charges each replica all that its stage receives and sends.
    """
    machine, computing, alone, estimated, transfer = problem.machines[number], 0.0, 0.0, 0.0, 0.0
    for place, step in enumerate(graph.steps):
        if load.machine in step.machines:
            at = step.machines.index(load.machine)
            share = flow.shares[place][at]
            computing += share * step.seconds[at]
            alone += share * step.contended_seconds[at]
            estimated += share * step.seconds[at] * step.estimated_shares[at]
            transfer += share * flow.transfer_seconds(place, number)
    return MachinePrediction(
        machine=load.machine,
        compute_seconds=load.compute_seconds,
        alone_seconds=alone,
        receive_seconds=math.fsum(link.stream_seconds for link in links if link.destination == load.machine),
        send_seconds=math.fsum(link.stream_seconds for link in links if link.source == load.machine),
        weight_bytes=load.weight_bytes,
        activation_bytes=load.activation_bytes,
        buffer_bytes=load.buffer_bytes,
        memory_limit_bytes=machine.memory_bytes if math.isfinite(machine.memory_bytes) else None,
        estimated_share=estimated / computing if computing > 0 else 0.0,
        transfer_seconds=transfer,
        cores=machine.cores,
    )


def _links(problem: Problem, flow: Flow, profile: ClusterProfile | None) -> Iterator[LinkPrediction]:
    """One prediction for each pair of machines that transfer; for replicas it follows their round-robin schedules."""
    carried = {(link.source, link.destination): link.transport for link in profile.links} if profile else {}
    shares = {step.machines: shares for step, shares in zip(flow.steps, flow.shares, strict=True)}
    for (sources, targets), size in flow.sent_bytes.items():
        senders, receivers = (
            _micro_batches(problem, machines, shares.get(machines, (1.0,))) for machines in (sources, targets)
        )
        for (source, produced), (target, needed) in itertools.product(senders, receivers):
            when = produced & needed
            if when is not None and source != target:
                link = problem.link_of[source, target]
                seconds = size / link.bytes_per_second
                single = link.latency_seconds + seconds
                transport = carried.get((source, target), "")
                yield LinkPrediction(source, target, size * when.share, single, seconds * when.share, transport)


def _micro_batches(problem: Problem, machines: MachineSet, shares: Sequence[float]) -> list[tuple[str, Recurrence]]:
    """Return each machine of a set (or the client) with the micro-batches that it computes, as a `Recurrence`."""
    if machines == CLIENT_SET:
        return [(CLIENT, EVERY)]
    schedule = schedule_by_share(shares)
    return [
        (problem.machines[machine].name, micro_batches_of(replica, schedule))
        for replica, machine in enumerate(machines)
    ]
