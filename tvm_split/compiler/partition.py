"""A partition: a model cut by a plan into one pure function per stage."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tvm
from tvm import relax
from tvm_ffi.structural import structural_hash

from relay_passes import communication
from relay_passes.boundary_layouts import BoundaryLayouts, in_common_layouts
from relay_passes.ir import main_function, shape_of
from relay_passes.partition import Computation, output_names, partition, verify_partition
from relay_passes.sharding.direct_gathers import range_of
from rpc_runtime.program.program import InputSlice
from rpc_runtime.program.specs import TensorSpec
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import tvm_target
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.placement.by_hand import why_unknown
from tvm_split.placement.graph import LayerGraph
from tvm_split.placement.plan import Plan
from tvm_split.placement.problem import Stage

_layouts: dict[tuple[str, int], BoundaryLayouts] = {}
"""Layouts of stages so far, by target and form."""


@dataclass(frozen=True)
class Partition:
    """A model, a plan without sharded stages, and the stage of each operation, by the name of its variable.

    ``inputs`` are the parameters of the model. An input that machines take only in slices is replaced in the graph by
    the slices, which ``cuts`` compute. ``origins`` has, for each stage of this plan, the position of its stage in the
    original plan. Cutting the graph and choosing layouts happens when ``computations`` is first read.
    """

    model: Model
    plan: Plan
    stage_of: Mapping[str, int]
    inputs: tuple[relax.Var, ...]
    origins: tuple[int, ...]
    cuts: tuple[relax.VarBinding, ...] = ()

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the graph's outputs, in the order of the model's."""
        return output_names(main_function(self.model.module))

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        """The stages' pure functions, verified, with transferred tensors in the layouts in which both sides compute.

        Raises:
            SelfWaitError, ContractError: as of `relay_passes.partition`.
        """
        module = self.model.module
        stages = partition(module, self.stage_of, [stage.name for stage in self.plan.stages])
        verify_partition(module, stages)
        return in_common_layouts(stages, self.outputs, self._laid_out)

    def _laid_out(self, index: int, computation: Computation) -> Sequence[BoundaryLayouts]:
        groups = self.plan.machines_by_target(self.plan.stages[index])
        # Layouts depend neither on names nor on weights, so the stages of several machines and plans share them.
        form = structural_hash(computation.function.without_attr("global_symbol"), skip_tensor_content=True)
        layouts = []
        for target in (self.plan.machine(first).target for first, *_ in groups):
            key = json.dumps(dict(target), sort_keys=True), form
            if key not in _layouts:
                phases = StageCompiler(target).lower(computation.function, until="layout")
                _layouts[key] = BoundaryLayouts.of(main_function(phases["layout"]))
            layouts.append(_layouts[key])
        return layouts

    @property
    def parts(self) -> list[tuple[Stage, Computation]]:
        return list(zip(self.plan.stages, self.computations, strict=True))

    @property
    def input_slices(self) -> tuple[InputSlice, ...]:
        """The slices of inputs that the client computes."""
        ranges = [(cut, range_of(cut)) for cut in self.cuts]
        return tuple(
            InputSlice(tensor_spec(cut.var.name, cut.var.ty), region.source, region.axis, region.begin)
            for cut, region in ranges
            if region is not None
        )

    @cached_property
    def _devices(self) -> Mapping[str, relax.VDevice]:
        return communication.virtual_devices(
            self.parts, {machine.name: tvm_target(machine.target) for machine in self.plan.machines}
        )

    def annotated(self) -> tvm.IRModule:
        """Return the whole graph, with a device on every value and ``R.to_vdevice`` at every transfer."""
        return communication.annotated_module(self.inputs, self.cuts, self.parts, self.outputs, self._devices)

    def machine_modules(self) -> dict[str, tvm.IRModule]:
        """Return the work of each machine, with receive and send."""
        return communication.machine_modules(self.parts, self.outputs, self._devices)


def tensor_spec(name: str, tensor: relax.TensorType) -> TensorSpec:
    """Return name, shape and dtype of a tensor type with a static shape."""
    return TensorSpec(name, shape_of(tensor), str(tensor.dtype))


def stages_of(model: Model, plan: Plan) -> dict[str, int]:
    """Return the index in ``plan.stages`` of the stage of each operation, by the name of the operation's variable.

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
    known = set(model.layer_names)
    unknown = [layer for layer in stage_of_layer if layer not in known]
    if unknown:
        raise PlanError(
            f"the plan for model {model.name!r} places layer {unknown[0]!r}, {why_unknown(model.graph, unknown[0])}"
        )
    missing = [layer for layer in model.layer_names if layer not in stage_of_layer]
    if missing:
        raise PlanError(f"the plan places no layer {missing[0]!r}, which model {model.name!r} has; add it to a stage")
    _require_no_waiting(model.graph, stage_of_layer, plan)
    return {name: stage_of_layer[layer] for name, layer in model.layers.items()}


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
