"""Annotate: give every operation its device, and make every crossing an ``R.to_vdevice``.

Requires: a whole graph (see `relay_passes.contract.require_whole_graph`) and a placement of all its variables.
Ensures: one `VDevice` per machine, whose memory scope is the machine's name, so that the printed IR shows on which
machine every value lies; the operations of a stage stand together, in the order of the stages, and the attribute
``stages`` of ``main`` names the variable each stage starts with, and all machines and turns of a stage with replicas,
which the graph shows on the first; every value that crosses to another machine crosses once per machine, by an
``R.to_vdevice`` in the first stage that needs it.

A value that depends on no input (a mask, a table) crosses nothing: each stage that needs it computes it again.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir.transform import PassContext
from tvm.relax.global_info import VDevice

from tvm_split.relay_passes.contract import (
    bindings_of,
    main_function,
    require_whole_graph,
    returned_fields,
    used_variables,
)
from tvm_split.relay_passes.errors import ContractError, SelfWaitError
from tvm_split.relay_passes.placement import PlacedStage, Placement
from tvm_split.relay_passes.substitute import substitute


@tvm.transform.module_pass(opt_level=0, name="AnnotateDevices")
class AnnotateDevices:
    """Annotate a whole graph with the devices of a `Placement`."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        require_whole_graph(module)
        return _Annotator(main_function(module), self.placement).annotated_module()


def virtual_devices(placement: Placement) -> dict[str, VDevice]:
    """One `VDevice` per machine that holds a stage; devices of one target kind are counted from 0."""
    counts: dict[str, int] = {}
    devices: dict[str, VDevice] = {}
    for machine in (machine for stage in placement.stages for machine in stage.machines):
        if machine not in devices:
            target = placement.targets[machine]
            kind = target.kind.name
            devices[machine] = VDevice(target, counts.get(kind, 0), machine)
            counts[kind] = counts.get(kind, 0) + 1
    return devices


class _Annotator:
    def __init__(self, function: relax.Function, placement: Placement) -> None:
        self._function = function
        self._placement = placement
        self._devices = virtual_devices(placement)
        self._builder = relax.BlockBuilder()
        self._bindings = {binding.var.name: binding for binding in bindings_of(function)}
        self._returned = returned_fields(function)
        self._result_name = _name_of_result(function)
        self._independent = _names_without_inputs(function)
        self._require_complete_placement()
        self._parameters = {parameter.name for parameter in function.params}
        # (variable, machine) → the variable that holds its value there; (variable, stage) for what is computed again.
        self._first_variables: list[str] = []
        self._on_machine: dict[tuple[str, str], relax.Var] = {}
        self._in_stage: dict[tuple[str, int], relax.Var] = {}

    def annotated_module(self) -> tvm.IRModule:
        with self._builder.function("main", list(self._function.params)):
            with self._builder.dataflow():
                for stage in range(len(self._placement.stages)):
                    self._emit_stage(stage)
                fields = [self._returned_value(field) for field in self._returned]
                result = self._builder.emit_output(relax.Tuple(fields), name_hint=self._result_name)
            self._builder.emit_func_output(result)
        module = self._builder.get()
        module.update_global_info("vdevice", list(self._devices.values()))
        stages = [
            {"name": stage.name, "machine": stage.machine, "first": first, **_replicas(stage)}
            for stage, first in zip(self._placement.stages, self._first_variables, strict=True)
        ]
        module["main"] = module["main"].with_attr("stages", stages)
        return module

    def _require_complete_placement(self) -> None:
        for name in self._bindings:
            if name != self._result_name and name not in self._placement.stage_of:
                raise ContractError(f"the placement names no stage for {name!r}")

    def _emit_stage(self, stage: int) -> None:
        self._first_variables.append("")
        names = [
            name
            for name in self._bindings
            if name != self._result_name
            and self._placement.stage_of[name] == stage
            and (name not in self._independent or self._is_returned(name))
        ]
        if not names:
            raise ContractError(f"{self._placement.stages[stage].name!r} has no operation that depends on an input")
        for name in names:
            self._emit(name, stage)

    def _emit(self, name: str, stage: int) -> relax.Var:
        binding = self._bindings[name]
        local = {used.name: self._local(used, stage, name) for used in used_variables(binding.value)}
        value = substitute(binding.value, local)
        # A value that is computed again in another stage gets a name of its own from the builder.
        variable = self._bind(value, name)
        self._in_stage[name, stage] = variable
        machine = self._placement.stages[stage].machine
        self._on_machine.setdefault((name, machine), variable)
        return variable

    def _bind(self, value: relax.Expr, name: str) -> relax.Var:
        variable = self._builder.emit(value, name_hint=name)
        self._first_variables[-1] = self._first_variables[-1] or variable.name
        return variable

    def _local(self, used: relax.Var, stage: int, consumer: str) -> relax.Var:
        """The variable that holds ``used`` for an operation of ``stage``, brought there if it must be."""
        name = used.name
        machine = self._placement.stages[stage].machine
        if name in self._independent:
            return self._in_stage[name, stage] if (name, stage) in self._in_stage else self._emit(name, stage)
        if (name, machine) in self._on_machine:
            return self._on_machine[name, machine]
        if name in self._parameters:
            source = used
        else:
            home = self._placement.stage_of[name]
            if (name, home) not in self._in_stage:
                first, later = self._placement.stages[stage].name, self._placement.stages[home].name
                raise SelfWaitError(
                    f"{consumer!r} in {first} needs {name!r}, which is computed in {later}, and {later} stands after "
                    f"{first}; a stage may need only tensors of the stages before it"
                )
            source = self._in_stage[name, home]
            if not isinstance(source.ty, relax.TensorType):
                raise ContractError(
                    f"{name!r} is a {source.ty}, not a tensor, and is used in stage {home} and stage {stage}; "
                    "place the operations that take it apart in the stage that makes it"
                )
        transfer = relax.op.to_vdevice(source, self._devices[machine])
        variable = self._bind(transfer, f"{name}_on_{machine.replace('-', '_')}")
        self._on_machine[name, machine] = variable
        return variable

    def _is_returned(self, name: str) -> bool:
        return any(isinstance(field, relax.Var) and field.name == name for field in self._returned)

    def _returned_value(self, field: relax.Expr) -> relax.Expr:
        if not isinstance(field, relax.Var) or field.name in self._parameters:
            return field
        return self._in_stage[field.name, self._placement.stage_of[field.name]]


def _replicas(stage: PlacedStage) -> dict[str, list[str] | list[int]]:
    """The attributes that a stage has only if several machines take turns."""
    return {"replicas": list(stage.replicas), "turns": list(stage.turns)} if stage.replicas else {}


def _name_of_result(function: relax.Function) -> str:
    """The name of the variable that holds the returned tuple; ``result`` where the tuple is returned directly."""
    result = function.body.body
    return result.name if isinstance(result, relax.Var) else "result"


def _names_without_inputs(function: relax.Function) -> frozenset[str]:
    """Names of the variables whose value depends on no parameter of the function."""
    dependent = {parameter.name for parameter in function.params}
    independent: set[str] = set()
    for binding in bindings_of(function):
        if any(used.name in dependent for used in used_variables(binding.value)):
            dependent.add(binding.var.name)
        else:
            independent.add(binding.var.name)
    return frozenset(independent)
