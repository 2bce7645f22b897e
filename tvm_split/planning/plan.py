"""`tvm_split.plan`: decides which layers run on which machine, by hand or by measuring and searching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.option import takes_options
from tvm_split.arguments import ClusterLike, ModelLike, as_cluster, as_model
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.machine_targets import require_fit, require_known_targets
from tvm_split.compiler.precision import in_precision, precision_remarks
from tvm_split.compiler.sharding import computed_shares
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.placement.baselines import stages_of_equal_cost
from tvm_split.placement.by_hand import named, stages_by_hand
from tvm_split.placement.estimate import estimated_seconds
from tvm_split.placement.plan import Plan
from tvm_split.placement.prediction import predict
from tvm_split.placement.problem import Objective, Problem, Stage
from tvm_split.placement.request import PlanRequest, split_by_position
from tvm_split.placement.solution import Solution
from tvm_split.placement.strategy import STRATEGIES
from tvm_split.planning.codecs import with_codecs
from tvm_split.planning.kept_plans import keep_plan, kept_plan
from tvm_split.planning.planner import Planner
from tvm_split.planning.problem_from_profile import require_known_pins
from tvm_split.progress import StepProgress, says_progress
from tvm_split.reached_workers import reached_workers

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
    reuse: bool = False,
    described: Mapping[str, WorkerDescription] | None = None,
    on_progress: StepProgress | None = None,
    on_problem: Callable[[Problem], None] | None = None,
    **fields: Any,
) -> Plan:
    """Make the plan that decides which layers run on which machine.

    With ``split`` and ``shards`` the user decides, in the source's own layer names; see `tvm_split.placement.by_hand`
    and `tvm_split.Shard`. Otherwise the model's pieces and the links are measured on the cluster's machines, through
    their workers. Then the best plan is searched, which may leave machines idle. Measurements are kept on disk.

    Args:
        model: what `load_model` returned, or the path of a model's file.
        cluster: the machines, a session of their workers, or a location as for `Cluster.at`, such as a cluster file.
        split: layers by machine, or a list of layers for each machine, in the cluster's order.
        request: how to plan; ``fields`` are fields of a `PlanRequest` that change it or create one.
        reuse: return the plan that was made from measurements before, if model, machines, links, request and the known
            measurements are unchanged. Planning again times kernels that were only estimated, unless all that changed
            are links and free memory.
        described: descriptions of the workers, by machine, if they have been asked already.
        on_progress: called with the current step, the number of steps done and the number of all steps; by default they
            are shown on stderr.
        on_problem: called with the planning problem, if there is a search.

    Raises:
        PlanError: the split, the number of stages or the demands do not fit the model or the cluster.
        ClusterError: a machine's target is unknown and its worker cannot be asked, or the two do not match.
        WorkerUnavailableError: a machine cannot be measured because its worker cannot be reached.
    """
    cluster = as_cluster(cluster).planned
    request = request_for(cluster, request, fields, objective=objective, stages=stages, split=split)
    STRATEGIES[request.strategy]  # refuses unknown names and broken packages
    require_known_targets(cluster)
    if isinstance(model, Model):  # report wrong names before asking workers and importing the file
        require_known_pins(model.graph, request, cluster.machine_names)
    with cluster.start() as workers:
        described = described or reached_workers(workers, request)
        model = as_model(model)
        require_known_pins(model.graph, request, cluster.machine_names)
        if isinstance(request.split, str):
            request = replace(request, split=model.split_of_source(request.split, cluster.machine_names))
        for machine in cluster.machines:
            if machine.name in described:
                require_fit(machine, described[machine.name])
        source = model
        planner = Planner(in_precision(model, request.precision), workers, request, described, on_progress)
        placed, origin = _stages_without_search(planner, searches=on_problem is not None)
        solution = None
        if not placed:
            if reuse and on_problem is None and (kept := kept_plan(planner)) is not None:
                return kept
            problem = planner.problem  # measures
            if on_problem is not None:
                on_problem(problem)
            if on_progress is not None:
                on_progress("searching for the best plan", 0, 1)
            solution, origin = planner.best(), planner.origin
        elif request.is_by_hand and (request.predict or request.profile is not None):
            planner = Planner(planner.model, workers, request.searched(stages=None), described, on_progress)
            solution = planner.by_hand(placed)
        made = finished(planner, source, request, solution.stages if solution else placed, origin, solution)
        if not placed:
            keep_plan(planner, made)
        return made


def request_for(
    cluster: Cluster, request: PlanRequest | None, fields: Mapping[str, Any], *, split: Any = None, **more: Any
) -> PlanRequest:
    """`PlanRequest.of`; the split may also be a list of layers for each machine of the cluster."""
    return PlanRequest.of(request, fields, split=split_by_position(split, cluster.machine_names), **more)


def _stages_without_search(planner: Planner, *, searches: bool) -> tuple[tuple[Stage, ...], str]:
    """Return stages that need no search, and how they were made; both are empty if a search is needed.

    With ``searches``, a single machine needs a search too.
    """
    model, request = planner.model, planner.request
    machines, split = planner.workers.machines, request.split
    assert isinstance(split, Mapping)  # noqa: S101  (a split of the source is resolved before)
    if request.is_by_hand:
        stages = stages_by_hand(model.graph, split, planner.workers.machine_names, request.stages, request.shards)
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


def finished(
    planner: Planner,
    source: Model,
    request: PlanRequest,
    stages: tuple[Stage, ...],
    origin: str,
    solution: Solution | None = None,
) -> Plan:
    """Return the plan of these stages, with the prediction of their solution, codecs and remarks.

    ``source`` is the model before its precision was lowered, and ``request`` what the user asked for.
    """
    plan = replace(
        planner.plan_of(stages, origin),
        prediction=None if solution is None else predict(planner.problem, solution, planner.profile),
        inputs=source.inputs,
        graph_digest=source.graph_digest,
        precision=request.precision,
        request=replace(request, profile=None),
    )
    coded = with_codecs(planner, plan, solution)
    if request.fallback and solution is not None and coded.prediction is not None:
        coded = replace(coded, prediction=replace(coded.prediction, fallbacks=planner.fallbacks(solution, plan)))
    return replace(coded, remarks=(*coded.remarks, *precision_remarks(planner.model, plan.precision)))
