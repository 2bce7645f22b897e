"""Communication: printable modules that show a split, made from the same functions that are compiled.

`annotated_module` returns the whole graph with a device on every value: one `VDevice` per machine, whose memory scope
is the machine's name. The operations of a stage are consecutive. A value is transferred once to each machine that needs
it, by an ``R.to_vdevice`` in the first stage that needs it.

`machine_modules` returns one module per machine. A stage receives its inputs by
``R.call_packed("tvm_split.receive", name, source)``, computes, and sends its results by
``R.call_packed("tvm_split.send", tensor, name, destination)``, once per destination. A source or destination is a
machine's name or ``client``. A machine that sends to itself passes a tensor between two of its stages, in memory.

A stage with replicas is in the module of each of their machines, with the attributes ``replica`` and
``replica_schedule``. In
other stages it is one source or destination, ``machine-b or machine-c``: its round-robin schedule chooses the replica
of each micro-batch. (The annotated graph shows such a stage on its first machine.)
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tvm
from tvm import relax
from tvm.ir import StringImm
from tvm.relax.global_info import VDevice

from relay_passes.ir import Builder, emit_operations, new_function, operations_of, returned_fields, substitute
from relay_passes.partition import Computation

RECEIVE = "tvm_split.receive"
SEND = "tvm_split.send"
CLIENT = "client"


class PlacedStage(Protocol):
    """A stage with the machines that compute it: one, or one for each replica.

    Micro-batch ``s`` is computed by ``machines[schedule[s % len(schedule)]]``, where ``schedule`` is
    `replica_schedule`. Graphs show a stage on its first machine.
    """

    @property
    def machines(self) -> tuple[str, ...]: ...

    @property
    def replica_schedule(self) -> tuple[int, ...]: ...


Parts = Sequence[tuple[PlacedStage, Computation]]
"""The stages of a whole graph in topological order, each with its computation."""


def virtual_devices(parts: Parts, targets: Mapping[str, tvm.target.Target]) -> dict[str, VDevice]:
    """Return one `VDevice` per machine that has a stage; devices of the same target kind are numbered from 0."""
    counts: dict[str, int] = {}
    devices: dict[str, VDevice] = {}
    for machine in dict.fromkeys(machine for stage, _ in parts for machine in stage.machines):
        kind = targets[machine].kind.name
        devices[machine] = VDevice(targets[machine], counts.get(kind, 0), machine)
        counts[kind] = counts.get(kind, 0) + 1
    return devices


def annotated_module(
    parameters: Sequence[relax.Var],
    cuts: Sequence[relax.VarBinding],
    parts: Parts,
    outputs: Sequence[str],
    devices: Mapping[str, VDevice],
) -> tvm.IRModule:
    """Return the stages as one graph that takes the model's ``parameters`` and returns the tensors named ``outputs``.

    ``cuts`` are the slices of parameters that the client computes before it sends them; they are on no device.
    """
    tensors: dict[str, relax.Expr] = {parameter.name: parameter for parameter in parameters}
    # The tensors on each machine, by the machine's and the tensor's name.
    present: dict[tuple[str, str], relax.Expr] = {}

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        emit_operations(builder, cuts, tensors)
        for stage, part in parts:
            machine = stage.machines[0]
            for name in part.received:
                if (machine, name) not in present:
                    transferred = relax.op.to_vdevice(tensors[name], devices[machine])
                    hint = f"{name}_on_{machine.replace('-', '_')}"
                    present[machine, name] = builder.emit(transferred, name_hint=hint)
            values = {
                parameter.name: present[machine, name]
                for parameter, name in zip(part.function.params, part.received, strict=True)
            }
            sent = _emit_stage(builder, part, values)
            tensors.update(sent)
            present.update({(machine, name): value for name, value in sent.items()})
        return [tensors[name] for name in outputs]

    module = tvm.IRModule({"main": new_function("main", parameters, emit)})
    module.update_global_info("vdevice", list(devices.values()))
    return module


def machine_modules(parts: Parts, outputs: Sequence[str], devices: Mapping[str, VDevice]) -> dict[str, tvm.IRModule]:
    """Return a module with sends and receives for each machine, by its name, in the order of their first stages."""
    sources = {name: _written(stage) for stage, part in parts for name in part.sent}
    destinations: dict[str, dict[str, None]] = {}
    for stage, part in parts:
        for name in part.received:
            destinations.setdefault(name, {}).setdefault(_written(stage))
    for name in outputs:
        destinations.setdefault(name, {}).setdefault(CLIENT)
    functions: dict[str, dict[str, relax.Function]] = {}
    for stage, part in parts:
        for replica, machine in enumerate(stage.machines):
            attributes: dict[str, Any] = {"machine": machine}
            if len(stage.machines) > 1:
                attributes |= {"replica": replica, "replica_schedule": list(stage.replica_schedule)}
            builder = Builder()
            with builder.function(part.name, [], attrs=attributes, pure=False):
                values: dict[str, relax.Expr] = {}
                for parameter, name in zip(part.function.params, part.received, strict=True):
                    kind = relax.TensorType(parameter.ty.shape, parameter.ty.dtype, devices[machine])
                    operands = [StringImm(name), StringImm(sources.get(name, CLIENT))]
                    receive = relax.Call(relax.ExternFunc(RECEIVE), operands, ty_args=[kind])
                    values[parameter.name] = builder.emit(receive, name_hint=name)
                for name, value in _emit_stage(builder, part, values).items():
                    for destination in destinations[name]:
                        operands = [value, StringImm(name), StringImm(destination)]
                        send = relax.Call(relax.ExternFunc(SEND), operands, ty_args=[relax.TupleType([])])
                        builder.emit(send, name_hint="sent")
                builder.emit_func_output(relax.Tuple([]))
            functions.setdefault(machine, {})[part.name] = builder.get()[part.name]
    modules = {machine: tvm.IRModule(stages) for machine, stages in functions.items()}
    for module in modules.values():
        # List all devices, since the number of a device in the printed types is its position in this list.
        module.update_global_info("vdevice", list(devices.values()))
    return modules


def _emit_stage(
    builder: relax.BlockBuilder, part: Computation, values: Mapping[str, relax.Expr]
) -> dict[str, relax.Expr]:
    """Emit a stage's operations; return the tensors that it sends, by name."""
    inside = dict(values)
    emit_operations(builder, operations_of(part.function), inside)
    return {
        name: substitute(field, inside) for name, field in zip(part.sent, returned_fields(part.function), strict=True)
    }


def _written(stage: PlacedStage) -> str:
    return " or ".join(stage.machines)
