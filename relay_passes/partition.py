"""Partition: cut an annotated graph into one function per stage.

Requires: a module that `relay_passes.annotate.AnnotateDevices` made.
Ensures: one function per stage, named like the stage, whose parameters are the tensors it needs from elsewhere (each
once, under the name it has where it is made) and which returns a tuple of the tensors that are needed elsewhere; its
attribute ``machine`` names the machine, and of a stage whose machines take turns the attributes ``replicas`` and
``turns`` name all of them. ``main`` calls the stages in topological order, with an ``R.to_vdevice`` for every tensor
and machine that it crosses to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from tvm_split.relay_passes.contract import (
    bindings_of,
    is_transfer,
    main_function,
    returned_fields,
    used_variables,
)
from tvm_split.relay_passes.errors import ContractError
from tvm_split.relay_passes.substitute import substitute


@tvm.transform.module_pass(opt_level=0, name="PartitionStages")
class PartitionStages:
    """Make one function per stage out of an annotated graph."""

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        function = main_function(module)
        if function.attrs is None or "stages" not in function.attrs:
            raise ContractError("'main' has no attribute 'stages': run AnnotateDevices first")
        return _Partitioner(module, function).partitioned_module()


@dataclass
class _Region:
    """The bindings of one stage, and what crosses its border."""

    name: str
    machine: str
    replicas: dict[str, Any]
    bindings: list[relax.VarBinding] = field(default_factory=list)
    transfers: list[relax.VarBinding] = field(default_factory=list)
    inputs: dict[str, relax.Var] = field(default_factory=dict)
    outputs: dict[str, relax.Var] = field(default_factory=dict)


class _Partitioner:
    def __init__(self, module: tvm.IRModule, function: relax.Function) -> None:
        self._module = module
        self._function = function
        self._returned = returned_fields(function)
        self._regions = _regions(function)
        self._source_of_transfer = {
            binding.var.name: binding.value.args[0] for region in self._regions for binding in region.transfers
        }
        self._find_borders()

    def _find_borders(self) -> None:
        home = {binding.var.name: region for region in self._regions for binding in region.bindings}
        parameters = {parameter.name for parameter in self._function.params}
        for region in self._regions:
            for binding in region.bindings:
                for used in used_variables(binding.value):
                    if home.get(used.name) is not region:
                        source = self._source_of_transfer.get(used.name, used)
                        region.inputs[source.name] = used
                        if source.name not in parameters:
                            home[source.name].outputs[source.name] = source
        for returned in self._returned:
            if not isinstance(returned, relax.Var):
                raise ContractError(f"the model returns {returned}, which is no variable")
            if returned.name not in parameters:
                home[returned.name].outputs[returned.name] = returned

    def partitioned_module(self) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        for region in self._regions:
            builder.add_func(_stage_function(region), region.name)
        functions = {variable.name_hint: variable for variable in builder.get().get_global_vars()}
        # Value of a tensor in main, by the name it has in the annotated graph.
        values: dict[str, relax.Expr] = {parameter.name: parameter for parameter in self._function.params}
        with builder.function("main", list(self._function.params)):
            with builder.dataflow():
                for region in self._regions:
                    for transfer in region.transfers:
                        value = relax.Call(
                            transfer.value.op, [values[transfer.value.args[0].name]], transfer.value.attrs
                        )
                        values[transfer.var.name] = builder.emit(value, name_hint=transfer.var.name)
                    arguments = [values[used.name] for used in region.inputs.values()]
                    result = builder.emit(
                        relax.Call(functions[region.name], arguments), name_hint=f"{region.name}_outputs"
                    )
                    for position, output in enumerate(region.outputs):
                        values[output] = builder.emit(relax.TupleGetItem(result, position), name_hint=output)
                returned = builder.emit_output(relax.Tuple([values[output.name] for output in self._returned]))
            builder.emit_func_output(returned)
        partitioned = builder.get()
        partitioned.update_global_info("vdevice", list(self._module.global_infos["vdevice"]))
        return partitioned


def _regions(function: relax.Function) -> list[_Region]:
    """The stages' bindings, cut where the attribute ``stages`` says that a stage starts."""
    stages = function.attrs["stages"]
    starts = {str(stage["first"]): stage for stage in stages}
    result_name = function.body.body.name
    regions: list[_Region] = []
    for binding in bindings_of(function):
        if binding.var.name in starts:
            stage = starts.pop(binding.var.name)
            replicas = {name: stage[name] for name in ("replicas", "turns") if name in stage}
            regions.append(_Region(str(stage["name"]), str(stage["machine"]), replicas))
        if binding.var.name == result_name:
            continue
        if not regions:
            raise ContractError(f"{binding.var.name!r} stands before the first stage")
        kind = regions[-1].transfers if is_transfer(binding.value) else regions[-1].bindings
        kind.append(binding)
    if starts:
        raise ContractError(f"no variable is named {sorted(starts)[0]!r}, with which a stage should start")
    return regions


def _stage_function(region: _Region) -> relax.Function:
    """The function of one stage: its inputs by name, then its bindings, then the tuple of its outputs."""
    parameters = {name: relax.Var(name, used.ty) for name, used in region.inputs.items()}
    values: dict[str, relax.Expr] = {used.name: parameters[name] for name, used in region.inputs.items()}
    builder = relax.BlockBuilder()
    with builder.function(region.name, list(parameters.values()), attrs={"machine": region.machine, **region.replicas}):
        with builder.dataflow():
            for binding in region.bindings:
                values[binding.var.name] = builder.emit(substitute(binding.value, values), name_hint=binding.var.name)
            outputs = builder.emit_output(relax.Tuple([values[name] for name in region.outputs]), name_hint="outputs")
        builder.emit_func_output(outputs)
    return builder.get()[region.name]


def stage_functions(module: tvm.IRModule) -> tuple[relax.Function, ...]:
    """The stages' functions of a partitioned module, in the order in which ``main`` calls them."""
    return tuple(
        module[binding.value.op]
        for binding in bindings_of(main_function(module))
        if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.GlobalVar)
    )
