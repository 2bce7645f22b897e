"""Verify that the stages, put together, compute the same outputs as the original function.

Requires: the whole graph and its stages, in their order.
Ensures: a `ContractError` names the first output that differs; nothing is changed.

Both are reduced by value numbering: equal operations on equal values are one value. So two differences are accepted:
the order of independent operations, and copies of values that depend on no input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tvm
from tvm import relax
from tvm_ffi.structural import StructuralKey, structural_equal

from relay_passes.ir import ContractError, main_function, operations_of, returned_fields, substitute
from relay_passes.partition import Computation, output_names


def verify_partition(whole: tvm.IRModule, stages: Sequence[Computation]) -> None:
    """Raise `ContractError` unless the stages of a whole graph compute its outputs.

    Each stage may receive the graph's inputs and tensors of the stages before it.
    """
    function = main_function(whole)
    known: dict[StructuralKey, relax.Var] = {}
    expected: dict[str, relax.Expr] = {parameter.name: parameter for parameter in function.params}
    actual = dict(expected)
    _number(operations_of(function), expected, known)
    for stage in stages:
        missing = [name for name in stage.received if name not in actual]
        if missing:
            raise ContractError(f"{stage.name} receives {missing[0]!r}, which no stage before it sends")
        inside = {
            parameter.name: actual[name] for parameter, name in zip(stage.function.params, stage.received, strict=True)
        }
        _number(operations_of(stage.function), inside, known)
        for name, field in zip(stage.sent, returned_fields(stage.function), strict=True):
            actual[name] = substitute(field, inside)
    for position, name in enumerate(output_names(function)):
        if name not in actual or not structural_equal(expected[name], actual[name]):
            raise ContractError(
                f"output {position} of the stages put together, {name!r}, is not that of the original function: "
                f"{actual.get(name)} instead of {expected[name]}"
            )


def _number(
    operations: Iterable[relax.VarBinding], values: dict[str, relax.Expr], known: dict[StructuralKey, relax.Var]
) -> None:
    """Map each name in ``values`` to one variable per distinct value, shared by all functions."""
    for binding in operations:
        value = substitute(binding.value, values)
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            value = value.tuple_value.fields[value.index]
        if not isinstance(value, relax.Tuple | relax.Var):
            value = known.setdefault(StructuralKey(value), relax.Var(binding.var.name, binding.var.ty))
        values[binding.var.name] = value
