"""What a plan is expected to do whose machines compute stages together, or have several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm_split.planner.part_evaluation import Crossings, crossings_of, evaluate_parts, predicted_parts
from tvm_split.planner.parts import PlanParts
from tvm_split.planner.prediction import (
    CODECS_AFTERWARDS,
    CodedLink,
    ComparedPlan,
    LinkPrediction,
    MachinePrediction,
    Prediction,
    bubble_of,
    coded_problem,
    compared_baselines,
    in_flight_of,
    machine_prediction,
    with_coded_bytes,
    with_transports,
)
from tvm_split.planner.problem import Evaluation, Problem, gap_of, objective_seconds
from tvm_split.planner.profile import ClusterProfile


@dataclass(frozen=True)
class Certificate:
    """What is known of the best plan: a bound in seconds, by which method, and the plans that lost."""

    lower_bound_seconds: float
    method: str
    why_no_more_machines: str = ""
    alternatives: tuple[ComparedPlan, ...] = ()


def predict_parts(
    problem: Problem,
    profile: ClusterProfile,
    plan: PlanParts,
    certificate: Certificate,
    coded: Mapping[tuple[str, str], CodedLink] | None = None,
) -> Prediction:
    """The prediction of a plan that consists of these parts; with ``coded``, of one whose links have codecs.

    Raises:
        PlanError: a machine or a link is missing.
    """
    used = coded_problem(problem, coded or {})
    evaluation, crossings = evaluate_parts(used, plan), crossings_of(plan)
    value = objective_seconds(problem.objective, evaluation)
    bound = min(certificate.lower_bound_seconds, value)
    links = with_transports(_links(used, crossings), profile)
    layers_of = {piece.name: len(piece.layers) for piece in profile.pieces}
    return Prediction(
        period_seconds=evaluation.period_seconds,
        latency_seconds=evaluation.latency_seconds,
        bubble=bubble_of(evaluation),
        in_flight=in_flight_of(evaluation),
        lower_bound_seconds=bound,
        gap=gap_of(value, bound),
        limiting=evaluation.limiting,
        method=certificate.method + (CODECS_AFTERWARDS if coded else ""),
        why_no_more_machines=certificate.why_no_more_machines,
        profiled_at=profile.measured_at,
        machines=_machines(problem, plan, evaluation),
        links=with_coded_bytes(links, coded or {}),
        baselines=compared_baselines(problem, layers_of, evaluation),
        alternatives=certificate.alternatives,
        corrections=profile.corrections,
        doubts=profile.doubts,
        shared_cores=evaluation.shared_cores,
        parts=predicted_parts(used, plan, crossings),
        deliveries=plan.deliveries,
    )


def _machines(problem: Problem, plan: PlanParts, evaluation: Evaluation) -> tuple[MachinePrediction, ...]:
    machines = {machine.name: machine for machine in problem.machines}
    found = []
    for load in evaluation.loads:
        parts = [part for part in plan.parts if part.machine == load.machine]
        alone = math.fsum(part.seconds for part in parts)
        estimated = math.fsum(part.seconds for part in parts if part.origin == "estimated")
        predicted = machine_prediction(
            machines[load.machine],
            load,
            len(evaluation.loads),
            computing_seconds=alone,
            estimated_share=estimated / alone if alone > 0 else 0.0,
            receive_seconds=load.receive_seconds,
            send_seconds=load.send_seconds,
        )
        found.append(replace(predicted, alone_seconds=math.fsum(part.together_seconds for part in parts)))
    return tuple(found)


def _links(problem: Problem, crossings: Crossings) -> tuple[LinkPrediction, ...]:
    """One for each pair of which one sends to the other; ``seconds`` as if all went at once."""
    links = {(link.source, link.destination): link for link in problem.links}
    found = []
    for ends, crossing in crossings.items():
        size = math.fsum(each.bytes for each in crossing)
        stream = size / links[ends].bytes_per_second
        found.append(LinkPrediction(*ends, size, links[ends].latency_seconds + stream, stream))
    return tuple(found)
