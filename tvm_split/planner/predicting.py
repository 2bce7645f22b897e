"""What is expected of a plan, from the numbers it was found with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from tvm_split.errors import PlanError
from tvm_split.planner.baselines import baseline_stages
from tvm_split.planner.demands import TOLERANCE, is_possible
from tvm_split.planner.prediction import ComparedPlan, Corrections, LinkPrediction, MachinePrediction, Prediction
from tvm_split.planner.problem import Evaluation, Problem, Solution, SolvedStage, gap_of, objective_seconds
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.search.evaluate import evaluate, transfers
from tvm_split.rpc_runtime.program.program import CLIENT
from tvm_split.rpc_runtime.program.turns import EVERY, Recurrence, common, deal, turns_of
from tvm_split.units import seconds_text

NONE = Corrections()


def predict(
    problem: Problem,
    profile: ClusterProfile,
    best: Solution,
    stages: Sequence[SolvedStage] | None = None,
    corrections: Corrections = NONE,
) -> Prediction:
    """The prediction of the best plan found, with baselines and alternatives beside it.

    With ``stages`` that of another plan, measured by the best one's lower bound. ``corrections`` are those that are in
    the numbers already.

    Raises:
        PlanError: the stages do not fit the problem.
    """
    evaluation = best.evaluation if stages is None else evaluate(problem, stages)
    stages = best.stages if stages is None else stages
    value = objective_seconds(problem.objective, evaluation)
    used = [load.machine for load in evaluation.loads]
    busy = sum(load.compute_seconds for load in evaluation.loads) / (len(used) * evaluation.period_seconds)
    layers_of = {piece.name: len(piece.layers) for piece in profile.pieces}
    links = _links(problem, stages)
    return Prediction(
        period_seconds=evaluation.period_seconds,
        latency_seconds=evaluation.latency_seconds,
        bubble=max(0.0, 1.0 - busy),
        in_flight=math.ceil(evaluation.latency_seconds / evaluation.period_seconds) + len(used),
        lower_bound_seconds=best.lower_bound_seconds,
        gap=gap_of(value, best.lower_bound_seconds),
        limiting=evaluation.limiting,
        method=best.method if stages is best.stages else f"given; the bound is {best.method}",
        why_no_more_machines=best.why_no_more_machines if stages is best.stages else "",
        profiled_at=oldest_measurement(profile),
        machines=_machines(problem, profile, stages, evaluation, links),
        links=links,
        baselines=compared_baselines(problem, layers_of, evaluation),
        alternatives=tuple(
            ComparedPlan(
                each.name, _counted(each.stages, layers_of), each.period_seconds, each.latency_seconds, each.why
            )
            for each in best.alternatives
        ),
        corrections=corrections,
    )


def oldest_measurement(profile: ClusterProfile) -> float:
    """In seconds since 1970; 0 if nothing was measured."""
    ages = [each.measured_at for each in profile.machines] + [each.measured_at for each in profile.links]
    return min(filter(None, ages), default=0.0)


def compared_baselines(problem: Problem, layers_of: Mapping[str, int], plan: Evaluation) -> tuple[ComparedPlan, ...]:
    """The baselines that pins, memory and links allow, best first; other demands may be what they are better by."""
    found = []
    for name, stages in baseline_stages(problem, layers_of).items():
        try:
            value = evaluate(problem, stages)
        except PlanError:
            continue  # there is no link, or a machine cannot run a piece
        if not is_possible(problem, stages, value):
            continue
        ours, theirs = (objective_seconds(problem.objective, each) for each in (plan, value))
        found.append(
            (
                theirs,
                ComparedPlan(
                    name,
                    _counted(stages, layers_of),
                    value.period_seconds,
                    value.latency_seconds,
                    _why_not(problem, ours, theirs, value),
                ),
            )
        )
    return tuple(plan for _, plan in sorted(found, key=lambda pair: pair[0]))


def _why_not(problem: Problem, ours: float, theirs: float, evaluation: Evaluation) -> str:
    kind = "period" if problem.objective == "throughput" else "latency"
    if abs(theirs - ours) <= TOLERANCE * ours:
        return "as good as the plan"
    # A latency without any time, where only sending and receiving take some.
    compared = f"{theirs / ours:.2f} times the plan's" if ours > 0 else f"{seconds_text(theirs)}, the plan's none"
    if theirs < ours:
        return f"its {kind} is {compared}, which keeps to what was demanded"
    limit = f": {evaluation.limiting} limits it" if kind == "period" else ""
    return f"its {kind} is {compared}{limit}"


def _counted(stages: Sequence[SolvedStage], layers_of: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(("+".join(stage.machines), sum(layers_of[piece] for piece in stage.pieces)) for stage in stages)


def _machines(
    problem: Problem,
    profile: ClusterProfile,
    stages: Sequence[SolvedStage],
    evaluation: Evaluation,
    links: Sequence[LinkPrediction],
) -> tuple[MachinePrediction, ...]:
    """What every machine does on average. (The search charges each replica with all that its stage receives.)"""
    profiles = {each.machine: each for each in profile.machines}
    limits = {machine.name: machine.memory_bytes for machine in problem.machines}
    contention = {
        machine.name: machine.contention if len(evaluation.loads) > 1 else 1.0 for machine in problem.machines
    }
    share = {name: part for stage in stages for name, part in zip(stage.machines, stage.shares, strict=True)}
    pieces = {name: stage.pieces for stage in stages for name in stage.machines}
    found = []
    for load in evaluation.loads:
        times = [profiles[load.machine].pieces[piece] for piece in pieces[load.machine]]
        alone = sum(each.seconds for each in times)
        estimated = sum(each.seconds for each in times if each.origin == "estimated")
        limit = limits[load.machine]
        found.append(
            MachinePrediction(
                machine=load.machine,
                compute_seconds=load.compute_seconds,
                alone_seconds=alone * share[load.machine],
                receive_seconds=math.fsum(each.stream_seconds for each in links if each.destination == load.machine),
                send_seconds=math.fsum(each.stream_seconds for each in links if each.source == load.machine),
                weight_bytes=load.weight_bytes,
                activation_bytes=load.activation_bytes,
                buffer_bytes=load.buffer_bytes,
                memory_limit_bytes=limit if math.isfinite(limit) else None,
                estimated_share=estimated / alone if alone > 0 else 0.0,
                transfer_seconds=max(
                    0.0, load.compute_seconds - alone * share[load.machine] * contention[load.machine]
                ),
            )
        )
    return tuple(found)


def _links(problem: Problem, stages: Sequence[SolvedStage]) -> tuple[LinkPrediction, ...]:
    """One for every pair of machines of which one sends to the other; replicas by the turns that they get."""
    given = {(link.source, link.destination): link for link in problem.links}
    client = [(CLIENT, EVERY)]
    found = []
    for (source, end), crossing in transfers(problem, stages).items():
        senders = client if source is None else _turns(stages[source])
        receivers = client if end is None else _turns(stages[end])
        for (one, made), (other, needed) in itertools.product(senders, receivers):
            when, link = common(made, needed), given[one, other]
            if when is not None:
                seconds = crossing.bytes / link.bytes_per_second
                single = link.latency_seconds + seconds
                found.append(LinkPrediction(one, other, crossing.bytes * when.share, single, seconds * when.share))
    return tuple(found)


def _turns(stage: SolvedStage) -> list[tuple[str, Recurrence]]:
    """Each machine of a stage, and the micro-batches that it computes."""
    turns = deal(stage.shares)
    return [(machine, turns_of(replica, turns)) for replica, machine in enumerate(stage.machines)]
