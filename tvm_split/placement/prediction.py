"""Predict a plan: seconds of machines, links and steps, a lower bound, and the plans that it is compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from rpc_runtime.program.round_robin import EVERY, Recurrence, micro_batches_of, schedule_by_share
from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import PlanError
from tvm_split.placement.baselines import baseline_stages
from tvm_split.placement.evaluate import CLIENT_SET, Flow, flow_of, memory_shortage, pin_violations
from tvm_split.placement.fallback import Fallback
from tvm_split.placement.problem import (
    Amount,
    CoresLoad,
    MachineLoad,
    Problem,
    Share,
    Stage,
    Timed,
    gap_of,
    objective_seconds,
)
from tvm_split.placement.profile import ClusterProfile, Corrections
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.placement.step_graph import MachineSet, Step, StepGraph, Transfer


@dataclass(frozen=True)
class MachinePrediction:
    """The prediction for one machine, per micro-batch, while the pipeline is full; with replicas, on average.

    ``compute_seconds`` includes contention on a shared host, and ``transfer_seconds``, the time to serialise tensors;
    ``alone_seconds`` is the computing for one input alone. ``memory_limit_bytes`` is None if there is no limit.
    ``estimated_share`` is the share of the computing that was not measured. ``cores`` is the number of cores that the
    machine computes on.
    """

    machine: str
    compute_seconds: Amount
    alone_seconds: Amount
    receive_seconds: Amount
    send_seconds: Amount
    weight_bytes: Amount
    activation_bytes: Amount
    buffer_bytes: Amount
    memory_limit_bytes: Amount | None
    estimated_share: Amount
    transfer_seconds: Amount = 0.0
    cores: Annotated[int, Field(ge=0)] = 1

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes


@dataclass(frozen=True)
class StepPrediction:
    """The seconds of a step on each of its machines for one micro-batch.

    ``compute_seconds`` are those in a stream, with contention and ``transfer_seconds``, the time to serialise tensors;
    ``alone_seconds`` are those of one input alone.
    """

    name: str
    stage: str
    machines: tuple[str, ...]
    shares: tuple[Share, ...]
    compute_seconds: tuple[Amount, ...]
    alone_seconds: tuple[Amount, ...]
    transfer_seconds: tuple[Amount, ...]


@dataclass(frozen=True)
class LinkPrediction:
    """Transfers over one link per micro-batch: ``seconds`` for a single one, ``stream_seconds`` within a stream.

    With replicas, ``bytes`` and ``stream_seconds`` are averages over the stream, and ``seconds`` those of a micro-batch
    that uses this link. ``transport`` is the one with which the link was measured; empty if it was not measured.
    """

    source: str
    destination: str
    bytes: Amount
    seconds: Amount
    stream_seconds: Amount
    transport: str = ""


@dataclass(frozen=True)
class ComparedPlan:
    """A baseline, or an alternative plan. ``stages`` are (machine, number of layers); ``why`` says why it lost."""

    name: str
    stages: tuple[tuple[str, int], ...]
    period_seconds: Amount
    latency_seconds: Amount
    why: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        stages: Sequence[Stage],
        plan: Timed,
        why: str = "",
        layer_counts: Mapping[str, int] = MappingProxyType({}),
    ) -> ComparedPlan:
        """Return ``plan`` for comparison; ``layer_counts`` has each piece's number of layers, for stages of pieces."""
        counted = tuple(
            ("+".join(stage.machines), sum(layer_counts.get(layer, 1) for layer in stage.layers)) for stage in stages
        )
        return cls(name, counted, plan.period_seconds, plan.latency_seconds, why)


@dataclass(frozen=True)
class Prediction:
    """The predicted performance of a plan, with a lower bound and the plans that it was compared with.

    Attributes:
        period_seconds: time between two results of a stream; throughput is its inverse.
        latency_seconds: time of one micro-batch alone.
        bubble: share of the machines' time in which they wait, once the pipeline is full.
        in_flight: micro-batches in flight in a stream: latency / period, rounded up, fill the pipeline, and one more
            waits at each machine, so that no machine waits for a late neighbour.
        lower_bound_seconds: no plan has a smaller period (latency, for that objective).
        gap: optimality gap, (value - lower bound) / value; 0 is proven optimal.
        limiting: the machine, link or cores that set the period.
        method: how the plan and the lower bound were found.
        why_no_more_machines: why idle machines stay idle; empty if none is.
        profiled_at: time of the oldest measurement, in seconds since 1970; profiled_until: that of the last machine or
            link to be measured, 0 if it is not known.
        baselines: plans by simple rules, best first; alternatives: the best plans that were not chosen.
        corrections: corrections of the profile, included in all these numbers; empty if no run has corrected it.
        doubts: messages about measurements that contradict each other.
        shared_cores: cores that several machines of the plan, or one and the client, compute on.
        steps: what machines compute without waiting for each other, in topological order.
        transfers: the tensors that pass between these steps and the client, in bytes without codecs.
        fallbacks: the best moves of stages for the loss of each machine, without codecs, if they were asked for.
    """

    period_seconds: Amount
    latency_seconds: Amount
    bubble: Amount
    in_flight: Annotated[int, Field(ge=1)]
    lower_bound_seconds: Amount
    gap: Amount
    limiting: str
    method: str
    why_no_more_machines: str
    profiled_at: Amount
    machines: tuple[MachinePrediction, ...]
    links: tuple[LinkPrediction, ...]
    baselines: tuple[ComparedPlan, ...] = ()
    alternatives: tuple[ComparedPlan, ...] = ()
    corrections: Corrections = field(default_factory=Corrections)
    doubts: tuple[str, ...] = ()
    shared_cores: tuple[CoresLoad, ...] = ()
    steps: tuple[StepPrediction, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    profiled_until: Amount = 0.0
    fallbacks: tuple[Fallback, ...] = ()

    def __post_init__(self) -> None:
        place = {step.name: number for number, step in enumerate(self.steps)}
        if len(place) < len(self.steps):
            raise ValueError("two steps have the same name")
        machine_names = {machine.machine for machine in self.machines}
        for step in self.steps:
            _check_step(step, machine_names)
        sources: dict[str, str] = {}
        for transfer in self.transfers:
            _check_order(transfer, place)
            if sources.setdefault(transfer.tensor, transfer.source) != transfer.source:
                raise ValueError(f"{transfer.tensor} is made by {sources[transfer.tensor]} and by {transfer.source}")

    @property
    def micro_batches_per_second(self) -> float:
        return 1.0 / self.period_seconds if self.period_seconds > 0 else math.inf


def _check_step(step: StepPrediction, machines: Container[str]) -> None:
    for values in (step.shares, step.compute_seconds, step.alone_seconds, step.transfer_seconds):
        if not step.machines or len(values) != len(step.machines):
            raise ValueError(f"step {step.name!r} has not one value for each of its machines")
    unknown = next((name for name in step.machines if name not in machines), None)
    if unknown is not None:
        raise ValueError(f"nothing is predicted of machine {unknown!r}")


def _check_order(transfer: Transfer, place: Mapping[str, int]) -> None:
    """Raise a `ValueError` unless the targets come after the source; ``place`` has the positions of steps."""
    source = -1 if transfer.source == CLIENT else place.get(transfer.source, len(place))
    targets = [place.get(name, -1) for name in transfer.targets] or [len(place)]
    wrong = next((number for number, target in enumerate(targets) if source >= target), None)
    if wrong is not None:
        name = transfer.targets[wrong] if transfer.targets else CLIENT
        raise ValueError(f"{transfer.tensor} goes from {transfer.source} to {name}, which does not follow it")


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
    links = tuple(_links(used, flow, profile, coded))
    computing = sum(load.compute_seconds for load in evaluation.loads)
    return Prediction(
        period_seconds=period,
        latency_seconds=latency,
        bubble=max(0.0, 1.0 - computing / (len(evaluation.loads) * period)) if period > 0 else 0.0,
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
        links=links,
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


def _links(problem: Problem, flow: Flow, profile: ClusterProfile | None, coded: Coded) -> Iterator[LinkPrediction]:
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
                encoded = coded[source, target].bytes if (source, target) in coded else 1.0
                transport = carried.get((source, target), "")
                sent = size * when.share * encoded
                yield LinkPrediction(source, target, sent, single, seconds * when.share, transport)


def _micro_batches(problem: Problem, machines: MachineSet, shares: Sequence[float]) -> list[tuple[str, Recurrence]]:
    """Return each machine of a set (or the client) with the micro-batches that it computes, as a `Recurrence`."""
    if machines == CLIENT_SET:
        return [(CLIENT, EVERY)]
    schedule = schedule_by_share(shares)
    return [
        (problem.machines[machine].name, micro_batches_of(replica, schedule))
        for replica, machine in enumerate(machines)
    ]
