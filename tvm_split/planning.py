"""Makes plans for a model on a cluster: by hand, or by measuring, building a planning problem and searching."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.option import takes_options
from tvm_split.arguments import ClusterLike, ModelLike, PlanLike, as_cluster, as_model, as_plan
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.compiler.machine_targets import require_fit, require_known_targets, resolve_targets
from tvm_split.compiler.precision import in_precision, precision_remarks
from tvm_split.compiler.sharding import computed_shares
from tvm_split.deployment.deployment_report import read_measured
from tvm_split.errors import PlanError, required
from tvm_split.link_codecs import with_codecs
from tvm_split.model import Model
from tvm_split.parameters import Share
from tvm_split.planner.baselines import stages_of_equal_cost, with_fewest_machines
from tvm_split.planner.build_problem import (
    model_problem,
    require_known_pins,
    stages_of_layers,
    stages_of_pieces,
    with_identical_averaged,
)
from tvm_split.planner.by_hand import named, stages_by_hand
from tvm_split.planner.estimate import estimated_profile, estimated_seconds
from tvm_split.planner.evaluate import keeps_demands
from tvm_split.planner.graph import piece_edges
from tvm_split.planner.plan import Plan, PlannedMachine
from tvm_split.planner.predict import predict_solution
from tvm_split.planner.prediction import Prediction
from tvm_split.planner.problem import Objective, Problem, Solution, Stage
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.replan import DEFAULT_THRESHOLD, Change, Measured, calibrated, change_to, corrections_of
from tvm_split.planner.request import SPLITTING, PlanRequest, split_by_position
from tvm_split.planner.search import solve
from tvm_split.planner.strategy import require_strategy, solve_by
from tvm_split.profiling.cluster_profile import profile_model
from tvm_split.progress import StepProgress, says_progress
from tvm_split.reached_workers import reached_workers
from tvm_split.shard_planning.candidates import ShardCandidates
from tvm_split.shard_planning.choice import Choice, ShardChoice

WHOLE_LAYERS_SHARE = 0.4
"""Fraction of the time limit for plans of whole layers, if plans with sharded layers are searched in the rest."""
SplitLike = Mapping[str, Sequence[str]] | Sequence[Sequence[str]] | str


@says_progress("planning")
@takes_options(PlanRequest)
def plan(
    model: ModelLike,
    cluster: ClusterLike,
    objective: Objective | None = None,
    stages: int | None = None,
    split: SplitLike | None = None,
    *,
    request: PlanRequest | None = None,
    described: Mapping[str, WorkerDescription] | None = None,
    on_progress: StepProgress | None = None,
    on_problem: Callable[[Problem], None] | None = None,
    **fields: Any,
) -> Plan:
    """Make the plan that decides which layers run on which machine.

    With ``split`` and ``shards`` the user decides, in the source's own layer names; see `tvm_split.planner.by_hand` and
    `tvm_split.Shard`. Otherwise the model's pieces and the links are measured on the cluster's machines, through their
    workers. Then the best plan is searched, which may leave machines idle. Measurements are kept on disk.

    Args:
        model: what `load_model` returned, or the path of a model's file.
        cluster: the machines, a session of their workers, or a location as for `Cluster.at`, such as a cluster file.
        split: layers by machine, or a list of layers for each machine, in the cluster's order.
        request: how to plan; ``fields`` are fields of a `PlanRequest` that change it or create one.
        described: descriptions of the workers, by machine, if they have been asked already.
        on_progress: called with the current step, the number of steps done and the number of all steps; by default they
            are shown on stderr.
        on_problem: called with the planning problem, if there is a search.

    Raises:
        PlanError: the split, the number of stages or the demands do not fit the model or the cluster.
        ClusterError: a machine's target is unknown and its worker cannot be asked, or the two do not match.
        WorkerUnavailableError: a machine cannot be measured because its worker cannot be reached.
    """
    cluster = as_cluster(cluster)
    request = request_for(cluster, request, fields, objective=objective, stages=stages, split=split)
    require_strategy(request.strategy)
    require_known_targets(cluster)
    if isinstance(model, Model):  # report wrong names before asking workers and importing the file
        require_known_pins(model.graph, request, cluster.machine_names)
    with cluster.start() as workers:
        described = described or reached_workers(workers, request)
        model = as_model(model)
        require_known_pins(model.graph, request, cluster.machine_names)
        if isinstance(request.split, str):
            request = replace(request, split=model.split_of_source(request.split, cluster.machine_names))
        for name, worker in described.items():
            require_fit(cluster.machine(name), worker)
        source = model
        model = in_precision(model, request.precision)
        fixed, origin = _stages_without_search(model, workers, request, searches=on_problem is not None)
        planning, choice = None, None
        if not fixed:
            planning = build_planning_problem(model, workers, request, on_progress, described)
            if on_problem is not None:
                on_problem(planning.problem)
            if on_progress is not None:
                on_progress("searching for the best plan", 0, 1)
            choice, origin = planning.best(), planning.origin
        elif request.is_by_hand and (request.predict or request.profile is not None):
            planning = build_planning_problem(model, workers, request.searched(stages=None), on_progress, described)
            choice = planning.of_stages(fixed)
        chosen, prediction = (choice.stages, choice.prediction) if choice else (fixed, None)
        planned = plan_of_stages(model, workers, request.objective, described, origin, chosen, prediction)
        planned = replace(planned, inputs=source.inputs, graph_digest=source.graph_digest)
        return _finished(model, workers, request, planned, planning, choice, on_progress, described)


def request_for(
    cluster: Cluster, request: PlanRequest | None, fields: Mapping[str, Any], *, split: Any = None, **more: Any
) -> PlanRequest:
    """`PlanRequest.of`; the split may also be a list of layers for each machine of the cluster."""
    return PlanRequest.of(request, fields, split=split_by_position(split, cluster.machine_names), **more)


def _stages_without_search(
    model: Model, cluster: Workers, request: PlanRequest, *, searches: bool
) -> tuple[tuple[Stage, ...], str]:
    """Stages that need no search, and why; no stages if a search is needed, or if ``searches`` asks for one."""
    machines, split = cluster.machines, request.split
    assert isinstance(split, Mapping)  # noqa: S101  (a split of the source is resolved before)
    if request.is_by_hand:
        stages = stages_by_hand(model.graph, split, cluster.machine_names, request.stages, request.shards)
        for stage in stages:
            if stage.sharding:
                computed_shares(model, stage)  # refuse an impossible sharding here, before compiling
        return stages, "by hand"
    if request.stages is not None and request.stages > len(machines):
        if request.is_demanding:
            raise PlanError(
                f"{request.stages} stages on {len(machines)} machines: machines get several stages by estimated "
                "cost, and pins and limits are not supported; leave these out, or ask for fewer stages"
            )
        round_trip = [machines[index % len(machines)] for index in range(request.stages)]
        stages = stages_of_equal_cost(model.graph, estimated_seconds(model.description), round_trip)
        return stages, "equal estimated cost, several stages per machine"
    if len(machines) == 1 and not (request.profile or request.is_demanding or searches):
        return named([Stage((machines[0].name,), model.graph.layers)]), "there is one machine"
    return (), ""


def _finished(
    model: Model,
    cluster: Workers,
    request: PlanRequest,
    plan: Plan,
    planning: PlanningProblem | None,
    choice: Choice | None,
    on_progress: StepProgress | None,
    workers: Mapping[str, WorkerDescription],
) -> Plan:
    """The plan with its request, its codecs and the remarks on its precision."""
    plan = replace(plan, precision=request.precision, request=replace(request, profile=None))
    profile = planning.profile if planning else None
    predict_coded = choice.predict_coded if choice else None
    coded = with_codecs(model, cluster, plan, request, workers, profile, predict_coded, on_progress)
    return replace(coded, remarks=(*coded.remarks, *precision_remarks(model, plan.precision)))


@says_progress("planning")
@takes_options(PlanRequest)
def replan(
    model: ModelLike,
    cluster: ClusterLike,
    current: PlanLike,
    measured: Measured | str | Path,
    threshold: Share = DEFAULT_THRESHOLD,
    request: PlanRequest | None = None,
    *,
    described: Mapping[str, WorkerDescription] | None = None,
    on_progress: StepProgress | None = None,
    **fields: Any,
) -> tuple[Plan, Change]:
    """Improve a plan that has run; return the plan, and the change from the current one.

    The profile is corrected by measurements of the current plan, and searched again. The current plan is kept, with a
    corrected prediction, unless the best plan saves more than ``threshold`` of its value, or it violates the demands. A
    plan with shards, or with several stages on one machine, is compared with what `plan` would return now; other plans
    are compared with plans of whole layers. The precision stays that of the plan.

    Args:
        measured: the measurements of the current plan, or their file, as ``tvm-split bench --json`` writes it.
        threshold: least saving, as a share of the objective's value, that justifies another plan.
        request: how to plan; by default the request of the current plan, without its split and shards.
        described: as of `plan`.

    Raises:
        PlanError: the current plan is for another model, its stages do not fit the measured pieces, or the machines
            have been profiled again since.
    """
    cluster, current = as_cluster(cluster), as_plan(current)
    if isinstance(measured, str | Path):
        measured = read_measured(Path(measured), current.model)
    required(Measured, measured, PlanError, "give a report of `tvm-split bench --json`, or what read_measured returns")
    request = PlanRequest.of(request or current.request.searched(refresh=False), fields)
    request.require_default("another plan is searched for; for a split by hand, call tvm_split.plan", SPLITTING)
    request = replace(request, precision=current.precision)
    require_strategy(request.strategy)
    with cluster.start() as workers:
        described = described or reached_workers(workers, request)
        model = as_model(model)
        require_known_pins(model.graph, request, cluster.machine_names)
        source = model
        if current.graph_digest not in ("", model.graph_digest):
            raise PlanError(
                "the plan that was measured is for another model, or for inputs of other shapes, so what was measured "
                "says nothing about this one; make a new plan"
            )
        model = in_precision(model, request.precision)
        planning = build_planning_problem(model, workers, request, on_progress, described)
        if measured.profiled_at not in (None, planning.profile.measured_at):
            raise PlanError(
                "the machines have been profiled again since the measured plan was made, so what was measured says "
                "nothing about this profile; make a new plan"
            )
        planning = planning.corrected(measured)
        choice, change = planning.replanned(current.stages, threshold)
        plan = plan_of_stages(
            model, workers, request.objective, described, "corrected by measurements", choice.stages, choice.prediction
        )
        plan = replace(plan, inputs=source.inputs, graph_digest=source.graph_digest)
        return _finished(model, workers, request, plan, planning, choice, on_progress, described), change


@dataclass(frozen=True)
class PlanningProblem:
    """The planning problem of a request. ``origin`` says whether its profile was measured or estimated.

    ``described`` are the descriptions of the workers that have answered.
    """

    model: Model
    cluster: Workers
    request: PlanRequest
    profile: ClusterProfile
    problem: Problem
    origin: str
    on_progress: StepProgress | None
    described: Mapping[str, WorkerDescription]

    def best(self) -> Choice:
        """Return the best plan of whole layers; for latency, or if none fits, possibly one with sharded layers."""
        request, refusal, whole = self.request, None, None
        limit = request.time_limit_seconds
        deadline = time.monotonic() + limit
        may_shard = request.auto_shards and request.stages is None and len(self.cluster.machines) > 1
        may_shard = may_shard and request.precision == "float32"
        try:
            share = WHOLE_LAYERS_SHARE if may_shard and request.objective == "latency" else 1.0
            solution = with_fewest_machines(self.problem, self._solved(share * limit))
            whole = self._whole(solution, solution.stages)
        except PlanError as error:
            if not may_shard:
                raise
            refusal = error
        if whole is not None and not (may_shard and request.objective == "latency"):
            return whole
        return self._shards.better_of(whole, refusal, deadline)

    def of_stages(self, stages: tuple[Stage, ...]) -> Choice:
        """Return stages by hand with their prediction and the lower bound of the best plan."""
        try:
            best = solve(self.problem, time_limit_seconds=self.request.time_limit_seconds)
        except PlanError:  # no plan of whole layers fits the machines, so none gives a bound
            return self._shards.of_stages(stages, math.inf)
        pieces = stages_of_pieces(self.profile, stages) if _are_whole(stages) else None
        if pieces is None:
            return self._shards.of_stages(stages, best.lower_bound_seconds)
        return replace(self._whole(best, pieces), stages=stages)

    def corrected(self, measured: Measured) -> PlanningProblem:
        """Return the problem with its profile corrected by measurements of a plan."""
        profile = calibrated(self.profile, corrections_of(measured))
        return replace(self, profile=profile, problem=_problem(self.model, self.cluster, profile, self.request))

    def replanned(self, current: tuple[Stage, ...], threshold: float) -> tuple[Choice, Change]:
        """Return the stages to run instead of the current ones; raises as `tvm_split.planning.replan`."""
        if not _are_whole(current):
            is_possible = self._shards.keeps_demands(current)
            best = self.best()
            now = self._shards.of_stages(current, best.prediction.lower_bound_seconds)
        else:
            pieces = stages_of_pieces(self.profile, current)
            if pieces is None:
                raise PlanError(
                    "the plan cuts through layers that run in one kernel, so what was measured of it says nothing "
                    "about other cuts; make a new plan"
                )
            solution = self._solved(self.request.time_limit_seconds)
            best, now = self._whole(solution, solution.stages), self._whole(solution, pieces)
            is_possible = keeps_demands(self.problem, pieces, now.prediction)
        change = change_to(best.prediction, now.prediction, self.problem, threshold, keeps_demands=is_possible)
        return best if change.changed else replace(now, stages=current), change

    def _solved(self, time_limit_seconds: float) -> Solution:
        return solve_by(self.request.strategy, self.problem, time_limit_seconds)

    def _whole(self, best: Solution, pieces: Sequence[Stage]) -> Choice:
        """Return stages of pieces with their prediction, compared with the best solution."""
        predicted = partial(predict_solution, self.problem, self.profile, best, pieces)
        return Choice(stages_of_layers(self.model.graph, self.profile, pieces), predicted(), predicted)

    @cached_property
    def _shards(self) -> ShardChoice:
        """Considers sharded layers: it times parts if pieces were measured in this call, else estimates them."""
        make_plan = partial(
            plan_of_stages, self.model, self.cluster, self.request.objective, self.described, self.origin
        )
        candidates = ShardCandidates(self.model, self.profile, self.problem, self.request, make_plan)
        cluster = self.cluster if self.request.profile is None and self.origin == "measured" else None
        return ShardChoice(candidates, self.profile, self.problem, cluster, self.on_progress)


def _are_whole(stages: Sequence[Stage]) -> bool:
    """Return whether no stage is sharded and no machine has two stages."""
    machines = [machine for stage in stages for machine in stage.machines]
    return len(set(machines)) == len(machines) and not any(stage.sharding for stage in stages)


def build_planning_problem(
    model: Model,
    cluster: Workers,
    request: PlanRequest,
    on_progress: StepProgress | None = None,
    described: Mapping[str, WorkerDescription] | None = None,
) -> PlanningProblem:
    """Measure or estimate the profile, unless ``request`` has one, and build the problem; raises as `plan`."""
    profile, origin = request.profile, "measured"
    if profile is None and (request.estimate or cluster.launcher.in_process):
        profile, origin = estimated_profile(model.description, cluster), "estimated"
    if profile is None:
        profile = profile_model(
            model, cluster, database=request.database, refresh=request.refresh, on_progress=on_progress
        ).profile
    profile = with_identical_averaged(profile)
    problem = _problem(model, cluster, profile, request)
    return PlanningProblem(model, cluster, request, profile, problem, origin, on_progress, described or {})


def plan_of_stages(
    model: Model,
    cluster: Workers,
    objective: Objective,
    described: Mapping[str, WorkerDescription],
    origin: str,
    stages: tuple[Stage, ...],
    prediction: Prediction | None = None,
) -> Plan:
    """Return the plan of these stages of layers, with the targets of their machines."""
    targets = resolve_targets(cluster, {machine for stage in stages for machine in stage.machines}, described)
    machines = tuple(
        PlannedMachine(machine.name, targets[machine.name], machine.threads, machine.address)
        for machine in cluster.machines
        if machine.name in targets
    )
    return Plan(model.name, objective, origin, machines, stages, prediction)


def _problem(model: Model, cluster: Workers, profile: ClusterProfile, request: PlanRequest) -> Problem:
    limits = {machine.name: machine.memory_bytes for machine in cluster.machines}
    edges = piece_edges(model.graph, [piece.layers for piece in profile.pieces])
    return model_problem(profile, edges, limits, request)
