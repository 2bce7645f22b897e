"""The ends of a stage: the operations between its received or sent tensors and the nearest convolutions.

Layouts are decided from convolution to convolution. So the ends suffice to find the layouts of the tensors that a stage
receives and sends. The passes then need not process the operations and weights in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from tvm import relax

from relay_passes.ir import bindings_of, operations_of, operator_name, returned_fields, used_variables
from relay_passes.partition import Computation, computation_of

CONV2D = "relax.nn.conv2d"
IMAGE_DIMENSIONS = 4


def sending_end(computation: Computation, names: Collection[str]) -> Computation:
    """Return a stage that makes the sent tensors in ``names`` from the data operands of the nearest convolutions."""
    graph = _Graph.of(computation.function)
    fields = dict(zip(computation.sent, returned_fields(computation.function), strict=True))
    results = {name: field for name, field in fields.items() if name in names}
    kept = graph.before(field.name for field in results.values() if isinstance(field, relax.Var))
    return _part(computation, graph, kept, results)


def receiving_end(computation: Computation, names: Collection[str]) -> Computation:
    """Return a stage of the first operations on the received tensors in ``names``, up to the nearest convolutions.

    It returns the last values that depend on them. Their other operands are computed from the nearest convolutions.
    """
    graph = _Graph.of(computation.function)
    kept = graph.after(parameter.name for parameter in computation.function.params if parameter.name in names)
    kept |= graph.before(operand for name in kept for operand in graph.operands_before(name))
    read = {operand for name in kept for operand in graph.operands[name]}
    leaves = [name for name in graph.values if name in kept - read and graph.is_tensor(name)]
    return _part(computation, graph, kept, {name: graph.variables[name] for name in leaves})


def has_convolution(computation: Computation) -> bool:
    return any(_is_convolution(binding.value) for binding in bindings_of(computation.function))


def _part(computation: Computation, graph: _Graph, kept: set[str], results: Mapping[str, relax.Expr]) -> Computation:
    """Return a stage of the bindings in ``kept``; the other values that they read are parameters, except constants."""
    kept = kept | graph.constants_of(kept)
    read = {operand for name in kept for operand in graph.operands[name]}.union(*map(_names_in, results.values()))
    parameters = {each.name: each for each in computation.function.params if each.name in read}
    parameters |= {name: relax.Var(name, graph.variables[name].ty) for name in graph.values if name in read - kept}
    operations = [each for each in operations_of(computation.function) if each.var.name in kept]
    return computation_of(computation.name, parameters, operations, results)


@dataclass(frozen=True)
class _Graph:
    """The bindings of a function, by variable name and in order, without that of its result."""

    values: Mapping[str, relax.Expr]
    variables: Mapping[str, relax.Var]
    operands: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, function: relax.Function) -> _Graph:
        bindings = operations_of(function)
        values = {each.var.name: each.value for each in bindings}
        variables = {each.var.name: each.var for each in bindings}
        return cls(values, variables, {name: _names_in(value) for name, value in values.items()})

    def is_tensor(self, name: str) -> bool:
        return isinstance(self.variables[name].ty, relax.TensorType)

    def before(self, names: Iterable[str]) -> set[str]:
        """Return these values and the values that they depend on, back to the nearest convolutions."""
        made = [name for name in names if name in self.values]
        return {*made} | _reached(made, lambda name: self.values.keys() & {*self.operands_before(name)})

    def operands_before(self, name: str) -> tuple[str, ...]:
        """Return the operands of a value, without the data operand of a convolution."""
        value = self.values[name]
        return _names_in(*value.args[1:]) if _is_convolution(value) else self.operands[name]

    def after(self, names: Iterable[str]) -> set[str]:
        """Return the values that depend on these, up to the nearest convolutions and tensors that are no images."""
        users: dict[str, list[str]] = {}
        for name, operands in self.operands.items():
            for operand in operands:
                users.setdefault(operand, []).append(name)

        def onwards(name: str) -> Iterable[str]:
            ends = name in self.values and (
                _is_convolution(self.values[name]) or (self.is_tensor(name) and not self._is_image(name))
            )
            return () if ends else users.get(name, ())

        return _reached(names, onwards)

    def constants_of(self, names: Iterable[str]) -> set[str]:
        """Return the direct and indirect operands that depend on constants alone, or are no tensors."""
        constant: set[str] = set()
        for name, operands in self.operands.items():
            if all(operand in constant for operand in operands):
                constant.add(name)

        def inside(name: str) -> Iterable[str]:
            made = (operand for operand in self.operands[name] if operand in self.values)
            return (operand for operand in made if operand in constant or not self.is_tensor(operand))

        return _reached(names, inside)

    def _is_image(self, name: str) -> bool:
        return self.is_tensor(name) and self.variables[name].ty.ndim == IMAGE_DIMENSIONS


def _reached(names: Iterable[str], step: Callable[[str], Iterable[str]]) -> set[str]:
    """Return all names that one or more steps reach from these names."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        new = set(step(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _names_in(*expressions: relax.Expr) -> tuple[str, ...]:
    return tuple(variable.name for expression in expressions for variable in used_variables(expression))


def _is_convolution(expression: relax.Expr) -> bool:
    return operator_name(expression) == CONV2D
