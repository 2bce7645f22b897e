"""Exchange layouts: neighbouring stages that compute in the same layout send tensors in that layout.

Schedules choose layouts for each stage, and a stage takes and returns plain tensors. The sender may change a tensor to
plain as its last step. If no receiver would need an additional change, the tensor is sent without that step: it has the
same number of bytes in another order. `layouts_made`, `changed_parameters` and `count_changes` find such tensors in
stages after the layout phase, where all names are unique. `with_layouts` changes the interface of a stage before that
phase. It adds the changes to and from plain inside the stage; the layout phase removes those that cancel out. Those
that do not cancel out remain, so results never depend on the choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import relax
from tvm.tirx import IndexMap

from relay_passes.ir import (
    bindings_of,
    emit_operations,
    names_of,
    operations_of,
    operator_name,
    returned_fields,
    shape_of,
    substitute,
)
from relay_passes.partition import Computation

LAYOUT_TRANSFORM = "relax.layout_transform"


@dataclass(frozen=True, eq=False)
class Layout:
    """The memory layout of a tensor: ``index_map`` maps the plain tensor's indices to indices in ``shape``."""

    shape: tuple[int, ...]
    index_map: IndexMap

    def is_same(self, other: Layout | None) -> bool:
        return (
            other is not None
            and self.shape == other.shape
            and bool(tvm_ffi.structural_equal(self.index_map, other.index_map, map_free_vars=True))
        )


def layouts_made(function: relax.Function) -> list[Layout | None]:
    """Return, for each returned tensor, the layout that it is changed from just before it is returned, or None."""
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
    """Return, for each parameter, whether the function changes its layout."""
    changed = {
        binding.value.args[0].name
        for binding in bindings_of(function)
        if _is_change(binding.value) and isinstance(binding.value.args[0], relax.Var)
    }
    return [parameter.name in changed for parameter in function.params]


def count_changes(function: relax.Function) -> int:
    """Return the number of layout changes in the function."""
    return sum(_is_change(binding.value) for binding in bindings_of(function))


def with_layouts(computation: Computation, layouts: Mapping[str, Layout]) -> Computation:
    """Return the stage with the received and sent tensors named in ``layouts`` in these layouts, the others plain."""
    function = computation.function
    taken = set(names_of(function))
    origins = dict(computation.origins)
    builder = relax.BlockBuilder()

    def changed(value: relax.Expr, index_map: IndexMap, tensor: str, form: str) -> relax.Var:
        # Passes look variables up by name, so the name must be new.
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
    """Return whether an expression is a layout change without padding."""
    return operator_name(expression) == LAYOUT_TRANSFORM and expression.attrs.pad_value is None
