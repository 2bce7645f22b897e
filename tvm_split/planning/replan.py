"""`tvm_split.replan`: improves a plan by what was measured while it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.option import takes_options
from tvm_split.arguments import ClusterLike, ModelLike, PlanLike, as_cluster, as_model, as_plan
from tvm_split.compiler.precision import in_precision
from tvm_split.deployment.deployment_report import read_measured
from tvm_split.errors import PlanError, required
from tvm_split.parameters import Share
from tvm_split.placement.corrections import DEFAULT_THRESHOLD, Change, Measured, calibrated, change_to, corrections_of
from tvm_split.placement.plan import Plan
from tvm_split.placement.problem import Stage
from tvm_split.placement.request import SPLITTING, PlanRequest
from tvm_split.placement.solution import Solution
from tvm_split.placement.strategy import STRATEGIES
from tvm_split.planning.plan import finished
from tvm_split.planning.planner import Planner
from tvm_split.planning.problem_from_profile import require_known_pins, stages_of_pieces, whole_layers
from tvm_split.progress import StepProgress, says_progress
from tvm_split.reached_workers import reached_workers


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
    cluster, current = as_cluster(cluster).planned, as_plan(current)
    if isinstance(measured, str | Path):
        measured = read_measured(Path(measured), current.model)
    required(Measured, measured, PlanError, "give a report of `tvm-split bench --json`, or what read_measured returns")
    request = PlanRequest.of(request or current.request.searched(refresh=False), fields)
    request.require_default("another plan is searched for; for a split by hand, call tvm_split.plan", SPLITTING)
    request.require_default("new measurements need no correction; use tvm_split.plan", ["refresh"])
    several = request.stages is not None and request.stages > len(cluster.machines)  # of which no search has plans
    request = replace(request, precision=current.precision, stages=None if several else request.stages)
    STRATEGIES[request.strategy]  # refuses unknown names and broken packages
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
        planner = Planner(in_precision(model, request.precision), workers, request, described, on_progress)
        if measured.profiled_at not in (None, planner.profile.measured_at):
            raise PlanError(
                "the machines have been profiled again since the measured plan was made, so what was measured says "
                "nothing about this profile; make a new plan"
            )
        planner = planner.with_profile(calibrated(planner.profile, corrections_of(measured)))
        solution, change = _better(planner, current.stages, threshold)
        plan = finished(planner, source, request, solution.stages, "corrected by measurements", solution)
        return plan, change


def _better(planner: Planner, current: tuple[Stage, ...], threshold: float) -> tuple[Solution, Change]:
    """Return the best solution if it should replace the current stages, else the current one; and the change."""
    if whole_layers(current):
        if stages_of_pieces(planner.profile, current) is None:
            raise PlanError(
                "the plan cuts through layers that run in one kernel, so what was measured of it says nothing "
                "about other cuts; make a new plan"
            )
        best = planner.best_of_whole_layers()
    else:
        best = planner.best()
    now = planner.of_stages(current, best, "the current plan")
    change = change_to(best, now, planner.problem, threshold, keeps_demands=planner.keeps_demands(now))
    return (best if change.changed else now), change
