"""Direct joins: send parts of a value straight from the machines that made them to the machines that need them.

    before    b ─▶ join on a ─▶ b, c          after    join on a ◀─ b      join on b ◀─ a      join on c ◀─ a, b

Requires: a whole graph with split regions. Cuts and joins have no place, all other operations have one.
Ensures: every place that uses a join computes it, in the same order. A place that uses only a part of it (a cut)
receives the pieces of that part from the machines that have them. A join that is read in one place is unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count

import tvm
from tvm import relax

from relay_passes.input_cuts import InputRange, range_of
from relay_passes.ir import (
    main_function,
    names_of,
    operations_of,
    operator_name,
    returned_fields,
    shape_of,
    substitute,
    used_variables,
    with_main,
)
from relay_passes.shards.along.rule import sliced
from relay_passes.shards.region import part_name


@dataclass(frozen=True)
class Place:
    """The placement of an operation: ``machines`` (several are replicas) and the index ``stage`` of its plan stage."""

    machines: tuple[str, ...]
    stage: int


@dataclass(frozen=True)
class Spread:
    """The rewritten graph.

    ``beside`` maps a cut, a join or a new variable to the operation in whose stage and on whose machines it is
    computed; one without a user is missing. ``source_of`` maps each of these to the variable of the original graph that
    it is, or is a piece of.
    """

    module: tvm.IRModule
    beside: Mapping[str, str]
    source_of: Mapping[str, str]


def with_direct_joins(
    module: tvm.IRModule, places: Mapping[str, Place], cuts: Collection[str], keepers: Mapping[str, tuple[str, ...]]
) -> Spread:
    """Return the graph in which every place computes the joins that it uses.

    ``places`` has every operation except cuts and joins, ``cuts`` are the names of the cuts, and ``keepers`` has the
    machines that compute the returned joins.
    """
    return _Spreading(module, places, cuts, keepers).spread()


class _Spreading:
    def __init__(
        self,
        module: tvm.IRModule,
        places: Mapping[str, Place],
        cuts: Collection[str],
        keepers: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._module = module
        self._function = main_function(module)
        self._places = places
        self._bindings = {each.var.name: each for each in operations_of(self._function)}
        self._returned = [each.name for each in returned_fields(self._function)]
        self._keepers = {name: keepers[name] for name in self._returned if name in keepers}
        self._given = frozenset(names_of(self._function))
        joins = {name for name in self._bindings if name not in places and name not in cuts}
        self._ranges = {
            name: taken for name in cuts if (taken := range_of(self._bindings[name])) and taken.parameter in joins
        }
        self._lazy = joins.union(self._ranges)
        """Names of the cuts and joins that are computed where they are used."""
        self._users = self._found_users()
        self._builder = relax.BlockBuilder()
        self._emitted: dict[str, relax.Expr] = {each.name: each for each in self._function.params}
        self._made: dict[tuple[str, tuple[str, ...]], relax.Expr] = {}
        self._pieces: dict[InputRange, relax.Expr] = {}
        self._beside: dict[str, str] = {}
        self._source_of: dict[str, str] = {}

    def spread(self) -> Spread:
        with self._builder.function("main", list(self._function.params)):
            with self._builder.dataflow():
                for name, binding in self._bindings.items():
                    if name in self._keepers:
                        self._read(name, self._keepers[name])
                    elif name not in self._lazy:
                        machines = self._places[name].machines if name in self._places else ()
                        self._emitted[name] = self._builder.emit(self._on(binding.value, machines), name_hint=name)
                fields = [self._read(name, self._keepers.get(name, ())) for name in self._returned]
                outputs = self._builder.emit_output(relax.Tuple(fields), name_hint="outputs")
            self._builder.emit_func_output(outputs)
        return Spread(with_main(self._module, self._builder.get()["main"]), self._beside, self._source_of)

    def _found_users(self) -> Mapping[str, dict[tuple[str, ...], str]]:
        """Return the first user of each lazy variable on each group of machines, in the order of the stages."""
        found: dict[str, dict[tuple[str, ...], str]] = {name: {} for name in self._lazy}
        for name, binding in reversed(self._bindings.items()):
            users = found.get(name, {})
            if name in self._places:
                users = {self._places[name].machines: name}
            for read in used_variables(binding.value):
                for machines, user in users.items() if read.name in self._lazy else ():
                    first = found[read.name].get(machines, user)
                    if self._places[user].stage <= self._places[first].stage:
                        found[read.name][machines] = user
        return found

    def _on(self, value: relax.Expr, machines: tuple[str, ...]) -> relax.Expr:
        """Return an operation whose operands are the variables on its machines."""
        return substitute(value, {each.name: self._read(each.name, machines) for each in used_variables(value)})

    def _read(self, name: str, machines: tuple[str, ...]) -> relax.Expr:
        """Return the variable that ``machines`` read; emit a lazy one on first use."""
        if name not in self._lazy:
            return self._emitted[name]
        key = name, machines
        if key not in self._made:
            user, own_name = self._users[name].get(machines), self._name(name, machines)
            found = self._range(self._ranges[name], own_name, user) if name in self._ranges else None
            if found is None:
                found = self._bind(self._on(self._bindings[name].value, machines), own_name, name, user)
            self._made[key] = found
        return self._made[key]

    def _range(self, taken: InputRange, name: str, user: str | None) -> relax.Expr | None:
        """Return a range of a join, concatenated from its parts; None if the join is no concatenation of parts."""
        value = self._bindings[taken.parameter].value
        parts = value.args[0].fields if operator_name(value) == "relax.concat" else ()
        if not parts or not all(isinstance(each, relax.Var) and each.name in self._emitted for each in parts):
            return None
        along, first, pieces = int(value.attrs.axis), 0, []
        for part in parts:
            length = shape_of(part)[along]
            begin, end = taken.begin, taken.end
            if along == taken.axis:
                begin, end = max(begin - first, 0), min(end - first, length)
            if begin < end:
                pieces.append(self._piece(InputRange(part.name, taken.axis, begin, end)))
            first += length
        return (
            pieces[0] if len(pieces) == 1 else self._bind(relax.op.concat(pieces, along), name, taken.parameter, user)
        )

    def _piece(self, taken: InputRange) -> relax.Expr:
        """Return a range of a part, sliced on the machine that has the part."""
        part = self._emitted[taken.parameter]
        if (taken.begin, taken.end) == (0, shape_of(part)[taken.axis]):
            return part
        if taken not in self._pieces:
            name = self._unused(f"{taken.parameter}_{taken.begin}_to_{taken.end}")
            piece = sliced(part, taken.axis, (taken.begin, taken.end))
            self._pieces[taken] = self._bind(piece, name, taken.parameter, taken.parameter)
        return self._pieces[taken]

    def _bind(self, value: relax.Expr, name: str, source: str, beside: str | None) -> relax.Var:
        self._source_of[name] = source
        if beside is not None:
            self._beside[name] = beside
        return self._builder.emit(value, name_hint=name)

    def _name(self, name: str, machines: tuple[str, ...]) -> str:
        """Return a variable's name on ``machines``: the original name if it is returned there, or emitted first."""
        is_own = self._keepers[name] == machines if name in self._keepers else name not in self._source_of
        return name if is_own else self._unused(part_name(f"{name}_whole", "_".join(machines)))

    def _unused(self, hint: str) -> str:
        names = (hint if number == 1 else f"{hint}_{number}" for number in count(1))
        return next(each for each in names if each not in self._given and each not in self._source_of)
