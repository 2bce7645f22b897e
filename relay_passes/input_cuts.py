"""Input cuts: turn the slice of an input that a machine reads into an input of its own.

Requires: a whole graph, in which the named variables are slices of parameters.
Ensures: they are parameters instead, and parameters without a reader are removed. The caller of the function computes
the slices from the returned bindings. So a client sends each machine only the slice that it needs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import tvm
from tvm import relax

from relay_passes.ir import (
    ContractError,
    emit_operations,
    main_function,
    operations_of,
    operator_name,
    require_whole_graph,
    returned_fields,
    substitute,
    used_variables,
    with_main,
)
from relay_passes.shards.passing import slice_ranges


class InputRange(NamedTuple):
    """The slice of a parameter from ``begin`` to before ``end`` along ``axis``."""

    parameter: str
    axis: int
    begin: int
    end: int


def range_of(binding: relax.VarBinding) -> InputRange | None:
    """Return the range of a slice of a variable; None unless it is along one axis with stride 1."""
    if operator_name(binding.value) != "relax.strided_slice" or not isinstance(binding.value.args[0], relax.Var):
        return None
    ranges = slice_ranges(binding.value)
    if ranges is None or len(ranges) != 1:
        return None
    ((axis, (begin, end, stride)),) = ranges.items()
    return InputRange(binding.value.args[0].name, axis, begin, end) if stride == 1 else None


def cut_inputs(module: tvm.IRModule, names: Collection[str]) -> tuple[tvm.IRModule, tuple[relax.VarBinding, ...]]:
    """Return the module in which the named slices are parameters, and the bindings of these slices in order.

    Raises:
        ContractError: one of them is no such slice of a parameter, or the function returns it.
    """
    if not names:
        return module, ()
    require_whole_graph(module)
    function = main_function(module)
    parameters = {each.name for each in function.params}
    cuts = [each for each in operations_of(function) if each.var.name in names]
    others = [each for each in operations_of(function) if each.var.name not in names]
    returned = {each.name for each in returned_fields(function)}
    for cut in cuts:
        found = range_of(cut)
        if found is None or found.parameter not in parameters or cut.var.name in returned:
            raise ContractError(f"{cut.var.name!r} is not a slice of an input that is used inside only")
    used = returned.union(each.name for binding in others for each in used_variables(binding.value))
    kept = [each for each in function.params if each.name in used]
    made = [relax.Var(each.var.name, each.var.ty) for each in cuts]
    values: dict[str, relax.Expr] = {each.name: each for each in (*kept, *made)}
    builder = relax.BlockBuilder()
    with builder.function("main", [*kept, *made]):
        with builder.dataflow():
            emit_operations(builder, others, values)
            fields = [substitute(each, values) for each in returned_fields(function)]
            outputs = builder.emit_output(relax.Tuple(fields), name_hint="outputs")
        builder.emit_func_output(outputs)
    return with_main(module, builder.get()["main"]), tuple(cuts)
