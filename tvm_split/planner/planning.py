"""From a model and a cluster to a plan, by hand or by the automatic rule, and from a plan to a placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import tvm

from relay_passes.placement import PlacedStage, Placement
from tvm_split.cluster import Cluster
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.by_hand import Split, stages_by_hand
from tvm_split.planner.cost import estimated_seconds
from tvm_split.planner.equal_cost import stages_of_equal_cost
from tvm_split.planner.layer_graph import LayerGraph, layer_graph
from tvm_split.planner.plan import Plan, PlannedMachine, PlannedStage
from tvm_split.targets import resolve_targets

Objective = Literal["throughput", "latency"]


def plan(
    model: Model,
    cluster: Cluster,
    objective: Objective = "throughput",
    stages: int | None = None,
    split: Split | None = None,
) -> Plan:
    """Decide which layers run on which machine.

    With ``split`` the user decides, in the source's own layer names; see `tvm_split.planner.by_hand`. Without it, the
    layers are cut in the order of execution into ``stages`` stages of about equal estimated cost: one per machine for
    throughput, a single one on the machine with the most threads for latency, since a chain of stages on equal machines
    never makes one input faster. More stages than machines go round.

    Raises:
        PlanError: the split or the number of stages does not fit the model or the cluster.
        ClusterError: a machine's target is unknown and its worker cannot be asked.
    """
    if objective not in get_args(Objective):
        raise PlanError(f"objective is {objective!r}; it can be {' or '.join(map(repr, get_args(Objective)))}")
    if stages is not None and stages < 1:
        raise PlanError(f"stages={stages} was asked for; give at least 1")
    graph = layer_graph(model)
    if split is not None:
        planned = stages_by_hand(graph, split, cluster.machine_names, stages)
        origin = "by hand"
    else:
        planned = _automatic(model, graph, cluster, objective, stages)
        origin = "equal estimated cost"
    targets = resolve_targets(cluster, {machine for stage in planned for machine in stage.machines})
    machines = tuple(
        PlannedMachine(machine.name, targets[machine.name], machine.threads)
        for machine in cluster.machines
        if machine.name in targets
    )
    return Plan(model.name, objective, origin, machines, planned)


def _automatic(
    model: Model, graph: LayerGraph, cluster: Cluster, objective: Objective, stages: int | None
) -> tuple[PlannedStage, ...]:
    seconds = estimated_seconds(model)
    if stages is None and objective == "latency":
        fastest = max(cluster.machines, key=lambda machine: machine.threads)
        return stages_of_equal_cost(graph, seconds, [fastest.name], [fastest.threads])
    count = stages or min(len(cluster.machines), len(graph.cut_points) + 1)
    chosen = [cluster.machines[index % len(cluster.machines)] for index in range(count)]
    return stages_of_equal_cost(
        graph, seconds, [machine.name for machine in chosen], [machine.threads for machine in chosen]
    )


def placement_of(model: Model, plan: Plan) -> Placement:
    """What a plan means for each operation of a model.

    Raises:
        PlanError: the plan leaves out a layer, names one twice or one that the model does not have, or has a stage that
            would wait on itself.
    """
    stage_of_layer: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            if layer in stage_of_layer:
                raise PlanError(
                    f"layer {layer!r} is in both {plan.stages[stage_of_layer[layer]].name} and {stage.name}"
                )
            stage_of_layer[layer] = index
    unknown = [layer for layer in stage_of_layer if layer not in set(model.layer_names)]
    if unknown:
        raise PlanError(f"the plan places layer {unknown[0]!r}, which model {model.name!r} does not have")
    missing = [layer for layer in model.layer_names if layer not in stage_of_layer]
    if missing:
        raise PlanError(f"the plan places no layer {missing[0]!r}, which model {model.name!r} has")
    _require_no_waiting(layer_graph(model), stage_of_layer, plan)
    return Placement(
        stages=tuple(_placed(stage) for stage in plan.stages),
        targets={machine.name: tvm_target(machine.target) for machine in plan.machines},
        stage_of={name: stage_of_layer[layer] for name, layer in model.layers.items()},
    )


def _placed(stage: PlannedStage) -> PlacedStage:
    if not stage.replicas:
        return PlacedStage(stage.name, stage.machine)
    return PlacedStage(stage.name, stage.machine, stage.machines, stage.turns)


def tvm_target(target: Mapping[str, Any]) -> tvm.target.Target:
    try:
        return tvm.target.Target(dict(target))
    except Exception as error:
        raise PlanError(f"TVM does not accept the target {dict(target)}: {error}") from error


def _require_no_waiting(graph: LayerGraph, stage_of: Mapping[str, int], plan: Plan) -> None:
    for layer in graph.layers:
        for before in graph.predecessors[layer]:
            if stage_of[before] > stage_of[layer]:
                first, later = plan.stages[stage_of[layer]], plan.stages[stage_of[before]]
                raise PlanError(
                    f"{first.name} on {first.machine} would wait on itself or on a later stage: its layer {layer!r} "
                    f"needs {before!r} of {later.name} on {later.machine}; stages must stand in the order in which "
                    "values flow, so move one of the two layers or split the stage"
                )
    for index, stage in enumerate(plan.stages):
        if all(layer in graph.independent for layer in stage.layers):
            raise PlanError(f"{plan.stages[index].name} on {stage.machine} has no layer that depends on an input")
