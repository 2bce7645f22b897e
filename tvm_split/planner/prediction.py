"""What a plan is expected to do, and how sure that is: prediction, certificate, and what it is compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from rpc_runtime.program.program import CLIENT
from rpc_runtime.program.turns import EVERY, Recurrence, turns_of
from tvm_split.planner.baselines import baseline_stages
from tvm_split.planner.parts import Delivery, PartPrediction
from tvm_split.planner.problem import (
    Amount,
    CoresLoad,
    Evaluation,
    MachineLoad,
    Problem,
    ProblemMachine,
    Solution,
    Stage,
    Timed,
    gap_of,
    objective_seconds,
)
from tvm_split.planner.profile import ClusterProfile, Corrections
from tvm_split.planner.search import evaluate, possible_plans
from tvm_split.planner.search.evaluate import crossings_of, placed
from tvm_split.planner.search.instance import TOLERANCE, instance_of
from tvm_split.units import seconds_text

SLOWEST_STREAM = 1.25
"""What sharing cores with the client and other machines may add to a stream, beside results one by one."""
CODECS_AFTERWARDS = "; codecs for its links were chosen afterwards"


@dataclass(frozen=True)
class MachinePrediction:
    """One machine, per micro-batch, while the pipeline is full; on average, where replicas take turns.

    ``compute_seconds`` includes what sharing a host and serialising cost, the latter being ``transfer_seconds``;
    ``alone_seconds`` is computing by itself, or, of stages that machines share, what it takes of one input alone.
    ``memory_limit_bytes`` is None where nothing limits it. ``estimated_share`` is the share of ``alone_seconds`` that
    was not measured. ``cores`` are those that it computes on.
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
class LinkPrediction:
    """What crosses one link per micro-batch: ``seconds`` for a single one, ``stream_seconds`` when many follow.

    Where replicas take turns, ``bytes`` and ``stream_seconds`` are averages over the stream, and ``seconds`` those of a
    micro-batch that goes this way. ``transport`` is what carried it when it was measured; empty where it was not.
    """

    source: str
    destination: str
    bytes: Amount
    seconds: Amount
    stream_seconds: Amount
    transport: str = ""


@dataclass(frozen=True)
class ComparedPlan:
    """A baseline, or a plan that lost. ``stages`` as (machine, number of layers); ``why`` it is not chosen."""

    name: str
    stages: tuple[tuple[str, int], ...]
    period_seconds: Amount
    latency_seconds: Amount
    why: str = ""


@dataclass(frozen=True)
class Prediction:
    """What is expected of a plan, and its certificate.

    Attributes:
        period_seconds: between two results when many follow each other; throughput is its inverse.
        latency_seconds: of one micro-batch alone.
        bubble: the share of the machines' time in which they wait, once the pipeline is full.
        in_flight: micro-batches under way in a stream: latency / period, rounded up, are as many as the pipeline holds
            when it is full, and one more waits at each machine, so that it need not wait for a late neighbour.
        lower_bound_seconds: no plan has a smaller period (latency, for that objective).
        gap: (value - lower bound) / value; 0 is proven optimal.
        limiting: the machine or link that sets the period.
        method: how the plan was found and proven.
        why_no_more_machines: why idle machines stay idle; empty if none is.
        profiled_at: when the oldest measurement was made, in seconds since 1970.
        baselines: what users would do without a planner, best first; alternatives: the best plans that lost.
        corrections: of the profile, which are in all of these numbers; empty for a plan that no run has improved.
        doubts: what of the measurements contradicts itself, in words.
        shared_cores: those that several machines of the plan, or one and the client, compute on.
        parts: where machines compute stages together, or have several, what each does of every stage.
        deliveries: what passes between these parts, and from and to the client, in bytes without codecs.
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
    parts: tuple[PartPrediction, ...] = ()
    deliveries: tuple[Delivery, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Micro-batches a second."""
        return 1.0 / self.period_seconds if self.period_seconds > 0 else math.inf


def predict(
    problem: Problem,
    profile: ClusterProfile,
    best: Solution,
    stages: Sequence[Stage] | None = None,
) -> Prediction:
    """The prediction of the best plan found, with baselines and alternatives beside it.

    With ``stages`` that of another plan, measured by the best one's lower bound.

    Raises:
        PlanError: the stages do not fit the problem.
    """
    is_best = stages is None or tuple(stages) == best.stages
    stages = best.stages if stages is None else stages
    evaluation = best.evaluation if is_best else evaluate(problem, stages, by_shares=True)
    period, latency = evaluation.period_seconds, evaluation.latency_seconds
    layers_of = {piece.name: len(piece.layers) for piece in profile.pieces}
    links = with_transports(_links(problem, stages), profile)
    return Prediction(
        period_seconds=period,
        latency_seconds=latency,
        bubble=bubble_of(evaluation),
        in_flight=in_flight_of(evaluation),
        lower_bound_seconds=best.lower_bound_seconds,
        gap=gap_of(objective_seconds(problem.objective, evaluation), best.lower_bound_seconds),
        limiting=evaluation.limiting,
        method=best.method if is_best else f"given; the bound is {best.method}",
        why_no_more_machines=best.why_no_more_machines if is_best else "",
        profiled_at=profile.measured_at,
        machines=_machines(problem, profile, stages, evaluation, links),
        links=links,
        baselines=compared_baselines(problem, layers_of, evaluation),
        alternatives=tuple(_compared(each.name, each.stages, layers_of, each, each.why) for each in best.alternatives),
        corrections=profile.corrections,
        doubts=(*profile.doubts, *_contradictions(stages, period, latency)),
        shared_cores=evaluation.shared_cores,
    )


@dataclass(frozen=True)
class CodedLink:
    """What codecs make of a link: its seconds and bytes for a micro-batch of a stream, as shares of those without."""

    seconds: float
    bytes: float


def with_coded_links(
    prediction: Prediction,
    problem: Problem,
    profile: ClusterProfile,
    stages: Sequence[Stage],
    coded: Mapping[tuple[str, str], CodedLink],
) -> Prediction:
    """The prediction of ``stages`` when some links, by (source, destination), have codecs.

    The lower bound and the alternatives are those of plans without codecs, as they were searched.
    """
    faster = coded_problem(problem, coded)
    evaluation = evaluate(faster, stages, by_shares=True)
    period, latency = evaluation.period_seconds, evaluation.latency_seconds
    value = objective_seconds(problem.objective, evaluation)
    bound = min(prediction.lower_bound_seconds, value)
    predicted = with_transports(_links(faster, stages), profile)
    return replace(
        prediction,
        period_seconds=period,
        latency_seconds=latency,
        bubble=bubble_of(evaluation),
        in_flight=in_flight_of(evaluation),
        lower_bound_seconds=bound,
        gap=gap_of(value, bound),
        limiting=evaluation.limiting,
        method=prediction.method + CODECS_AFTERWARDS,
        machines=_machines(faster, profile, stages, evaluation, predicted),
        links=with_coded_bytes(predicted, coded),
        baselines=compared_baselines(problem, {piece.name: len(piece.layers) for piece in profile.pieces}, evaluation),
        shared_cores=evaluation.shared_cores,
    )


def coded_problem(problem: Problem, coded: Mapping[tuple[str, str], CodedLink]) -> Problem:
    """The problem with links as fast as codecs make them."""
    links = tuple(
        replace(link, bytes_per_second=link.bytes_per_second / coded[link.source, link.destination].seconds)
        if (link.source, link.destination) in coded
        else link
        for link in problem.links
    )
    return replace(problem, links=links)


def with_transports(links: Sequence[LinkPrediction], profile: ClusterProfile) -> tuple[LinkPrediction, ...]:
    """The links with what carried them when the profile was made."""
    carried = {(link.source, link.destination): link.transport for link in profile.links}
    return tuple(replace(each, transport=carried.get((each.source, each.destination), "")) for each in links)


def with_coded_bytes(
    links: Sequence[LinkPrediction], coded: Mapping[tuple[str, str], CodedLink]
) -> tuple[LinkPrediction, ...]:
    """The links with the bytes that codecs leave of theirs."""
    return tuple(
        replace(each, bytes=each.bytes * coded[each.source, each.destination].bytes)
        if (each.source, each.destination) in coded
        else each
        for each in links
    )


def bubble_of(evaluation: Evaluation) -> float:
    """The share of the machines' time in which they wait, once the pipeline is full."""
    period, used = evaluation.period_seconds, len(evaluation.loads)
    busy = sum(load.compute_seconds for load in evaluation.loads) / (used * period) if period > 0 else 1.0
    return max(0.0, 1.0 - busy)


def in_flight_of(evaluation: Evaluation) -> int:
    """Micro-batches that keep a pipeline full; see `Prediction.in_flight`."""
    period = evaluation.period_seconds
    return (math.ceil(evaluation.latency_seconds / period) if period > 0 else 1) + len(evaluation.loads)


def _contradictions(stages: Sequence[Stage], period: float, latency: float) -> Iterator[str]:
    """Without replicas, results that wait for each other come every ``latency`` seconds; in a stream not much later."""
    if period > SLOWEST_STREAM * latency and all(len(stage.machines) == 1 for stage in stages):
        yield (
            f"one result every {seconds_text(period)} in a stream, and {seconds_text(latency)} for one alone: "
            "something else ran while machines were measured in company; measure again on quiet machines"
        )


def compared_baselines(problem: Problem, layers_of: Mapping[str, int], plan: Evaluation) -> tuple[ComparedPlan, ...]:
    """The baselines that pins, memory and links allow, best first; other demands may be what they are better by."""
    found = [
        _compared(name, stages, layers_of, value, _why_not(problem, plan, value))
        for name, stages, value in possible_plans(problem, baseline_stages(problem, layers_of))
    ]
    return tuple(sorted(found, key=lambda each: objective_seconds(problem.objective, each)))


def _compared(name: str, stages: Sequence[Stage], layers_of: Mapping[str, int], plan: Timed, why: str) -> ComparedPlan:
    counted = tuple(("+".join(stage.machines), sum(layers_of[piece] for piece in stage.layers)) for stage in stages)
    return ComparedPlan(name, counted, plan.period_seconds, plan.latency_seconds, why)


def _why_not(problem: Problem, plan: Evaluation, other: Evaluation) -> str:
    kind = "period" if problem.objective == "throughput" else "latency"
    ours, theirs = (objective_seconds(problem.objective, each) for each in (plan, other))
    if abs(theirs - ours) <= TOLERANCE * ours:
        return "as good as the plan"
    # A latency without any time, where only sending and receiving take some.
    compared = f"{theirs / ours:.2f} times the plan's" if ours > 0 else f"{seconds_text(theirs)}, the plan's none"
    if theirs < ours:
        return f"its {kind} is {compared}, which keeps to what was demanded"
    limit = f": {other.limiting} limits it" if kind == "period" else ""
    return f"its {kind} is {compared}{limit}"


def _machines(
    problem: Problem,
    profile: ClusterProfile,
    stages: Sequence[Stage],
    evaluation: Evaluation,
    links: Sequence[LinkPrediction],
) -> tuple[MachinePrediction, ...]:
    """What every machine does on average. (The search charges each replica with all that its stage receives.)"""
    profiles = {each.machine: each for each in profile.machines}
    machines = {machine.name: machine for machine in problem.machines}
    share = {name: part for stage in stages for name, part in zip(stage.machines, stage.shares, strict=True)}
    pieces = {name: stage.layers for stage in stages for name in stage.machines}
    found = []
    for load in evaluation.loads:
        times = [profiles[load.machine].pieces[piece] for piece in pieces[load.machine]]
        alone = sum(each.seconds for each in times)
        estimated = sum(each.seconds for each in times if each.origin == "estimated")
        found.append(
            machine_prediction(
                machines[load.machine],
                load,
                len(evaluation.loads),
                computing_seconds=alone * share[load.machine],
                estimated_share=estimated / alone if alone > 0 else 0.0,
                receive_seconds=math.fsum(each.stream_seconds for each in links if each.destination == load.machine),
                send_seconds=math.fsum(each.stream_seconds for each in links if each.source == load.machine),
            )
        )
    return tuple(found)


def machine_prediction(
    machine: ProblemMachine,
    load: MachineLoad,
    machines: int,
    *,
    computing_seconds: float,
    estimated_share: float,
    receive_seconds: float,
    send_seconds: float,
) -> MachinePrediction:
    """Of a machine whose load is that, in a plan of so many; ``computing_seconds`` are without what company costs."""
    return MachinePrediction(
        machine=load.machine,
        compute_seconds=load.compute_seconds,
        alone_seconds=computing_seconds,
        receive_seconds=receive_seconds,
        send_seconds=send_seconds,
        weight_bytes=load.weight_bytes,
        activation_bytes=load.activation_bytes,
        buffer_bytes=load.buffer_bytes,
        memory_limit_bytes=machine.memory_bytes if math.isfinite(machine.memory_bytes) else None,
        estimated_share=estimated_share,
        cores=machine.cores,
        transfer_seconds=max(0.0, load.compute_seconds - computing_seconds * machine.contention_among(machines)),
    )


def _links(problem: Problem, stages: Sequence[Stage]) -> tuple[LinkPrediction, ...]:
    """One for every pair of machines of which one sends to the other; replicas by the turns that they get."""
    given = {(link.source, link.destination): link for link in problem.links}
    instance = instance_of(problem)
    turns = [*map(_turns, stages), [(CLIENT, EVERY)]]  # the client's number is that of the last
    found = []
    for (source, end), crossing in crossings_of(instance, placed(instance, stages)).items():
        senders, receivers = turns[source], turns[end]
        for (one, made), (other, needed) in itertools.product(senders, receivers):
            when, link = made & needed, given[one, other]
            if when is not None:
                seconds = crossing.bytes / link.bytes_per_second
                single = link.latency_seconds + seconds
                found.append(LinkPrediction(one, other, crossing.bytes * when.share, single, seconds * when.share))
    return tuple(found)


def _turns(stage: Stage) -> list[tuple[str, Recurrence]]:
    """Each machine of a stage, and the micro-batches that it computes."""
    return [(machine, turns_of(replica, stage.turns)) for replica, machine in enumerate(stage.machines)]
