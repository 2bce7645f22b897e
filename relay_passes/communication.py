"""Communication: one module per machine, in which a stage receives what it needs, computes, and sends what others need.

Requires: a module that `relay_passes.partition.PartitionStages` made.
Ensures: for each machine a module with its stages as impure functions without parameters or results, that read like
what the machine does: ``R.call_packed("tvm_split.receive", name, source)`` for every tensor from elsewhere, the
operations, and ``R.call_packed("tvm_split.send", tensor, name, destination)`` once per destination machine. A source or
destination is a machine's name or ``client``; a machine that sends to itself hands a tensor from one of its stages to
another, in memory. A stage with replicas stands in the module of each of their machines, with the attributes
``replica`` and ``turns``; to others it is one source or destination, ``machine-b or machine-c``, and each micro-batch
goes to the one whose turn it is.

These modules are the form in which the split is shown, kept and compiled: `computation` gives back the pure function
between receiving and sending. (What crosses may get another layout after that: `relay_passes.exchange_layouts`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import StringImm
from tvm.relax.global_info import VDevice

from tvm_split.relay_passes.contract import bindings_of, is_transfer, main_function, returned_fields
from tvm_split.relay_passes.errors import ContractError
from tvm_split.relay_passes.partition import stage_functions
from tvm_split.relay_passes.substitute import on_device, substitute, without_device

RECEIVE = "tvm_split.receive"
SEND = "tvm_split.send"
CLIENT = "client"


@dataclass(frozen=True)
class Computation:
    """The pure part of a stage.

    ``function`` takes the received tensors, in the order of ``received``, and returns a tuple of the sent ones, in the
    order of ``sent``; both hold the tensors' names.
    """

    name: str
    function: relax.Function
    received: tuple[str, ...]
    sent: tuple[str, ...]


def machine_modules(module: tvm.IRModule) -> dict[str, tvm.IRModule]:
    """The communicating module of every machine, by the machine's name, in the order of their first stages."""
    sources = _sources(module)
    destinations = _destinations(module)
    functions: dict[str, dict[str, relax.Function]] = {}
    devices = {str(device.memory_scope): device for device in module.global_infos["vdevice"]}
    for stage in stage_functions(module):
        name = str(stage.attrs["global_symbol"])
        for replica, machine in enumerate(_machines(stage)):
            turns = {"replica": replica, "turns": stage.attrs["turns"]} if "turns" in stage.attrs else {}
            attributes = {"machine": machine, **turns}
            moved_to = devices[machine] if replica else None
            functions.setdefault(machine, {})[name] = _communicating(
                stage, name, attributes, sources, destinations, moved_to
            )
    modules = {}
    for machine, stages in functions.items():
        modules[machine] = tvm.IRModule(stages)
        # All devices, since a device's number in the printed types is its place in this list.
        modules[machine].update_global_info("vdevice", list(module.global_infos["vdevice"]))
    return modules


def computation(stage: relax.Function) -> Computation:
    """The pure function between receiving and sending of a communicating stage, on no device in particular."""
    name = str(stage.attrs["global_symbol"])
    parameters: dict[str, relax.Var] = {}
    values: dict[str, relax.Expr] = {}
    operations: dict[str, relax.Expr] = {}
    sent: dict[str, relax.Expr] = {}
    for binding in bindings_of(stage):
        packed = _packed_name(binding.value)
        if packed == RECEIVE:
            tensor = str(binding.value.args[0].value)
            parameters[tensor] = relax.Var(tensor, without_device(binding.var.ty))
            values[binding.var.name] = parameters[tensor]
        elif packed == SEND:
            sent.setdefault(str(binding.value.args[1].value), binding.value.args[0])
        else:
            operations[binding.var.name] = binding.value
    return computation_of(name, parameters, values, operations, sent)


def computation_of(
    name: str,
    parameters: Mapping[str, relax.Var],
    values: Mapping[str, relax.Expr],
    operations: Mapping[str, relax.Expr],
    sent: Mapping[str, relax.Expr],
) -> Computation:
    """A computation of ``operations`` in their order, by the names of their variables.

    ``values`` are what stands for variables that no operation binds; ``parameters`` and ``sent`` go by their tensors.
    """
    bound = dict(values)
    builder = relax.BlockBuilder()
    with builder.function(name, list(parameters.values())):
        with builder.dataflow():
            for variable, value in operations.items():
                bound[variable] = builder.emit(substitute(value, bound), name_hint=variable)
            results = [substitute(value, bound) for value in sent.values()]
            outputs = builder.emit_output(relax.Tuple(results), name_hint="outputs")
        builder.emit_func_output(outputs)
    return Computation(name, builder.get()[name], tuple(parameters), tuple(sent))


def _machines(stage: relax.Function) -> tuple[str, ...]:
    """The machines that run a stage: several if it has replicas."""
    if "replicas" in stage.attrs:
        return tuple(str(machine) for machine in stage.attrs["replicas"])
    return (str(stage.attrs["machine"]),)


def _communicating(
    stage: relax.Function,
    name: str,
    attributes: Mapping[str, Any],
    sources: dict[str, str],
    destinations: dict[str, tuple[str, ...]],
    device: VDevice | None,
) -> relax.Function:
    """``device`` is where to, if not where the stage's types say."""
    builder = relax.BlockBuilder()
    values: dict[str, relax.Expr] = {}
    with builder.function(name, [], attrs=dict(attributes), pure=False):
        for parameter in stage.params:
            receive = relax.Call(
                relax.ExternFunc(RECEIVE),
                [StringImm(parameter.name), StringImm(sources[parameter.name])],
                ty_args=[parameter.ty if device is None else on_device(parameter.ty, device)],
            )
            values[parameter.name] = builder.emit(receive, name_hint=parameter.name)
        result_name = stage.body.body.name
        for binding in bindings_of(stage):
            if binding.var.name != result_name:
                values[binding.var.name] = builder.emit(substitute(binding.value, values), name_hint=binding.var.name)
        for field in returned_fields(stage):
            for destination in destinations[field.name]:
                send = relax.Call(
                    relax.ExternFunc(SEND),
                    [values[field.name], StringImm(field.name), StringImm(destination)],
                    ty_args=[relax.TupleType([])],
                )
                builder.emit(send, name_hint="sent")
        builder.emit_func_output(relax.Tuple([]))
    return builder.get()[name]


def _sources(module: tvm.IRModule) -> dict[str, str]:
    """Tensor name to the machine that makes it, or `CLIENT`."""
    sources = {parameter.name: CLIENT for parameter in main_function(module).params}
    for stage in stage_functions(module):
        for field in returned_fields(stage):
            sources[field.name] = " or ".join(_machines(stage))
    return sources


def _destinations(module: tvm.IRModule) -> dict[str, tuple[str, ...]]:
    """Tensor name to the machines it is sent to, each once, then `CLIENT` where the model returns it."""
    found: dict[str, dict[str, None]] = {}
    for stage in stage_functions(module):
        for parameter in stage.params:
            found.setdefault(parameter.name, {}).setdefault(" or ".join(_machines(stage)))
    main = main_function(module)
    values = {binding.var.name: binding.value for binding in bindings_of(main)}
    for field in returned_fields(main):
        if field.name in values and is_transfer(values[field.name]):
            raise ContractError(f"the model returns {field.name!r}, a transfer")
        found.setdefault(field.name, {}).setdefault(CLIENT)
    return {name: tuple(machines) for name, machines in found.items()}


def _packed_name(expression: relax.Expr) -> str | None:
    if isinstance(expression, relax.Call) and isinstance(expression.op, relax.ExternFunc):
        return str(expression.op.global_symbol)
    return None
