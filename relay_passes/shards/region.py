"""A region of a graph that several machines share, and the frame of the rewrites that split one.

A rewrite puts operations in the region's place. Each of them belongs to a machine, but for

- a *cut*, which takes a part of a value from before the region: it is computed where that value is made, so that only
  the part travels (of a model's input, by the machine that needs it: a client computes nothing);
- a *join*, which makes a whole value of the region again for those behind it, under the variable's own name, so that
  nothing behind the region changes. It is computed where it is needed.

Sums and concatenations are in the order of the machines, so the result does not depend on what arrives first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import tvm
from tvm import relax
from tvm_ffi import register_error

from relay_passes.contract import main_function, names_of, operations_of, returned_fields, used_variables
from relay_passes.rewrite import emit_operations, substitute, with_main


@register_error
class ShardError(ValueError):
    """A region cannot be split as was asked; says which operation cannot, and what can be done instead."""


@dataclass(frozen=True)
class Region:
    """The variables, in the graph's order and without a gap, that ``machines`` compute together.

    ``shares`` are the machines' parts of the work, each above 0, together 1.
    """

    names: tuple[str, ...]
    machines: tuple[str, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Sharded:
    """A whole graph of which a region is split.

    ``machine_of`` has the machine of every variable that stands in the region's place, None for cuts and joins;
    ``source_of`` the variable of the original graph of which each is, or computes, a part.
    """

    module: tvm.IRModule
    machine_of: Mapping[str, str | None]
    source_of: Mapping[str, str]


@dataclass
class RegionWriter:
    """Emits what stands in a region's place.

    ``outside`` has the values from before the region that it uses, by name, ``parameters`` those of them that are the
    model's inputs; ``wanted`` are the names of the region's variables that somebody behind it uses, ``taken`` all names
    outside the region.
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
        """Bind an expression of ``machine``, or of a cut or join; ``source`` is the original variable it stands for.

        A name that is taken outside the region, as by the parts of a region that was split before, gets a number.
        """
        if name in self.taken:
            name = next(each for number in count(2) if (each := f"{name}_{number}") not in self.taken)
        if name in self.machine_of:
            raise ValueError(f"two parts are named {name!r}")
        variable = self.builder.emit(expression, name_hint=name)
        self.machine_of[variable.name], self.source_of[variable.name] = machine, source
        return variable


def part_name(name: str, machine: str) -> str:
    """The name of a machine's part of a variable."""
    return f"{name}_{machine.replace('-', '_')}"


def bounds(total: int, shares: Sequence[float], unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Where each part of ``total`` indices begins and ends: as near to the cumulated shares as whole units allow.

    The last part takes what is left where ``unit`` does not divide ``total``. A part whose share is too small is empty.
    """
    cumulated = 0.0
    ends = []
    for share in shares:
        cumulated += share
        ends.append(min(total, round(cumulated * total / unit) * unit))
    ends[-1] = total
    return tuple(zip((0, *ends), ends, strict=False))


def has_empty(parts: Sequence[tuple[int, int]]) -> bool:
    """Whether one of the parts has no index."""
    return any(begin >= end for begin, end in parts)


def split_region(
    module: tvm.IRModule, region: Region, split: Callable[[RegionWriter], Mapping[str, relax.Expr]]
) -> Sharded:
    """The whole graph with a region rewritten.

    ``split`` emits what stands in the region's place, and gives the value of each of the ``wanted`` variables.
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
            except ShardError as error:  # a builder that is left with an open block complains of it on stderr
                refused, result = error, builder.emit_output(relax.Tuple([]))
        builder.emit_func_output(result)
    if refused is not None:
        raise refused
    return Sharded(with_main(module, builder.get()["main"]), writer.machine_of, writer.source_of)


def region_reader(module: tvm.IRModule, region: Region) -> RegionWriter:
    """What a rewrite knows of a region before it emits anything: to look ahead at what it would do."""
    function = main_function(module)
    before, within, after = _cut_at(function, region)
    known: dict[str, relax.Expr] = {variable.name: variable for variable in function.params}
    known.update({binding.var.name: binding.var for binding in before})
    return _writer(relax.BlockBuilder(), function, region, within, after, known)


_Bindings = Sequence[relax.VarBinding]


def _cut_at(function: relax.Function, region: Region) -> tuple[_Bindings, _Bindings, _Bindings]:
    """The operations before a region, in it, and behind it."""
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
    """``values`` are those from before the region, by their names."""
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
