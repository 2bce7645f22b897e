"""Direct gathers: send shards of a value straight from the machines that made them to the machines that need them.

    before    b ─▶ gather on a ─▶ b, c        after    gather on a ◀─ b    gather on b ◀─ a    gather on c ◀─ a, b

A *gather* makes a whole value of its shards: it concatenates them, or adds up partial sums.

Requires: a whole graph with sharded regions. Slices and gathers have no place, all other operations have one.
Ensures: every place that uses a gather computes it, in the same order. A place that uses only a slice of it receives
the pieces of that slice from the machines that have them. A gather that is read in one place is unchanged.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import tvm
from tvm import relax

from relay_passes.ir import (
    emit_again,
    free_name,
    main_function,
    names_of,
    new_function,
    operations_of,
    operator_name,
    returned_fields,
    shape_of,
    substitute,
    used_variables,
    with_main,
)
from relay_passes.sharding.region import part_name
from relay_passes.sharding.rule import sliced
from relay_passes.sharding.shape_rules import slice_ranges


class SliceRange(NamedTuple):
    """The slice of a variable from ``begin`` to before ``end`` along ``axis``."""

    source: str
    axis: int
    begin: int
    end: int


def range_of(binding: relax.VarBinding) -> SliceRange | None:
    """Return the range of a slice of a variable; None unless it is along one axis with stride 1."""
    if operator_name(binding.value) != "relax.strided_slice" or not isinstance(binding.value.args[0], relax.Var):
        return None
    ranges = slice_ranges(binding.value)
    if ranges is None or len(ranges) != 1:
        return None
    ((axis, (begin, end, stride)),) = ranges.items()
    return SliceRange(binding.value.args[0].name, axis, begin, end) if stride == 1 else None


@dataclass(frozen=True)
class Place:
    """Where an operation is computed: the index of a plan stage, its machines (several are replicas), and the level.

    The level is the position of the operation's stage among those of its machine in a sharded stage.
    """

    stage: int
    machines: tuple[str, ...] = ()
    level: int = 0


class DirectGathers:
    """The rewrite after which every place computes the gathers that it uses, in the first of its stages that does.

    ``places`` has every operation except slices and gathers, and ``holders`` the places that compute returned gathers.
    ``of_inputs`` are slices of parameters that become parameters, so that a client sends a machine only the slice that
    it needs. A parameter whose readers are all among them is removed. Other slices are computed where their operand is.
    """

    _builder: relax.BlockBuilder

    def __init__(
        self,
        module: tvm.IRModule,
        places: Mapping[str, Place],
        holders: Mapping[str, Place],
        of_inputs: Collection[str],
    ) -> None:
        self._module = module
        self._function = main_function(module)
        self._places = dict(places)
        bindings = {binding.var.name: binding for binding in operations_of(self._function)}
        self._of_inputs = [binding for name, binding in bindings.items() if name in of_inputs]
        self._bindings = {name: binding for name, binding in bindings.items() if name not in of_inputs}
        self._returned = [field.name for field in returned_fields(self._function)]
        self._holders = {name: holders[name] for name in self._returned if name in holders}
        self._taken = set(names_of(self._function))
        ranges = {name: range_of(binding) for name, binding in self._bindings.items() if name not in places}
        gathers = {name for name, slice_range in ranges.items() if slice_range is None}
        self._ranges = {
            name: slice_range for name, slice_range in ranges.items() if slice_range and slice_range.source in gathers
        }
        self._unplaced = gathers.union(self._ranges)
        """Names of the slices and gathers, which are computed where they are used."""
        self._users = self._first_users()
        self._emitted: dict[str, relax.Expr] = {}
        self._made: dict[tuple[str, tuple[str, ...]], relax.Expr] = {}
        self._pieces: dict[SliceRange, relax.Expr] = {}
        self._source_of: dict[str, str] = {}

    def run(self) -> tuple[tvm.IRModule, Mapping[str, Place], Mapping[str, str]]:
        """Return the graph, the place of each of its operations, and the original variable of those that are new."""
        readers = (read.name for binding in self._bindings.values() for read in used_variables(binding.value))
        used, sliced_inputs = {*self._returned, *readers}, {binding.value.args[0].name for binding in self._of_inputs}
        remaining = [param for param in self._function.params if param.name in used or param.name not in sliced_inputs]
        parameters = [*remaining, *(relax.Var(binding.var.name, binding.var.ty) for binding in self._of_inputs)]
        self._emitted.update({parameter.name: parameter for parameter in parameters})
        module = with_main(self._module, new_function("main", parameters, self._emit))
        return module, self._places, self._source_of

    def _emit(self, builder: relax.BlockBuilder) -> list[relax.Expr]:
        self._builder = builder
        for name, binding in self._bindings.items():
            if name in self._holders:
                self._read(name, self._holders[name].machines)
            elif name not in self._unplaced:
                if name not in self._places:
                    self._places[name] = self._places[binding.value.args[0].name]
                self._emitted[name] = emit_again(builder, binding, self._read_by(binding.value, self._places[name]))
        return [
            self._read(name, self._holders[name].machines if name in self._holders else ()) for name in self._returned
        ]

    def _first_users(self) -> Mapping[str, dict[tuple[str, ...], Place]]:
        """Return, for each unplaced variable and group of machines, the place in their first stage that uses it."""
        first_users: dict[str, dict[tuple[str, ...], Place]] = {name: {} for name in self._unplaced}
        for name, binding in reversed(self._bindings.items()):
            place = self._places.get(name)
            users = first_users.get(name, {}) if place is None else {place.machines: place}
            if name in self._holders:
                users.setdefault(self._holders[name].machines, self._holders[name])
            for read in used_variables(binding.value):
                first = first_users.get(read.name, {})
                for machines, user in users.items() if read.name in self._unplaced else ():
                    first[machines] = min(first.get(machines, user), user, key=lambda place: place.stage)
        return first_users

    def _read_by(self, value: relax.Expr, place: Place) -> Mapping[str, relax.Expr]:
        """Return the new variables that an operation at ``place`` reads, by the names of those that they replace."""
        return {read.name: self._read(read.name, place.machines) for read in used_variables(value)}

    def _read(self, name: str, machines: tuple[str, ...]) -> relax.Expr:
        """Return the variable that ``machines`` read; emit an unplaced one on first use."""
        if name not in self._unplaced:
            return self._emitted[name]
        key = name, machines
        if key not in self._made:
            own_name = self._name(name, machines)
            place = self._users[name][machines]
            value = self._range(self._ranges[name], own_name, place) if name in self._ranges else None
            if value is None:
                whole = self._bindings[name].value
                value = self._bind(substitute(whole, self._read_by(whole, place)), own_name, name, place)
            self._made[key] = value
        return self._made[key]

    def _range(self, slice_range: SliceRange, name: str, place: Place) -> relax.Expr | None:
        """Return a range of a gather, concatenated from its shards; None if the gather does not concatenate shards."""
        value = self._bindings[slice_range.source].value
        parts = value.args[0].fields if operator_name(value) == "relax.concat" else ()
        if not parts or not all(isinstance(part, relax.Var) and part.name in self._emitted for part in parts):
            return None
        along, first, pieces = int(value.attrs.axis), 0, []
        for part in parts:
            length = shape_of(part)[along]
            begin, end = slice_range.begin, slice_range.end
            if along == slice_range.axis:
                begin, end = max(begin - first, 0), min(end - first, length)
            if begin < end:
                pieces.append(self._piece(SliceRange(part.name, slice_range.axis, begin, end)))
            first += length
        return (
            pieces[0]
            if len(pieces) == 1
            else self._bind(relax.op.concat(pieces, along), name, slice_range.source, place)
        )

    def _piece(self, slice_range: SliceRange) -> relax.Expr:
        """Return a range of a part, sliced on the machine that has the part."""
        part = self._emitted[slice_range.source]
        if (slice_range.begin, slice_range.end) == (0, shape_of(part)[slice_range.axis]):
            return part
        if slice_range not in self._pieces:
            name = free_name(f"{slice_range.source}_{slice_range.begin}_to_{slice_range.end}", self._taken)
            piece = sliced(part, slice_range.axis, (slice_range.begin, slice_range.end))
            self._pieces[slice_range] = self._bind(piece, name, slice_range.source, self._places[slice_range.source])
        return self._pieces[slice_range]

    def _bind(self, value: relax.Expr, name: str, source: str, place: Place) -> relax.Var:
        self._source_of[name], self._places[name] = source, place
        return self._builder.emit(value, name_hint=name)

    def _name(self, name: str, machines: tuple[str, ...]) -> str:
        """Return a variable's name on ``machines``: the original name if it is returned there, or emitted first."""
        is_own = self._holders[name].machines == machines if name in self._holders else name not in self._source_of
        return name if is_own else free_name(part_name(f"{name}_whole", "_".join(machines)), self._taken)
