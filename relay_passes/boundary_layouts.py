"""Boundary layouts: neighbouring stages that compute in the same layout send tensors in that layout.

Schedules choose layouts for each stage, and a stage takes and returns plain tensors (NCHW). The sender may change a
tensor to plain as its last step. If no receiver would need an additional change, the tensor is sent without that step:
it has the same number of bytes in another order. `with_layouts` changes the interface of a stage before the layout
phase. It adds the changes to and from plain inside the stage; the layout phase removes those that cancel out. Those
that do not cancel out remain, so results never depend on the choice.

Layouts are decided from convolution to convolution. So the ends of a stage suffice to find the layouts of the tensors
that it receives and sends: the operations up to the nearest convolutions. The layout phase then need not process the
operations and weights in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import relax
from tvm.tirx import IndexMap

from relay_passes.ir import (
    bindings_of,
    dependent_names,
    emit_operations,
    free_name,
    names_of,
    new_function,
    operations_of,
    operator_name,
    reached,
    returned_fields,
    shape_of,
    substitute,
    used_variables,
)
from relay_passes.partition import Computation, computation_of


@dataclass(frozen=True, eq=False)
class BoundaryLayouts:
    """Layouts of a stage's function after the layout phase: of each returned tensor, before it was changed to plain.

    ``is_changed`` says of each parameter whether the function changes its layout; ``changes`` counts all changes.
    """

    made: tuple[Layout | None, ...]
    is_changed: tuple[bool, ...]
    changes: int

    @classmethod
    def of(cls, function: relax.Function) -> BoundaryLayouts:
        return cls(tuple(layouts_made(function)), tuple(changed_parameters(function)), count_changes(function))


LayOut = Callable[[int, Computation], Sequence[BoundaryLayouts]]
"""Maps a stage's position and computation to its layouts, one for each target of the stage."""
LAYOUT_TRANSFORM = "relax.layout_transform"
CONV2D = "relax.nn.conv2d"
IMAGE_DIMENSIONS = 4


def in_common_layouts(
    computations: Sequence[Computation], outputs: Collection[str], lay_out: LayOut
) -> tuple[Computation, ...]:
    """Return the stages, which send an image in a blocked layout if no receiver must convert it back.

    The model's inputs and ``outputs`` stay plain.
    """
    between = _images_between(computations) - set(outputs)
    layouts_by_name: dict[str, list[Layout | None]] = {name: [] for name in between}
    for index, computation in enumerate(computations):
        if between & {*computation.sent}:
            end = sending_end(computation, between)
            for layouts in lay_out(index, end) if has_convolution(end) else ():
                for name, layout in zip(end.sent, layouts.made, strict=True):
                    layouts_by_name[name].append(layout)
    common = dict(_common(layouts_by_name))
    for index, computation in enumerate(computations):
        if common.keys() & {*computation.received}:
            end = receiving_end(computation, common)
            laid_out = zip(lay_out(index, with_layouts(end, common)), lay_out(index, end), strict=True)
            for name in [name for pair in laid_out for name in _better_plain(end, *pair)]:
                common.pop(name, None)
    return tuple(with_layouts(computation, common) for computation in computations)


def _images_between(computations: Sequence[Computation]) -> set[str]:
    received = {
        parameter.name
        for computation in computations
        for parameter in computation.function.params
        if isinstance(parameter.ty, relax.TensorType) and parameter.ty.ndim == IMAGE_DIMENSIONS
    }
    return received & {name for computation in computations for name in computation.sent}


def _better_plain(end: Computation, layouts: BoundaryLayouts, plain: BoundaryLayouts) -> Iterator[str]:
    """Yield the received tensors that should be sent in plain layout: those that the stage with ``layouts`` converts.

    All of them if it has more layout changes than with ``plain``, the layouts of the same stage on plain tensors.
    """
    costs_more = layouts.changes > plain.changes
    for name, is_changed in zip(end.received, layouts.is_changed, strict=True):
        if is_changed or costs_more:
            yield name


def _common(layouts_by_name: Mapping[str, Sequence[Layout | None]]) -> Iterator[tuple[str, Layout]]:
    """Yield (name, layout) of each tensor that all its senders make in the same layout."""
    for name, layouts in layouts_by_name.items():
        if layouts and layouts[0] is not None and all(layouts[0].is_same(layout) for layout in layouts):
            yield name, layouts[0]


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
    """Return each returned tensor's layout before the last operation changed it to plain; None if none did."""
    values = {binding.var.name: binding.value for binding in bindings_of(function)}
    layouts: list[Layout | None] = []
    for field in returned_fields(function):
        value = values.get(field.name) if isinstance(field, relax.Var) else None
        if value is None or not _is_change(value):
            layouts.append(None)
        else:
            shape = shape_of(value.args[0])
            layouts.append(Layout(shape, value.attrs.index_map.inverse(list(shape))))
    return layouts


def changed_parameters(function: relax.Function) -> list[bool]:
    """Return, for each parameter, whether the function changes its layout."""
    changed = {
        binding.value.args[0].name
        for binding in bindings_of(function)
        if _is_change(binding.value) and isinstance(binding.value.args[0], relax.Var)
    }
    return [parameter.name in changed for parameter in function.params]


def count_changes(function: relax.Function) -> int:
    return sum(_is_change(binding.value) for binding in bindings_of(function))


def with_layouts(computation: Computation, layouts: Mapping[str, Layout]) -> Computation:
    """Return the stage with the received and sent tensors named in ``layouts`` in these layouts, the others plain."""
    if not layouts.keys() & {*computation.received, *computation.sent}:
        return computation
    function = computation.function
    used_names = set(names_of(function))
    origins = dict(computation.origins)

    def changed(
        builder: relax.BlockBuilder, value: relax.Expr, index_map: IndexMap, tensor: str, form: str
    ) -> relax.Var:
        free = free_name(f"{tensor}_{form}", used_names)
        origins[free] = tensor
        return builder.emit(relax.op.layout_transform(value, index_map), name_hint=free)

    values: dict[str, relax.Expr] = {parameter.name: parameter for parameter in function.params}
    for name in values.keys() & layouts.keys():
        values[name] = relax.Var(name, relax.TensorType(layouts[name].shape, values[name].ty.dtype))
    parameters = list(values.values())

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        for plain in function.params:
            if plain.name in layouts:
                back = layouts[plain.name].index_map.inverse(list(shape_of(plain)))
                values[plain.name] = changed(builder, values[plain.name], back, plain.name, "plain")
        emit_operations(builder, operations_of(function), values)
        results = [substitute(field, values) for field in returned_fields(function)]
        for position, name in enumerate(computation.sent):
            if name in layouts:
                results[position] = changed(builder, results[position], layouts[name].index_map, name, "sent")
        return results

    return replace(computation, function=new_function(computation.name, parameters, emit), origins=origins)


def _is_change(expression: relax.Expr) -> bool:
    """Return whether an expression is a layout change without padding."""
    return operator_name(expression) == LAYOUT_TRANSFORM and expression.attrs.pad_value is None


def sending_end(computation: Computation, names: Collection[str]) -> Computation:
    """Return a stage of the last operations before the sent tensors in ``names``, from the nearest convolutions on."""
    graph = _Graph(computation)
    fields = zip(computation.sent, returned_fields(computation.function), strict=True)
    results = {name: field for name, field in fields if name in names}
    return graph.part(graph.before(_names_in(*results.values())), results)


def receiving_end(computation: Computation, names: Collection[str]) -> Computation:
    """Return a stage of the first operations on the received tensors in ``names``, up to the nearest convolutions.

    It returns the last values that depend on these tensors. Other operands are computed from their nearest
    convolutions.
    """
    graph = _Graph(computation)
    contents = graph.after({*names} & {parameter.name for parameter in computation.function.params})
    contents |= graph.before(operand for name in contents for operand in graph.operands_before(name))
    read = {operand for name in contents for operand in graph.operands[name]}
    leaves = {name: binding.var for name, binding in graph.bindings.items() if name in contents - read}
    return graph.part(contents, {name: leaf for name, leaf in leaves.items() if _is_tensor(leaf)})


def has_convolution(computation: Computation) -> bool:
    return any(_is_convolution(binding.value) for binding in bindings_of(computation.function))


class _Graph:
    """The operations of a stage and the names of their operands, both by the name of the bound variable."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self.bindings = {binding.var.name: binding for binding in operations_of(computation.function)}
        self.operands = {name: _names_in(binding.value) for name, binding in self.bindings.items()}

    def operands_before(self, name: str) -> tuple[str, ...]:
        """Return the operands of a value, without the data operand of a convolution."""
        value = self.bindings[name].value
        return _names_in(*value.args[1:]) if _is_convolution(value) else self.operands[name]

    def before(self, names: Iterable[str]) -> set[str]:
        """Return these values and the values that they depend on, back to the nearest convolutions."""
        values = self.bindings.keys()
        return reached(values & {*names}, lambda name: values & {*self.operands_before(name)})

    def after(self, names: Iterable[str]) -> set[str]:
        """Return the values computed from these values; stop at convolutions and at tensors that are not images."""
        users: dict[str, list[str]] = {}
        for name, operands in self.operands.items():
            for operand in operands:
                users.setdefault(operand, []).append(name)

        def onwards(name: str) -> Iterable[str]:
            binding = self.bindings.get(name)
            is_end = binding is not None and (
                _is_convolution(binding.value) or (_is_tensor(binding.var) and binding.var.ty.ndim != IMAGE_DIMENSIONS)
            )
            return () if is_end else users.get(name, ())

        return self.bindings.keys() & reached(names, onwards)

    def part(self, contents: set[str], results: Mapping[str, relax.Expr]) -> Computation:
        """Return a stage that computes the values in ``contents`` and returns ``results``.

        Other values that they read become parameters, except tuples and values that depend on no input.
        """
        function, dependent = self._computation.function, dependent_names(self._computation.function)

        def inside(name: str) -> Iterable[str]:
            operands = (operand for operand in self.operands[name] if operand in self.bindings)
            return (name for name in operands if name not in dependent or not _is_tensor(self.bindings[name].var))

        contents = reached(contents, inside)
        read = {operand for name in contents for operand in self.operands[name]}.union(_names_in(*results.values()))
        parameters = {parameter.name: parameter for parameter in function.params if parameter.name in read}
        received = {name: binding.var for name, binding in self.bindings.items() if name in read - contents}
        parameters |= {name: relax.Var(name, variable.ty) for name, variable in received.items()}
        operations = [binding for name, binding in self.bindings.items() if name in contents]
        return computation_of(self._computation.name, parameters, operations, results)


def _names_in(*expressions: relax.Expr) -> tuple[str, ...]:
    return tuple(variable.name for expression in expressions for variable in used_variables(expression))


def _is_tensor(variable: relax.Var) -> bool:
    return isinstance(variable.ty, relax.TensorType)


def _is_convolution(expression: relax.Expr) -> bool:
    return operator_name(expression) == CONV2D
