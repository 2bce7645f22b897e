"""Build the planning problem of a model and a cluster, and choose a plan for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.machine_targets import resolve_targets
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.baselines import with_fewest_machines
from tvm_split.planner.build_problem import model_problem, stages_of_layers, stages_of_pieces, with_identical_averaged
from tvm_split.planner.estimate import estimated_profile
from tvm_split.planner.evaluate import keeps_demands
from tvm_split.planner.graph import piece_edges
from tvm_split.planner.plan import Plan, PlannedMachine
from tvm_split.planner.predict import predict_solution
from tvm_split.planner.prediction import Prediction
from tvm_split.planner.problem import Objective, Problem, Solution, Stage
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.replan import Change, Measured, calibrated, change_to, corrections_of
from tvm_split.planner.request import PlanRequest
from tvm_split.planner.search import solve
from tvm_split.planner.strategy import solve_by
from tvm_split.profiling.cluster_profile import profile_model
from tvm_split.progress import StepProgress
from tvm_split.shard_planning.candidates import ShardCandidates
from tvm_split.shard_planning.choice import Choice, ShardChoice


@dataclass(frozen=True)
class PlanningProblem:
    """The planning problem of a request. ``origin`` says whether its profile was measured or estimated."""

    model: Model
    cluster: Workers
    request: PlanRequest
    profile: ClusterProfile
    problem: Problem
    origin: str
    on_progress: StepProgress | None

    def best(self) -> Choice:
        """Return the best plan of whole layers; for latency, or if none fits, possibly one with sharded layers."""
        request, refusal, whole = self.request, None, None
        may_shard = request.auto_shards and request.stages is None and len(self.cluster.machines) > 1
        may_shard = may_shard and request.precision == "float32"
        try:
            solution = with_fewest_machines(self.problem, self._solved(self.problem))
            whole = self._whole(solution, solution.stages)
        except PlanError as error:
            if not may_shard:
                raise
            refusal = error
        if whole is not None and not (may_shard and request.objective == "latency"):
            return whole
        return self._shards.better_of(whole, refusal)

    def of_stages(self, stages: tuple[Stage, ...]) -> Choice:
        """Return stages by hand with their prediction and the lower bound of the best plan."""
        bound, pieces = math.inf, stages_of_pieces(self.profile, stages)
        try:
            best = solve(self.problem, time_limit_seconds=self.request.time_limit_seconds)
            bound = best.lower_bound_seconds
            if pieces is not None:
                return replace(self._whole(best, pieces), stages=stages)
        except PlanError:
            pass  # only sharded layers fit the machines, machines have several stages, or there is no link
        return self._shards.of_stages(stages, bound)

    def corrected(self, measured: Measured) -> PlanningProblem:
        """Return the problem with its profile corrected by measurements of a plan."""
        profile = calibrated(self.profile, corrections_of(measured))
        return replace(self, profile=profile, problem=_problem(self.model, self.cluster, profile, self.request))

    def replanned(self, current: tuple[Stage, ...], threshold: float) -> tuple[Choice, Change]:
        """Return the stages to run instead of the current ones; raises as `tvm_split.planning.replan`."""
        machines = [machine for stage in current for machine in stage.machines]
        if any(stage.sharding for stage in current) or len(set(machines)) < len(machines):
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
            solution = self._solved(self.problem)
            best, now = self._whole(solution, solution.stages), self._whole(solution, pieces)
            is_possible = keeps_demands(self.problem, pieces, now.prediction)
        change = change_to(best.prediction, now.prediction, self.problem, threshold, keeps_demands=is_possible)
        return best if change.changed else replace(now, stages=current), change

    def _solved(self, problem: Problem) -> Solution:
        return solve_by(self.request.strategy, problem, self.request.time_limit_seconds)

    def _whole(self, best: Solution, pieces: Sequence[Stage]) -> Choice:
        """Return stages of pieces with their prediction, compared with the best solution."""
        predicted = partial(predict_solution, self.problem, self.profile, best, pieces)
        return Choice(stages_of_layers(self.model.graph, self.profile, pieces), predicted(), predicted)

    @cached_property
    def _shards(self) -> ShardChoice:
        """Considers sharded layers: it times parts if pieces were measured in this call, else estimates them."""
        make_plan = partial(plan_of_stages, self.model, self.cluster, self.request.objective, self.origin)
        candidates = ShardCandidates(self.model, self.profile, self.problem, self.request, make_plan)
        cluster = self.cluster if self.request.profile is None and self.origin == "measured" else None
        return ShardChoice(candidates, self.profile, self.problem, cluster, self.on_progress)


def build_planning_problem(
    model: Model, cluster: Workers, request: PlanRequest, on_progress: StepProgress | None = None
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
    return PlanningProblem(model, cluster, request, profile, problem, origin, on_progress)


def plan_of_stages(
    model: Model,
    cluster: Workers,
    objective: Objective,
    origin: str,
    stages: tuple[Stage, ...],
    prediction: Prediction | None = None,
) -> Plan:
    """Return the plan of these stages of layers, with the targets of their machines."""
    targets = resolve_targets(cluster, {machine for stage in stages for machine in stage.machines})
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
