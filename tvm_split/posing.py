"""Builds planning problems: a model's pieces on a cluster's machines, measured or estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.build_problem import model_problem, stages_of_pieces
from tvm_split.planner.estimate import estimated_profile
from tvm_split.planner.graph import piece_edges
from tvm_split.planner.identical import with_identical_averaged
from tvm_split.planner.predict import predict_solution
from tvm_split.planner.prediction import Prediction
from tvm_split.planner.problem import Objective, Problem, Stage
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.request import PlanRequest
from tvm_split.planner.search import solve
from tvm_split.profiling.cluster_profile import profile_model
from tvm_split.steps import StepProgress


@dataclass(frozen=True)
class PosedProblem:
    """A planning problem with its profile. ``origin`` says whether the profile was measured or estimated."""

    profile: ClusterProfile
    problem: Problem
    origin: str


def pose(model: Model, cluster: Workers, request: PlanRequest, on_progress: StepProgress | None = None) -> PosedProblem:
    """Measure or estimate the profile, unless ``request`` has one, and build the problem; errors as of `plan`."""
    profile, origin = request.profile, "measured"
    if profile is None and (request.estimate or cluster.launcher.in_process):
        profile, origin = estimated_profile(model.description, cluster), "estimated"
    if profile is None:
        found = profile_model(
            model, cluster, database=request.database, refresh=request.refresh, on_progress=on_progress
        )
        profile = found.profile
    profile = with_identical_averaged(profile)
    return PosedProblem(profile, problem_of(model, cluster, profile, request), origin)


def predict_stages(
    model: Model, cluster: Cluster, profile: ClusterProfile, objective: Objective, stages: Sequence[Stage]
) -> Prediction | None:
    """Predict stages that were made by hand or by another rule, with the lower bound of the best plan.

    None if the search does not cover such a plan: a stage boundary goes through a measured piece, machines share a
    stage, a machine has several stages, or two machines have no link.
    """
    solved = stages_of_pieces(profile, stages)
    problem = problem_of(model, cluster, profile, PlanRequest(objective))
    if solved is None:
        return None
    try:
        return predict_solution(problem, profile, solve(problem), solved)
    except PlanError:
        return None


def problem_of(model: Model, cluster: Cluster, profile: ClusterProfile, request: PlanRequest) -> Problem:
    """Build the planning problem of a request on a cluster, in the pieces of a profile."""
    limits = {machine.name: machine.memory_bytes for machine in cluster.machines}
    edges = piece_edges(model.graph, [piece.layers for piece in profile.pieces])
    return model_problem(profile, edges, limits, request)
