"""Regions: parts of a graph that several machines compute together, and the frame of the rewrites that split one.

A rewrite replaces the region by operations. Each of them belongs to a machine, except for two kinds:

- a *cut* slices a value from before the region. It is computed where that value is made, so that only the slice is
  transferred. A cut of a model input is computed by the machine that needs it, since a client computes nothing.
- a *join* makes a whole value of the region for its readers behind the region. It has the original variable's name, so
  that nothing behind the region changes. It is computed where it is needed.

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
    """A region cannot be split as requested; the message names the operation and an alternative."""


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
    """A whole graph with one region split.

    ``machine_of`` has the machine of every variable that replaces the region, None for cuts and joins. ``source_of``
    has the variable of the original graph that each new one is, or is a part of.
    """

    module: tvm.IRModule
    machine_of: Mapping[str, str | None]
    source_of: Mapping[str, str]


@dataclass
class RegionWriter:
    """Emits the operations that replace a region.

    ``outside`` has the values from before the region that it uses, by name. ``parameters`` are the names of the model's
    inputs, ``wanted`` those of the region's variables that are used behind it, ``taken`` all names outside the region.
    """

    builder: relax.BlockBuilder
    region: Region
    bindings: Sequence[relax.VarBinding]
    outside: Mapping[str, relax.Var]
    parameters: frozenset[str]
    wanted: tuple[str, ...]
    taken: frozenset[str]
    machine_of: dict[str, str | None] = field(default_factory=dict)
    source_of: dict[str, str] = field(default_factory=dict)

    def emit(self, expression: relax.Expr, name: str, source: str, machine: str | None) -> relax.Var:
        """Bind an expression of ``machine``, or a cut or join if that is None; ``source`` is the original variable.

        A name that is used outside the region, such as by a region that was split earlier, gets a number.

        Raises:
            ValueError: another part has this name.
        """
        if name in self.taken:
            name = next(each for number in count(2) if (each := f"{name}_{number}") not in self.taken)
        if name in self.machine_of:
            raise ValueError(f"two parts are named {name!r}")
        variable = self.builder.emit(expression, name_hint=name)
        self.machine_of[variable.name], self.source_of[variable.name] = machine, source
        return variable


def part_name(name: str, machine: str) -> str:
    """Return the name of a machine's part of a variable."""
    return f"{name}_{machine.replace('-', '_')}"


def bounds(total: int, shares: Sequence[float], unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Return (begin, end) of each machine's part of ``total`` indices, rounded to multiples of ``unit``.

    The last part takes the rest if ``unit`` does not divide ``total``. A part whose share is too small is empty.
    """
    cumulated = 0.0
    ends = []
    for share in shares:
        cumulated += share
        ends.append(min(total, round(cumulated * total / unit) * unit))
    ends[-1] = total
    return tuple(zip((0, *ends), ends, strict=False))


def has_empty(parts: Sequence[tuple[int, int]]) -> bool:
    """Return whether one of the parts has no index."""
    return any(begin >= end for begin, end in parts)


def split_region(
    module: tvm.IRModule, region: Region, split: Callable[[RegionWriter], Mapping[str, relax.Expr]]
) -> Sharded:
    """Return the whole graph with a region rewritten.

    ``split`` emits the operations that replace the region, and returns the value of each of the ``wanted`` variables.
    """
    function = main_function(module)
    before, within, after = _cut_at(function, region)
    builder = relax.BlockBuilder()
    values: dict[str, relax.Expr] = {parameter.name: parameter for parameter in function.params}
    refused: ShardError | None = None
    with builder.function("main", list(function.params)):
        with builder.dataflow():
            emit_operations(builder, before, values)
            writer = _writer(builder, function, region, within, after, values)
            try:
                values.update(split(writer))
                emit_operations(builder, after, values)
                result = builder.emit_output(
                    relax.Tuple([substitute(each, values) for each in returned_fields(function)])
                )
            except ShardError as error:  # a builder with an open block writes a warning to stderr
                refused, result = error, builder.emit_output(relax.Tuple([]))
        builder.emit_func_output(result)
    if refused is not None:
        raise refused
    return Sharded(with_main(module, builder.get()["main"]), writer.machine_of, writer.source_of)


def region_reader(module: tvm.IRModule, region: Region) -> RegionWriter:
    """Return a writer to inspect a region without rewriting it."""
    function = main_function(module)
    before, within, after = _cut_at(function, region)
    known: dict[str, relax.Expr] = {variable.name: variable for variable in function.params}
    known.update({binding.var.name: binding.var for binding in before})
    return _writer(relax.BlockBuilder(), function, region, within, after, known)


_Bindings = Sequence[relax.VarBinding]


def _cut_at(function: relax.Function, region: Region) -> tuple[_Bindings, _Bindings, _Bindings]:
    """Return the operations before a region, in it, and behind it."""
    bindings, inside = operations_of(function), set(region.names)
    places = [place for place, each in enumerate(bindings) if each.var.name in inside]
    if len(places) != len(inside) or places != list(range(places[0], places[0] + len(places))):
        raise ValueError("a region's variables stand together in the graph")
    return bindings[: places[0]], bindings[places[0] : places[-1] + 1], bindings[places[-1] + 1 :]


def _writer(
    builder: relax.BlockBuilder,
    function: relax.Function,
    region: Region,
    within: _Bindings,
    after: _Bindings,
    values: Mapping[str, relax.Expr],
) -> RegionWriter:
    """Return the writer of a region; ``values`` are the values from before the region, by name."""
    used_behind = {each.name for binding in after for each in used_variables(binding.value)}
    used_behind |= {each.name for returned in returned_fields(function) for each in used_variables(returned)}
    used_within = {each.name for binding in within for each in used_variables(binding.value)}
    return RegionWriter(
        builder,
        region,
        within,
        {name: value for name, value in values.items() if name in used_within},
        frozenset(parameter.name for parameter in function.params),
        tuple(each.var.name for each in within if each.var.name in used_behind),
        frozenset(names_of(function)) - set(region.names),
    )
