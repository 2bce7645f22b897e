"""From a model and a cluster to a plan: by hand, or measured and searched for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.targets import resolve_targets
from tvm_split.errors import PlanError
from tvm_split.measuring.model_profiling import profile_model
from tvm_split.model import Model
from tvm_split.planner.by_hand import Split, name_stages, stages_by_hand
from tvm_split.planner.cost import estimated_seconds, weight_bytes
from tvm_split.planner.equal_cost import stages_of_equal_cost
from tvm_split.planner.estimating import LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS, estimated_profile
from tvm_split.planner.layer_graph import LayerGraph, layer_graph
from tvm_split.planner.model_problem import (
    Constraints,
    corrected,
    model_problem,
    planned_stages,
    solved_stages,
    with_turns,
)
from tvm_split.planner.pieces import piece_edges
from tvm_split.planner.plan import Plan, PlannedMachine, PlannedStage
from tvm_split.planner.predicting import oldest_measurement, predict
from tvm_split.planner.prediction import Prediction
from tvm_split.planner.problem import Objective, Problem, Solution
from tvm_split.planner.profile import ClusterProfile, LinkProfile
from tvm_split.planner.replanning import DEFAULT_THRESHOLD, Measured, Replanned, calibrated, corrections_of, replan
from tvm_split.planner.search import DEFAULT_TIME_LIMIT_SECONDS, solve
from tvm_split.planner.thrift import spared
from tvm_split.progress import says_progress
from tvm_split.rpc_runtime.program.program import CLIENT
from tvm_split.steps import StepProgress

Names = Mapping[str, str | Sequence[str]]


@says_progress("planning")
def plan(
    model: Model,
    cluster: Cluster,
    objective: Objective = "throughput",
    stages: int | None = None,
    split: Split | None = None,
    *,
    pin: Mapping[str, str] | None = None,
    keep_off: Names | None = None,
    replicas: bool = False,
    maximum_machines: int | None = None,
    maximum_period_seconds: float = math.inf,
    maximum_latency_seconds: float = math.inf,
    profile: ClusterProfile | None = None,
    measure: bool = True,
    refresh: bool = False,
    database: str | Path | None = None,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    on_progress: StepProgress | None = None,
) -> Plan:
    """Decide which layers run on which machine.

    With ``split`` the user decides, in the source's own layer names; see `tvm_split.planner.by_hand`. Without it the
    model's pieces are measured on the cluster's machines, through their workers, and so are the links between them;
    then the best plan is searched for, which may well leave machines idle. What was measured is kept on disk.

    Args:
        objective: ``"throughput"`` (least time between results) or ``"latency"`` (least time for one input).
        stages: exactly so many stages. More than there are machines go round.
        pin: layers (or prefixes of their names) that must stay on a machine.
        keep_off: layers that must not be on a machine, or on any of several.
        replicas: a stage may be dealt out over several machines, each of which then holds its weights.
        maximum_machines: use so many at most.
        maximum_period_seconds, maximum_latency_seconds: what the plan must keep to besides its objective.
        profile: measurements to plan with, instead of making them; with ``split``, what to predict by.
        measure: ``False`` plans with estimates from operations and bytes; nothing is contacted but for targets.
        refresh: measure anew what was measured before.
        database: tuned kernels, as `tvm_split.compile` takes them.
        time_limit_seconds: for the search; then the best plan so far is returned, with its bound.
        on_progress: called with what is being done, the steps done and all steps; by default they are shown on stderr.

    Raises:
        PlanError: the split, the number of stages or the constraints do not fit the model or the cluster.
        ClusterError: a machine's target is unknown and its worker cannot be asked.
        WorkerUnavailableError: a machine cannot be measured because its worker cannot be reached.
    """
    if objective not in get_args(Objective):
        raise PlanError(f"objective is {objective!r}; it can be {' or '.join(map(repr, get_args(Objective)))}")
    if stages is not None and stages < 1:
        raise PlanError(f"stages={stages} was asked for; give at least 1")
    constraints = Constraints(
        stages=stages,
        pins=tuple((pin or {}).items()),
        kept_off=_pairs(keep_off),
        replicas=replicas,
        maximum_machines=maximum_machines,
        maximum_period_seconds=maximum_period_seconds,
        maximum_latency_seconds=maximum_latency_seconds,
    )
    is_demanding = constraints != Constraints(stages=stages)
    if split is not None and is_demanding:
        raise PlanError("a split by hand leaves nothing to search; leave out the split, or pins, replicas and limits")
    graph = layer_graph(model)
    if split is not None:
        by_hand = stages_by_hand(graph, split, cluster.machine_names, stages)
        prediction = None if profile is None else predict_stages(graph, cluster, profile, objective, by_hand)
        return _plan(model, cluster, objective, "by hand", by_hand, prediction)
    if stages is not None and stages > len(cluster.machines):
        if is_demanding:
            raise PlanError(
                f"{stages} stages on {len(cluster.machines)} machines go round, cut by estimated cost; such a plan "
                "keeps to no pins or limits: leave these out, or ask for fewer stages"
            )
        origin = "equal estimated cost, going round the machines"
        return _plan(model, cluster, objective, origin, _going_round(model, graph, cluster, stages))
    if len(cluster.machines) == 1 and profile is None and not is_demanding:
        whole = name_stages([(cluster.machines[0].name, graph.layers)])
        return _plan(model, cluster, objective, "there is one machine", whole)
    question = ask(
        model,
        cluster,
        objective,
        constraints,
        profile=profile,
        measure=measure,
        refresh=refresh,
        database=database,
        on_progress=on_progress,
    )
    if on_progress is not None:
        on_progress("searching for the best plan", 1, 1)
    return answer(model, cluster, question, solve(question.problem, time_limit_seconds=time_limit_seconds))


@dataclass(frozen=True)
class Question:
    """What the search is asked, and what its answer is read with. ``origin`` says where the numbers come from."""

    graph: LayerGraph
    profile: ClusterProfile
    problem: Problem
    origin: str


def ask(
    model: Model,
    cluster: Cluster,
    objective: Objective,
    constraints: Constraints,
    *,
    profile: ClusterProfile | None = None,
    measure: bool = True,
    refresh: bool = False,
    database: str | Path | None = None,
    on_progress: StepProgress | None = None,
) -> Question:
    """Measure what has not been measured, and put the question; arguments and errors as of `plan`."""
    graph, origin = layer_graph(model), "measured"
    if profile is None and (not measure or cluster.kind == "in_process"):
        profile, origin = _estimates(model, graph, cluster), "estimated"
    if profile is None:
        profile = profile_model(model, cluster, database=database, refresh=refresh, on_progress=on_progress).profile
    return Question(graph, profile, _problem(graph, cluster, profile, objective, constraints), origin)


def answer(model: Model, cluster: Cluster, question: Question, solution: Solution) -> Plan:
    """The solution as a plan, with its prediction; machines that hardly gain anything are left out."""
    solution = spared(question.problem, solution)
    chosen = with_turns(solution.stages)
    given = None if chosen == solution.stages else chosen
    prediction = predict(question.problem, question.profile, solution, given)
    stages = planned_stages(question.graph, question.profile, chosen)
    return _plan(model, cluster, question.problem.objective, question.origin, stages, prediction)


def predict_stages(
    graph: LayerGraph,
    cluster: Cluster,
    profile: ClusterProfile,
    objective: Objective,
    stages: Sequence[PlannedStage],
) -> Prediction | None:
    """What is expected of stages that were made by hand or by another rule, beside the best plan's bound.

    None where the profile says nothing about them: a stage boundary goes through a measured piece, a machine has
    several stages, or two machines have no link.
    """
    solved = solved_stages(profile, stages)
    problem = _problem(graph, cluster, profile, objective, Constraints())
    if solved is None:
        return None
    try:
        return predict(problem, profile, solve(problem), solved)
    except PlanError:
        return None


def plan_again(
    model: Model,
    cluster: Cluster,
    question: Question,
    current: Plan,
    measured: Measured,
    threshold: float = DEFAULT_THRESHOLD,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
) -> tuple[Plan, Replanned]:
    """Improve a plan that has run: the profile is corrected by what was measured of it, and searched again.

    The plan stays as it is, with its prediction corrected, unless the best one saves more than ``threshold`` of it, or
    it does not keep to what is demanded.

    Raises:
        PlanError: the current plan's stages do not fit the model's measured pieces, or the machines have been profiled
            again since.
    """
    if measured.profiled_at not in (None, oldest_measurement(question.profile)):
        raise PlanError(
            "the machines have been profiled again since the measured plan was made, so what was measured says nothing "
            "about this profile; make a plan without --replan"
        )
    solved = solved_stages(question.profile, current.stages)
    if solved is None:
        raise PlanError(
            "the plan cuts through layers that run in one kernel, so what was measured of it says nothing about other "
            "cuts; make a plan without --replan"
        )
    corrections = corrections_of(measured)
    profile = calibrated(question.profile, corrections)
    problem = corrected(question.problem, profile)
    found = replan(problem, solved, partial(solve, time_limit_seconds=time_limit_seconds), threshold)
    chosen = with_turns(found.stages)
    prediction = predict(problem, profile, found.best, None if chosen == found.best.stages else chosen, corrections)
    stages = planned_stages(question.graph, profile, chosen) if found.changed else current.stages
    return _plan(model, cluster, problem.objective, "corrected by measurements", stages, prediction), found


def _problem(
    graph: LayerGraph,
    cluster: Cluster,
    profile: ClusterProfile,
    objective: Objective,
    constraints: Constraints,
) -> Problem:
    limits = {machine.name: machine.memory_bytes for machine in cluster.machines}
    edges = piece_edges(graph, [piece.layers for piece in profile.pieces])
    return model_problem(profile, edges, limits, objective, constraints)


def _plan(
    model: Model,
    cluster: Cluster,
    objective: Objective,
    origin: str,
    planned: tuple[PlannedStage, ...],
    prediction: Prediction | None = None,
) -> Plan:
    targets = resolve_targets(cluster, {machine for stage in planned for machine in stage.machines})
    machines = tuple(
        PlannedMachine(machine.name, targets[machine.name], machine.threads, machine.address)
        for machine in cluster.machines
        if machine.name in targets
    )
    return Plan(model.name, objective, origin, machines, planned, prediction)


def _pairs(names: Names | None) -> tuple[tuple[str, str], ...]:
    return tuple(
        (layer, machine)
        for layer, machines in (names or {}).items()
        for machine in ([machines] if isinstance(machines, str) else machines)
    )


def _going_round(model: Model, graph: LayerGraph, cluster: Cluster, stages: int) -> tuple[PlannedStage, ...]:
    chosen = [cluster.machines[index % len(cluster.machines)] for index in range(stages)]
    return stages_of_equal_cost(
        graph,
        estimated_seconds(model),
        [machine.name for machine in chosen],
        [machine.threads for machine in chosen],
    )


def _estimates(model: Model, graph: LayerGraph, cluster: Cluster) -> ClusterProfile:
    return estimated_profile(
        model.name,
        graph,
        estimated_seconds(model),
        weight_bytes(model),
        {machine.name: machine.threads for machine in cluster.machines},
        tuple(_expected_links(cluster)),
    )


def _expected_links(cluster: Cluster) -> Iterator[LinkProfile]:
    """What the user says of each link, else what a lab's network usually is; in one process nothing is sent at all."""
    ends = [CLIENT, *cluster.machine_names]
    for source, destination in itertools.permutations(ends, 2):
        given = cluster.link(source, destination)
        if cluster.kind == "in_process":
            yield LinkProfile(source, destination, math.inf, 0.0, "given", 0.0)
        elif given is None or given.bytes_per_second is None:
            yield LinkProfile(source, destination, LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS, "estimated", 0.0)
        elif not given.is_closed:
            yield LinkProfile(source, destination, given.bytes_per_second, given.latency_seconds, "given", 0.0)
