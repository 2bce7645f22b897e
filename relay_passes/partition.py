"""Partition: cut a whole graph into one pure function per stage, and verify that the stages compute its outputs.

Requires: a whole graph (see `relay_passes.ir.require_whole_graph`) and the stage of each of its variables.
Ensures: one `Computation` per stage, in the order of the stages. It takes the tensors that the stage needs from
elsewhere, each once, and returns those that are needed elsewhere. All keep their names in the graph. No stage needs a
tensor of a later one.

A value that depends on no input (a mask, a table) is not transferred: each stage that needs it computes it again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm_ffi.structural import StructuralKey, structural_equal

from relay_passes.ir import (
    ContractError,
    SelfWaitError,
    dependent_names,
    emit_operations,
    main_function,
    new_function,
    operations_of,
    reached,
    require_whole_graph,
    returned_fields,
    substitute,
    used_variables,
)


@dataclass(frozen=True)
class Computation:
    """The pure function that a stage computes, independent of a device.

    ``function`` takes the tensors named in ``received``, and returns a tuple of those named in ``sent``, in this order.
    Passes may add other forms of a tensor, such as another layout: ``origins`` maps their names to the tensor's name.
    """

    name: str
    function: relax.Function
    received: tuple[str, ...]
    sent: tuple[str, ...]
    origins: Mapping[str, str] = field(default_factory=dict)

    def layers(self, layers: Mapping[str, str]) -> dict[str, str]:
        """Return ``layers`` (variable name → layer name), with the names in ``origins`` added."""
        return {**layers, **{form: layers[name] for form, name in self.origins.items() if name in layers}}


def partition(module: tvm.IRModule, stage_of: Mapping[str, int], stages: Sequence[str]) -> tuple[Computation, ...]:
    """Return the stages of a whole graph, in the topological order of the names in ``stages``.

    ``stage_of`` maps the name of each bound variable to an index into ``stages``.

    Raises:
        SelfWaitError: a stage needs a tensor that a later one makes.
        ContractError: the graph is not as required, or a variable has no stage; a transferred value is not a tensor; a
            stage has nothing to compute.
    """
    require_whole_graph(module)
    function = main_function(module)
    bindings = {binding.var.name: binding for binding in operations_of(function)}
    for name in bindings:
        if name not in stage_of:
            raise ContractError(f"no stage is named for {name!r}")
    returned = output_names(function)
    contents, received = [], []
    for index, names in enumerate(_contents(function, bindings, returned, stage_of, stages)):
        contents.append(names)
        received.append(_received(index, names, bindings, stage_of, stages))
    sent = {*returned}.union(*received)
    return tuple(
        computation_of(
            stage,
            {name: relax.Var(name, variable.ty) for name, variable in parameters.items()},
            [bindings[name] for name in names],
            {name: bindings[name].var for name in names if name in sent and stage_of[name] == index},
        )
        for index, (stage, names, parameters) in enumerate(zip(stages, contents, received, strict=True))
    )


def output_names(function: relax.Function) -> tuple[str, ...]:
    """Return the names of the variables that a function returns; raise `ContractError` if it returns anything else."""
    fields = returned_fields(function)
    for result in fields:
        if not isinstance(result, relax.Var):
            raise ContractError(f"the model returns {result}, which is not a variable")
    return tuple(result.name for result in fields)


def _contents(
    function: relax.Function,
    bindings: Mapping[str, relax.VarBinding],
    returned: Sequence[str],
    stage_of: Mapping[str, int],
    stages: Sequence[str],
) -> Iterator[list[str]]:
    """Yield the names of the variables that each stage binds, in the graph's order."""
    dependent = dependent_names(function)

    def again(name: str) -> set[str]:
        return {variable.name for variable in used_variables(bindings[name].value)} - dependent

    for index, stage in enumerate(stages):
        waiting = [name for name in bindings if stage_of[name] == index and (name in dependent or name in returned)]
        if not waiting:
            raise ContractError(f"{stage!r} has no operation that depends on an input")
        content = reached(waiting, again)
        yield [name for name in bindings if name in content]


def _received(
    index: int,
    names: Sequence[str],
    bindings: Mapping[str, relax.VarBinding],
    stage_of: Mapping[str, int],
    stages: Sequence[str],
) -> dict[str, relax.Var]:
    """Return the variables that a stage receives, by name, in the order of their first use."""
    received: dict[str, relax.Var] = {}
    for consumer in names:
        for used in used_variables(bindings[consumer].value):
            if used.name in names:
                continue
            source = stage_of[used.name] if used.name in bindings else -1
            if source > index:
                first, later = stages[index], stages[source]
                raise SelfWaitError(
                    f"{consumer!r} in {first} needs {used.name!r}, which is computed in {later}, and {later} stands "
                    f"after {first}; a stage may need only tensors of the stages before it"
                )
            if not isinstance(used.ty, relax.TensorType):
                raise ContractError(
                    f"{used.name!r} is a {used.ty}, not a tensor, and is used in stage {source} and stage {index}; "
                    "place the operations that take it apart in the stage that makes it"
                )
            received[used.name] = used
    return received


def computation_of(
    name: str,
    parameters: Mapping[str, relax.Var],
    operations: Iterable[relax.VarBinding],
    sent: Mapping[str, relax.Expr],
) -> Computation:
    """Return a computation of ``operations``; the keys of ``parameters`` and ``sent`` are names of tensors."""
    values: dict[str, relax.Expr] = dict(parameters)

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        emit_operations(builder, operations, values)
        return [substitute(value, values) for value in sent.values()]

    return Computation(name, new_function(name, parameters.values(), emit), tuple(parameters), tuple(sent))


def verify_partition(whole: tvm.IRModule, stages: Sequence[Computation]) -> None:
    """Raise `ContractError`, with the first output that differs, unless the stages compute a whole graph's outputs.

    Each stage may receive the graph's inputs and tensors of the stages before it. Both are reduced by value numbering:
    equal operations on equal values are one value. So two differences are accepted: the order of independent
    operations, and copies of values that depend on no input.
    """
    function = main_function(whole)
    numbering: dict[StructuralKey, relax.Var] = {}
    expected: dict[str, relax.Expr] = {parameter.name: parameter for parameter in function.params}
    actual = dict(expected)
    _number(operations_of(function), expected, numbering)
    for stage in stages:
        missing = [name for name in stage.received if name not in actual]
        if missing:
            raise ContractError(f"{stage.name} receives {missing[0]!r}, which no stage before it sends")
        inside = {
            parameter.name: actual[name] for parameter, name in zip(stage.function.params, stage.received, strict=True)
        }
        _number(operations_of(stage.function), inside, numbering)
        for name, result in zip(stage.sent, returned_fields(stage.function), strict=True):
            actual[name] = substitute(result, inside)
    for position, name in enumerate(output_names(function)):
        if name not in actual or not structural_equal(expected[name], actual[name]):
            raise ContractError(
                f"output {position} of the stages put together, {name!r}, is not that of the original function: "
                f"{actual.get(name)} instead of {expected[name]}"
            )


def _number(
    operations: Iterable[relax.VarBinding], values: dict[str, relax.Expr], numbering: dict[StructuralKey, relax.Var]
) -> None:
    """Add the variables of ``operations`` to ``values``.

    Equal values get the same variable, from ``numbering``, which all functions share.
    """
    for binding in operations:
        value = substitute(binding.value, values)
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            value = value.tuple_value.fields[value.index]
        if not isinstance(value, relax.Tuple | relax.Var):
            value = numbering.setdefault(StructuralKey(value), relax.Var(binding.var.name, binding.var.ty))
        values[binding.var.name] = value
