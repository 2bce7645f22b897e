"""Exchange layouts: stages whose neighbours compute in the same layout send each other tensors in it.

Schedules choose layouts stage by stage, and a stage takes and returns plain tensors. Where the one that makes a tensor
changes it to plain as the last it does, and no one who takes it must change it back, or others in its place, it travels
as it is: as many bytes, in another order. `layouts_made`, `changed_parameters` and `count_changes` read that off stages
after their layout phase, in which all variables have names of their own. `with_layouts` gives a stage before that phase
another interface, with the changes to and from plain inside, which the phase then finds it does not need. A change that
it does need stays: results never depend on the choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import relax
from tvm.tirx import IndexMap

from relay_passes.contract import bindings_of, names_of, operations_of, returned_fields
from relay_passes.operands import shape_of
from relay_passes.partition import Computation
from relay_passes.rewrite import emit_operations, operator_name, substitute

LAYOUT_TRANSFORM = "relax.layout_transform"


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor's elements lie: ``index_map`` leads from the plain tensor's indices to those in ``shape``."""

    shape: tuple[int, ...]
    index_map: IndexMap

    def is_same(self, other: Layout | None) -> bool:
        return (
            other is not None
            and self.shape == other.shape
            and bool(tvm_ffi.structural_equal(self.index_map, other.index_map, map_free_vars=True))
        )


def layouts_made(function: relax.Function) -> list[Layout | None]:
    """For each tensor of the returned tuple the layout that it is changed from before it is returned, or None."""
    values = {binding.var.name: binding.value for binding in bindings_of(function)}
    found: list[Layout | None] = []
    for field in returned_fields(function):
        value = values.get(field.name) if isinstance(field, relax.Var) else None
        if value is None or not _is_change(value):
            found.append(None)
        else:
            shape = shape_of(value.args[0])
            found.append(Layout(shape, value.attrs.index_map.inverse(list(shape))))
    return found


def changed_parameters(function: relax.Function) -> list[bool]:
    """For each parameter whether the function changes its layout."""
    changed = {
        binding.value.args[0].name
        for binding in bindings_of(function)
        if _is_change(binding.value) and isinstance(binding.value.args[0], relax.Var)
    }
    return [parameter.name in changed for parameter in function.params]


def count_changes(function: relax.Function) -> int:
    """How many tensors the function changes to another layout."""
    return sum(_is_change(binding.value) for binding in bindings_of(function))


def with_layouts(computation: Computation, layouts: Mapping[str, Layout]) -> Computation:
    """The stage with those of its received and sent tensors in ``layouts``, by name; the others as they are."""
    function = computation.function
    taken = set(names_of(function))
    origins = dict(computation.origins)
    builder = relax.BlockBuilder()

    def changed(value: relax.Expr, index_map: IndexMap, tensor: str, form: str) -> relax.Var:
        # Passes go by names: another variable's may not be taken.
        names = (f"{tensor}_{number}_{form}" if number else f"{tensor}_{form}" for number in itertools.count())
        free = next(name for name in names if name not in taken)
        taken.add(free)
        origins[free] = tensor
        return builder.emit(relax.op.layout_transform(value, index_map), name_hint=free)

    values: dict[str, relax.Expr] = {each.name: each for each in function.params}
    for name in values.keys() & layouts.keys():
        values[name] = relax.Var(name, relax.TensorType(layouts[name].shape, values[name].ty.dtype))
    with builder.function(computation.name, list(values.values())):
        with builder.dataflow():
            for plain in function.params:
                if plain.name in layouts:
                    back = layouts[plain.name].index_map.inverse(list(shape_of(plain)))
                    values[plain.name] = changed(values[plain.name], back, plain.name, "plain")
            emit_operations(builder, operations_of(function), values)
            results = [substitute(field, values) for field in returned_fields(function)]
            for position, name in enumerate(computation.sent):
                if name in layouts:
                    results[position] = changed(results[position], layouts[name].index_map, name, "sent")
            outputs = builder.emit_output(relax.Tuple(results), name_hint="outputs")
        builder.emit_func_output(outputs)
    return replace(computation, function=builder.get()[computation.name], origins=origins)


def _is_change(expression: relax.Expr) -> bool:
    """Whether an expression is a change of layout that adds no padding."""
    return operator_name(expression) == LAYOUT_TRANSFORM and expression.attrs.pad_value is None
