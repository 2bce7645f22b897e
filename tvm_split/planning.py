"""Makes plans for a model on a cluster: by hand, or by measuring and searching."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rpc_runtime.option import takes_options
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.compiler.machine_targets import fitting_workers, require_known_targets, resolve_targets
from tvm_split.compiler.precision import in_precision, precision_remarks
from tvm_split.compiler.sharding import computed_shares
from tvm_split.errors import PlanError
from tvm_split.link_codecs import PredictCoded, with_codecs
from tvm_split.model import Model
from tvm_split.planner.baselines import stages_of_equal_cost
from tvm_split.planner.build_problem import require_known_pins, stages_of_layers, stages_of_pieces
from tvm_split.planner.by_hand import named, stages_by_hand
from tvm_split.planner.estimate import estimated_seconds
from tvm_split.planner.fewest_machines import with_fewest_machines
from tvm_split.planner.identical import with_host_averaged
from tvm_split.planner.plan import Plan, PlannedMachine
from tvm_split.planner.predict import Certificate, predict, predict_solution
from tvm_split.planner.prediction import Prediction
from tvm_split.planner.problem import Objective, Problem, Solution, Stage
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.replan import (
    DEFAULT_THRESHOLD,
    Change,
    Measured,
    calibrated,
    change_to,
    corrections_of,
    replan as replan_stages,
)
from tvm_split.planner.request import PlanRequest, Split
from tvm_split.planner.search import solve
from tvm_split.planner.shards_by_hand import stages_with_shards
from tvm_split.planner.step_graph import lower
from tvm_split.planner.strategy import require_strategy, solve_by
from tvm_split.posing import PosedProblem, pose, predict_stages, problem_of
from tvm_split.progress import says_progress
from tvm_split.shard_planning.candidates import ShardCandidates
from tvm_split.shard_planning.choice import Choice, ShardChoice
from tvm_split.steps import StepProgress


@says_progress("planning")
@takes_options(PlanRequest)
def plan(
    model: Model,
    cluster: Cluster,
    objective: Objective | None = None,
    stages: int | None = None,
    split: Mapping[str, Sequence[str]] | str | None = None,
    *,
    request: PlanRequest | None = None,
    on_progress: StepProgress | None = None,
    on_problem: Callable[[Problem], None] | None = None,
    **fields: Any,
) -> Plan:
    """Make the plan that decides which layers run on which machine.

    With ``split`` and ``shards`` the user decides, in the source's own layer names; see `tvm_split.planner.by_hand` and
    `tvm_split.Shard`. Otherwise the model's pieces and the links are measured on the cluster's machines, through their
    workers. Then the best plan is searched, which may leave machines idle. Measurements are kept on disk.

    Args:
        request: how to plan; ``fields`` are fields of a `PlanRequest` that change it or create one.
        on_progress: called with the current step, the number of steps done and the number of all steps; by default they
            are shown on stderr.
        on_problem: called with the planning problem, if there is a search.

    Raises:
        PlanError: the split, the number of stages or the demands do not fit the model or the cluster.
        ClusterError: a machine's target is unknown and its worker cannot be asked, or the two do not match.
        WorkerUnavailableError: a machine cannot be measured because its worker cannot be reached.
    """
    request = PlanRequest.of(request, fields, objective=objective, stages=stages, split=split)
    require_strategy(request.strategy)
    require_known_pins(model.graph, request, cluster.machine_names)
    if isinstance(request.split, str):
        request = replace(request, split=model.split_of_source(request.split, cluster.machine_names))
    require_known_targets(cluster)
    inputs = model.inputs
    model = in_precision(model, request.precision)
    with cluster.start() as workers:
        described = fitting_workers(workers)
        found = _without_codecs(model, workers, request, on_progress, on_problem)
        planned = replace(
            found.plan, precision=request.precision, request=replace(request, profile=None), inputs=inputs
        )
        coded = with_codecs(
            model, workers, planned, request, found.profile, found.predict_coded, on_progress, workers=described
        )
    return replace(coded, remarks=(*coded.remarks, *precision_remarks(model, request.precision)))


@dataclass(frozen=True)
class _Found:
    """A plan before codecs are chosen, its profile, and the function that predicts it with codecs."""

    plan: Plan
    profile: ClusterProfile | None = None
    predict_coded: PredictCoded | None = None


def _without_codecs(
    model: Model,
    cluster: Workers,
    request: PlanRequest,
    on_progress: StepProgress | None,
    on_problem: Callable[[Problem], None] | None,
) -> _Found:
    machines = cluster.machines
    if request.shards:
        stages = named(stages_with_shards(model.graph, request.shards, _split(request), cluster.machine_names))
        _require_count(stages, request.stages)
        for stage in stages:
            if stage.sharding:
                computed_shares(model, stage)  # refuse an impossible sharding here, before compiling
        return _by_hand(model, cluster, request, stages, on_progress)
    if request.split:
        stages = stages_by_hand(model.graph, _split(request), cluster.machine_names, request.stages)
        return _by_hand(model, cluster, request, stages, on_progress)
    if request.stages is not None and request.stages > len(machines):
        if request.is_demanding:
            raise PlanError(
                f"{request.stages} stages on {len(machines)} machines go round, cut by estimated cost; such a plan "
                "keeps to no pins or limits: leave these out, or ask for fewer stages"
            )
        round_trip = [machines[index % len(machines)] for index in range(request.stages)]
        stages = stages_of_equal_cost(model.graph, estimated_seconds(model.description), round_trip)
        return _Found(
            _plan(model, cluster, request.objective, "equal estimated cost, going round the machines", stages)
        )
    if len(machines) == 1 and not (request.profile or request.is_demanding or on_problem):
        stages = named([Stage((machines[0].name,), model.graph.layers)])
        return _Found(_plan(model, cluster, request.objective, "there is one machine", stages))
    posed = pose(model, cluster, request, on_progress)
    if on_problem is not None:
        on_problem(posed.problem)
    if on_progress is not None:
        on_progress("searching for the best plan", 1, 1)
    chosen = _chosen(model, cluster, request, posed, on_progress)
    plan = _plan(model, cluster, request.objective, posed.origin, chosen.stages, chosen.prediction)
    return _Found(plan, posed.profile, chosen.predict_coded)


def _chosen(
    model: Model, cluster: Workers, request: PlanRequest, posed: PosedProblem, on_progress: StepProgress | None
) -> Choice:
    """Return the best plan of whole layers; for latency, or if none fits, possibly one with sharded layers."""
    refusal, whole = None, None
    try:
        found = solve_by(request.strategy, posed.problem, request.time_limit_seconds)
        whole = _whole(model, posed, with_fewest_machines(posed.problem, found))
    except PlanError as error:
        refusal = error
    considers = request.auto_shards and request.stages is None and len(cluster.machines) > 1
    considers = considers and request.precision == "float32"
    if whole is not None and not (considers and request.objective == "latency"):
        return whole
    if refusal is not None and not considers:
        raise refusal
    return _considering(model, cluster, request, posed, on_progress).beside(whole, refusal)


def _whole(model: Model, posed: PosedProblem, found: Solution) -> Choice:
    predicted = partial(predict_solution, posed.problem, posed.profile, found, found.stages)
    return Choice(stages_of_layers(model.graph, posed.profile, found.stages), predicted(), predicted)


def _considering(
    model: Model, cluster: Workers, request: PlanRequest, posed: PosedProblem, on_progress: StepProgress | None
) -> ShardChoice:
    """Return the choice of shards: it times parts if pieces were measured in this call, else estimates them."""
    make_plan = partial(_plan, model, cluster, request.objective, posed.origin)
    looking = ShardCandidates(model, with_host_averaged(posed.profile), posed.problem, request, make_plan)
    measures = request.profile is None and posed.origin == "measured"
    return ShardChoice(looking, posed.profile, posed.problem, cluster, measures=measures, on_progress=on_progress)


def _by_hand(
    model: Model,
    cluster: Workers,
    request: PlanRequest,
    stages: tuple[Stage, ...],
    on_progress: StepProgress | None,
) -> _Found:
    """Return a plan of stages by hand, with a prediction if the request asks for one or has a profile."""
    plan = partial(_plan, model, cluster, request.objective, "by hand", stages)
    if request.profile is None and not request.predict:
        return _Found(plan())
    asked = request.searched(stages=None)
    posed = pose(model, cluster, asked, on_progress)
    predicted = predict_stages(model, cluster, posed.profile, request.objective, stages)
    if predicted is not None:
        graph = lower(posed.problem, stages_of_pieces(posed.profile, stages) or (), posed.profile.estimated)
        certificate = Certificate(predicted.lower_bound_seconds, predicted.method, "", predicted.alternatives)
        predict_coded = partial(predict, posed.problem, graph, certificate, posed.profile)
        return _Found(plan(predicted), posed.profile, predict_coded)
    # The search does not cover shared stages, machines with several stages, or stages that end inside a piece.
    try:
        bound = solve(posed.problem, time_limit_seconds=request.time_limit_seconds).lower_bound_seconds
    except PlanError:
        bound = math.inf  # the model fits the machines only with sharded layers
    given = _considering(model, cluster, asked, posed, on_progress).given(stages, bound)
    return _Found(plan(given.prediction), posed.profile, given.predict_coded)


@says_progress("planning")
@takes_options(PlanRequest)
def replan(
    model: Model,
    cluster: Cluster,
    current: Plan,
    measured: Measured,
    threshold: float = DEFAULT_THRESHOLD,
    request: PlanRequest | None = None,
    *,
    on_progress: StepProgress | None = None,
    **fields: Any,
) -> tuple[Plan, Change]:
    """Improve a plan that has run; return the plan, and the change from the current one.

    The profile is corrected by measurements of the current plan, and searched again. The current plan is kept, with a
    corrected prediction, unless the best plan saves more than ``threshold`` of its value, or it violates the demands. A
    plan whose machines share stages, or have several, is compared with what `plan` would return now; other plans are
    compared with plans of whole layers. The precision stays that of the plan.

    Args:
        measured: the measurements of the current plan.
        threshold: least saving, as a share of the objective's value, that justifies another plan.
        request: how to plan; by default the request of the current plan, without its split and shards.

    Raises:
        PlanError: the current plan's stages do not fit the model or its measured pieces, or the machines have been
            profiled again since.
    """
    request = PlanRequest.of(request or current.request.searched(refresh=False), fields)
    inputs = model.inputs
    require_strategy(request.strategy)
    require_known_pins(model.graph, request, cluster.machine_names)
    model = in_precision(model, current.precision)
    with cluster.start() as workers:
        posed = pose(model, workers, request, on_progress)
        if measured.profiled_at not in (None, posed.profile.measured_at):
            raise PlanError(
                "the machines have been profiled again since the measured plan was made, so what was measured says "
                "nothing about this profile; make a new plan"
            )
        machines = [machine for stage in current.stages for machine in stage.machines]
        has_parts = any(stage.sharding for stage in current.stages) or len(set(machines)) < len(machines)
        solved = None if has_parts else stages_of_pieces(posed.profile, current.stages)
        if solved is None and not has_parts:
            raise PlanError(
                "the plan cuts through layers that run in one kernel, so what was measured of it says nothing about "
                "other cuts; make a new plan"
            )
        profile = calibrated(posed.profile, corrections_of(measured))
        posed = replace(posed, profile=profile, problem=problem_of(model, workers, profile, request))
        if solved is None:
            chosen, change = _parts_again(model, workers, request, posed, current.stages, threshold, on_progress)
        else:
            chosen, change = _whole_again(model, request, posed, current.stages, solved, threshold)
        plan = _plan(model, workers, request.objective, "corrected by measurements", chosen.stages, chosen.prediction)
        plan = replace(plan, precision=current.precision, request=replace(request, profile=None), inputs=inputs)
        coded = with_codecs(model, workers, plan, request, profile, chosen.predict_coded, on_progress)
    return replace(coded, remarks=(*coded.remarks, *precision_remarks(model, plan.precision))), change


def _whole_again(
    model: Model,
    request: PlanRequest,
    posed: PosedProblem,
    current: tuple[Stage, ...],
    solved: Sequence[Stage],
    threshold: float,
) -> tuple[Choice, Change]:
    """Replan a plan of whole layers; ``solved`` are its stages in pieces."""
    found = replan_stages(
        posed.problem,
        solved,
        partial(solve_by, request.strategy, time_limit_seconds=request.time_limit_seconds),
        threshold,
    )
    stages = stages_of_layers(model.graph, posed.profile, found.stages) if found.change.changed else current
    predicted = partial(predict_solution, posed.problem, posed.profile, found.best, found.stages)
    return Choice(stages, predicted(), predicted), found.change


def _parts_again(
    model: Model,
    cluster: Workers,
    request: PlanRequest,
    posed: PosedProblem,
    current: tuple[Stage, ...],
    threshold: float,
    on_progress: StepProgress | None,
) -> tuple[Choice, Change]:
    """Replan a plan whose machines share stages, or have several stages."""
    looking = _considering(model, cluster, request, posed, on_progress)
    keeps_demands = looking.keeps_demands(current)
    best = _chosen(model, cluster, request, posed, on_progress)
    now = looking.given(current, best.prediction.lower_bound_seconds)
    change = change_to(best.prediction, now.prediction, posed.problem, threshold, keeps_demands=keeps_demands)
    return (best if change.changed else now), change


def _plan(
    model: Model,
    cluster: Workers,
    objective: Objective,
    origin: str,
    stages: tuple[Stage, ...],
    prediction: Prediction | None = None,
) -> Plan:
    targets = resolve_targets(cluster, {machine for stage in stages for machine in stage.machines})
    machines = tuple(
        PlannedMachine(machine.name, targets[machine.name], machine.threads, machine.address)
        for machine in cluster.machines
        if machine.name in targets
    )
    return Plan(model.name, objective, origin, machines, stages, prediction)


def _require_count(stages: Sequence[Stage], wanted: int | None) -> None:
    if wanted is not None and wanted != len(stages):
        raise PlanError(f"the shards and the split make {len(stages)} stages, stages={wanted} was asked for")


def _split(request: PlanRequest) -> Split:
    """Return the layers by machine of a request."""
    assert isinstance(request.split, Mapping)  # noqa: S101  (a split of the source is resolved before)
    return request.split
