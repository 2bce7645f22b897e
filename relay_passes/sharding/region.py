"""Regions: parts of a graph that several machines compute together, and the frame of the rewrite that shards one.

The rewrite replaces the region by operations. Each of them belongs to a machine, except for two kinds:

- a *slice* of a value from before the region. It is computed where that value is made, so that only the slice is
  transferred. A slice of a model input is computed by the machine that needs it, since a client computes nothing.
- a *gather* or *sum* makes a whole value of the region for its readers behind the region. It has the original
  variable's name, so that nothing behind the region changes. It is computed where it is needed.

Sums and concatenations are in the order of the machines, so the result does not depend on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import tvm
from tvm import relax
from tvm_ffi import register_error

from relay_passes.ir import (
    emit_operations,
    main_function,
    names_of,
    operations_of,
    returned_fields,
    substitute,
    used_variables,
    with_main,
)


@register_error
class ShardError(ValueError):
    """A region cannot be sharded as requested; the message names the operation and an alternative."""


@dataclass(frozen=True)
class Region:
    """Consecutive variables of a graph, in its order, that ``machines`` compute together.

    ``shares`` are the machines' fractions of the work. Each is above 0; they add up to 1.
    """

    names: tuple[str, ...]
    machines: tuple[str, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Sharded:
    """A whole graph with one region sharded.

    ``machine_of`` has the machine of every variable that replaces the region, None for slices of values from before it
    and for gathers and sums behind it. ``source_of`` has the variable of the original graph that each new one is, or is
    a part of.
    """

    module: tvm.IRModule
    machine_of: Mapping[str, str | None]
    source_of: Mapping[str, str]


_Bindings = Sequence[relax.VarBinding]


@dataclass(frozen=True)
class Contents:
    """A region's operations in a graph, and those before and behind it.

    ``outside`` has the values from before the region that it uses, by name. ``wanted`` has the names of the region's
    variables that are used behind it.
    """

    region: Region
    function: relax.Function
    before: _Bindings
    bindings: _Bindings
    behind: _Bindings
    outside: Mapping[str, relax.Var]
    wanted: tuple[str, ...]


def contents_of(module: tvm.IRModule, region: Region) -> Contents:
    """Return the contents of a region; raise a `ValueError` if other operations stand between its own."""
    function = main_function(module)
    bindings, inside = operations_of(function), set(region.names)
    places = [place for place, binding in enumerate(bindings) if binding.var.name in inside]
    begin, end = places[0], places[-1] + 1
    if len(places) != len(inside) or end - begin != len(places):
        raise ValueError("a region's variables stand together in the graph")
    before, within, behind = bindings[:begin], bindings[begin:end], bindings[end:]
    used = {variable.name for binding in within for variable in used_variables(binding.value)}
    readers = (*(binding.value for binding in behind), *returned_fields(function))
    used_behind = {variable.name for value in readers for variable in used_variables(value)}
    known = (*function.params, *(binding.var for binding in before))
    return Contents(
        region,
        function,
        before,
        within,
        behind,
        {variable.name: variable for variable in known if variable.name in used},
        tuple(binding.var.name for binding in within if binding.var.name in used_behind),
    )


@dataclass
class RegionWriter:
    """Emits the operations that replace a region; ``outside`` has the values from before it in the new graph."""

    builder: relax.BlockBuilder
    outside: Mapping[str, relax.Expr]
    taken: frozenset[str]
    machine_of: dict[str, str | None] = field(default_factory=dict)
    source_of: dict[str, str] = field(default_factory=dict)

    def emit(self, expression: relax.Expr, name: str, source: str, machine: str | None) -> relax.Var:
        """Bind an expression of ``machine``, or of none yet if that is None; ``source`` is the original variable.

        A name that another variable of the graph has gets a number, unless it is that of ``source`` itself.
        """
        if name != source and (name in self.taken or name in self.machine_of):
            names = (f"{name}_{number}" for number in count(2))
            name = next(free for free in names if free not in self.taken and free not in self.machine_of)
        variable = self.builder.emit(expression, name_hint=name)
        self.machine_of[variable.name], self.source_of[variable.name] = machine, source
        return variable


def with_region(
    module: tvm.IRModule, contents: Contents, write: Callable[[RegionWriter], Mapping[str, relax.Expr]]
) -> Sharded:
    """Return the whole graph with a region replaced.

    ``write`` emits the operations that replace the region, and returns the value of each of the ``wanted`` variables.
    """
    function = contents.function
    builder = relax.BlockBuilder()
    values: dict[str, relax.Expr] = {parameter.name: parameter for parameter in function.params}
    with builder.function("main", list(function.params)):
        with builder.dataflow():
            emit_operations(builder, contents.before, values)
            outside = {name: values[name] for name in contents.outside}
            writer = RegionWriter(builder, outside, frozenset(names_of(function)))
            values.update(write(writer))
            emit_operations(builder, contents.behind, values)
            result = builder.emit_output(relax.Tuple([substitute(each, values) for each in returned_fields(function)]))
        builder.emit_func_output(result)
    return Sharded(with_main(module, builder.get()["main"]), writer.machine_of, writer.source_of)


def part_name(name: str, machine: str) -> str:
    """Return the name of a machine's part of a variable."""
    return f"{name}_{machine.replace('-', '_')}"
