"""Assign each operation of a model to a stage of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm

from relay_passes.partition import PlacedStage, Placement
from tvm_split.compiler.instruction_sets import cpu_part
from tvm_split.compiler.llvm_names import require_known_cpu, require_known_features
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.by_hand import near_names
from tvm_split.planner.graph import LayerGraph
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Stage


def placement_of(model: Model, plan: Plan) -> Placement:
    """Return the stage of each operation of a model by a plan, and the targets of its machines.

    Raises:
        PlanError: a layer is missing, unknown or in two stages; a stage would wait on itself or on a later stage; or
            no layer of a stage depends on an input.
    """
    stage_of_layer: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            if layer in stage_of_layer:
                raise PlanError(
                    f"layer {layer!r} is in both {plan.stages[stage_of_layer[layer]].name} and {stage.name}; take it "
                    "out of one"
                )
            stage_of_layer[layer] = index
    unknown = [layer for layer in stage_of_layer if layer not in set(model.layer_names)]
    if unknown:
        raise PlanError(
            f"the plan places layer {unknown[0]!r}, which model {model.name!r} does not have; "
            f"{near_names(model.graph, unknown[0])}"
        )
    missing = [layer for layer in model.layer_names if layer not in stage_of_layer]
    if missing:
        raise PlanError(f"the plan places no layer {missing[0]!r}, which model {model.name!r} has; add it to a stage")
    _require_no_waiting(model.graph, stage_of_layer, plan)
    return Placement(
        stages=tuple(placed(stage) for stage in plan.stages),
        targets={machine.name: tvm_target(machine.target) for machine in plan.machines},
        stage_of={name: stage_of_layer[layer] for name, layer in model.layers.items()},
    )


def placed(stage: Stage) -> PlacedStage:
    """Convert a plan's stage to the form that the passes of ``relay_passes`` take."""
    if len(stage.machines) == 1:
        return PlacedStage(stage.name, stage.machine)
    return PlacedStage(stage.name, stage.machine, stage.machines, stage.turns)


def tvm_target(target: Mapping[str, Any]) -> tvm.target.Target:
    """Return TVM's target; raise a `PlanError` if TVM does not accept it, or LLVM does not know its CPU or features."""
    cpu = cpu_part(target)
    require_known_cpu(cpu)
    require_known_features(cpu)  # checked first: TVM would let LLVM print warnings about them
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
