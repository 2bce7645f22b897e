"""Partition: cut a whole graph into one pure function per stage.

Requires: a whole graph (see `relay_passes.ir.require_whole_graph`) and a placement of all its variables.
Ensures: one `Computation` per stage, in the order of the stages. It takes the tensors that the stage needs from
elsewhere, each once, and returns those that are needed elsewhere. All keep their names in the graph. No stage needs a
tensor of a later one.

A value that depends on no input (a mask, a table) is not transferred: each stage that needs it computes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax

from relay_passes.ir import (
    ContractError,
    SelfWaitError,
    dependent_names,
    emit_operations,
    main_function,
    operations_of,
    require_whole_graph,
    returned_fields,
    substitute,
    used_variables,
)


@dataclass(frozen=True)
class PlacedStage:
    """A stage's name and the machine that runs it, or the machines of its replicas.

    If there are several, ``replicas`` names all and ``machine`` the first. Micro-batch ``s`` is computed by the replica
    with the number ``turns[s % len(turns)]``. Graphs show a stage on its first machine.
    """

    name: str
    machine: str
    replicas: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()

    @property
    def machines(self) -> tuple[str, ...]:
        return self.replicas or (self.machine,)


@dataclass(frozen=True)
class Placement:
    """Stages in topological order, the target of every machine, and the stage of every variable.

    ``stage_of`` maps the name of each bound variable to an index into ``stages``.
    """

    stages: tuple[PlacedStage, ...]
    targets: Mapping[str, tvm.target.Target]
    stage_of: Mapping[str, int]


@dataclass(frozen=True)
class Computation:
    """The pure function that a stage computes, independent of a device.

    ``function`` takes the received tensors, in the order of ``received``, and returns a tuple of the sent ones, in the
    order of ``sent``; both hold the tensors' names. ``origins`` maps the names of other forms of a tensor, added by
    passes, to the tensor's name.
    """

    name: str
    function: relax.Function
    received: tuple[str, ...]
    sent: tuple[str, ...]
    origins: Mapping[str, str] = field(default_factory=dict)


def partition(module: tvm.IRModule, placement: Placement) -> tuple[Computation, ...]:
    """Return the stages of a whole graph.

    Raises:
        SelfWaitError: a stage needs a tensor that a later one makes.
        ContractError: the graph or the placement is not as required; a transferred value is no tensor; a stage has
            nothing to compute.
    """
    require_whole_graph(module)
    function = main_function(module)
    bindings = {binding.var.name: binding for binding in operations_of(function)}
    for name in bindings:
        if name not in placement.stage_of:
            raise ContractError(f"the placement names no stage for {name!r}")
    returned = output_names(function)
    contents, received = [], []
    for index, names in enumerate(_contents(function, bindings, returned, placement)):
        contents.append(names)
        received.append(_received(index, names, bindings, placement))
    wanted = {*returned}.union(*received)
    return tuple(
        computation_of(
            stage.name,
            {name: relax.Var(name, variable.ty) for name, variable in taken.items()},
            [bindings[name] for name in names],
            {name: bindings[name].var for name in names if name in wanted and placement.stage_of[name] == index},
        )
        for index, (stage, names, taken) in enumerate(zip(placement.stages, contents, received, strict=True))
    )


def output_names(function: relax.Function) -> tuple[str, ...]:
    """Return the names of the variables that a function returns; raise `ContractError` if it returns anything else."""
    fields = returned_fields(function)
    for each in fields:
        if not isinstance(each, relax.Var):
            raise ContractError(f"the model returns {each}, which is no variable")
    return tuple(each.name for each in fields)


def _contents(
    function: relax.Function, bindings: Mapping[str, relax.VarBinding], returned: Sequence[str], placement: Placement
) -> Iterator[list[str]]:
    """Yield the names of the variables that each stage binds, in the graph's order."""
    dependent = dependent_names(function)
    for index, stage in enumerate(placement.stages):
        waiting = [
            name for name in bindings if placement.stage_of[name] == index and (name in dependent or name in returned)
        ]
        if not waiting:
            raise ContractError(f"{stage.name!r} has no operation that depends on an input")
        found = set(waiting)
        while waiting:
            used = {each.name for each in used_variables(bindings[waiting.pop()].value)}
            again = used - dependent - found
            found |= again
            waiting += again
        yield [name for name in bindings if name in found]


def _received(
    index: int, names: Sequence[str], bindings: Mapping[str, relax.VarBinding], placement: Placement
) -> dict[str, relax.Var]:
    """Return the variables that a stage receives, by name, in the order of their first use."""
    found: dict[str, relax.Var] = {}
    for consumer in names:
        for used in used_variables(bindings[consumer].value):
            if used.name in names:
                continue
            home = placement.stage_of[used.name] if used.name in bindings else -1
            if home > index:
                first, later = placement.stages[index].name, placement.stages[home].name
                raise SelfWaitError(
                    f"{consumer!r} in {first} needs {used.name!r}, which is computed in {later}, and {later} stands "
                    f"after {first}; a stage may need only tensors of the stages before it"
                )
            if not isinstance(used.ty, relax.TensorType):
                raise ContractError(
                    f"{used.name!r} is a {used.ty}, not a tensor, and is used in stage {home} and stage {index}; "
                    "place the operations that take it apart in the stage that makes it"
                )
            found[used.name] = used
    return found


def computation_of(
    name: str,
    parameters: Mapping[str, relax.Var],
    operations: Iterable[relax.VarBinding],
    sent: Mapping[str, relax.Expr],
) -> Computation:
    """Return a computation of ``operations`` in order; the keys of ``parameters`` and ``sent`` name their tensors."""
    values: dict[str, relax.Expr] = dict(parameters)
    builder = relax.BlockBuilder()
    with builder.function(name, list(parameters.values())):
        with builder.dataflow():
            emit_operations(builder, operations, values)
            results = [substitute(value, values) for value in sent.values()]
            outputs = builder.emit_output(relax.Tuple(results), name_hint="outputs")
        builder.emit_func_output(outputs)
    return Computation(name, builder.get()[name], tuple(parameters), tuple(sent))
