"""Split a region by rows, columns or batch: each machine computes a range of an axis of every value.

    fused   a machine computes everything that its part of the results needs. Several machines compute the halos, and
            nothing is exchanged within the region (fused tiles: DeepThings, Zhao et al., 2018).
    each    a machine computes its own part of every value that a window reads. It receives the halo (the further rows
            that its windows read) from the machines that own it.
    names   halo exchange for the named values, fused between them

Requires: a region in the form that the frontends produce (one function ``main``, each variable bound once to one call,
static shapes).
Ensures: the values behind the region are unchanged. Each new operation belongs to a machine, except for cuts and joins
(`region`). A part at the image's border has the layer's padding; between parts there is none. Constants along the axis
are sliced. A value without the axis (such as a mean over all rows) is whole. Each machine that needs it adds up the
partial sums of all machines, in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import constant, dependent_names, main_function, shape_of, substitute
from relay_passes.shards.along.rule import Along, Emit, Operand, Range, Total, sliced
from relay_passes.shards.region import (
    Region,
    RegionWriter,
    Sharded,
    part_name,
    region_reader,
    split_region,
)
from relay_passes.shards.row_needs import (
    Needs,
    Value,
    exchanged_values,
    needs_of,
    owned_ranges,
    split_values,
)

AXES = {0: "batch", 2: "rows", 3: "columns"}
"""The axes of an image [batch, channels, rows, columns] that can be split, and their names in messages."""


def split_rows(module: tvm.IRModule, region: Region, *, axis: int, exchange: str | Collection[str]) -> Sharded:
    """Return the graph with a region split along ``axis`` of its images, in the region's shares.

    ``axis`` is 2 for rows, 3 for columns, 0 for a batch. The batch is the first axis of the model's first input, and of
    all values computed from inputs that have that length. ``exchange`` is ``"fused"``, ``"each"``, or the names of the
    region's variables whose halos the machines exchange. A batch has no halos, so all give the same graph.

    Raises:
        ShardError: an operation cannot be split along that axis, or a machine would have no part of a result.
        ValueError: ``axis`` is not 0, 2 or 3.
    """
    if axis not in AXES:
        raise ValueError(f"a region is split along the axes {sorted(AXES)}, not {axis}")
    return split_region(module, region, partial(_split, module=module, axis=axis, exchange=exchange))


def computed_rows(
    module: tvm.IRModule, region: Region, *, axis: int, exchange: str | Collection[str]
) -> dict[tuple[str, str], float]:
    """Return the share of each variable's elements that each machine would compute after `split_rows`.

    Keys are (variable, machine). A share exceeds the machine's part where several machines compute halos. The graph is
    not rewritten. Raises the `ShardError` that `split_rows` would raise.
    """
    writer = region_reader(module, region)
    values, _, _, needs = _looked_at(writer, module, axis, exchange)
    found: dict[tuple[str, str], float] = {}
    for (name, machine), (begin, end) in needs.computed.items():
        value = values[name]
        whole = value.operation.shape[value.rule.axis] if isinstance(value.rule, Along) else None
        read = value.operation.operands[0]
        length = read.shape[read.axis] if whole is None and read.axis is not None else whole
        found[name, region.machines[machine]] = (end - begin) / (length or 1)
    for name, machines in needs.whole.items():
        if name in values and values[name].rule is None:
            found.update({(name, region.machines[machine]): 1.0 for machine in machines})
    return found


def _split(
    writer: RegionWriter, *, module: tvm.IRModule, axis: int, exchange: str | Collection[str]
) -> Mapping[str, relax.Expr]:
    return _Parts(writer, *_looked_at(writer, module, axis, exchange)).written()


def _looked_at(
    writer: RegionWriter, module: tvm.IRModule, axis: int, exchange: str | Collection[str]
) -> tuple[Mapping[str, Value], Mapping[str, tuple[Range, ...]], Collection[str], Needs]:
    """Return a region's values, their owned ranges, the exchanged values, and each machine's needs."""
    outside_axes = dict.fromkeys(_outside_with(axis, writer, module), axis)
    values = split_values(writer, outside_axes, AXES[axis])
    owned = owned_ranges(values, writer, AXES[axis])
    exchanged = exchanged_values(values, exchange, AXES[axis])
    return values, owned, exchanged, needs_of(values, writer, owned, exchanged)


def _outside_with(axis: int, writer: RegionWriter, module: tvm.IRModule) -> set[str]:
    """Return the names of the split values from before the region: images or batches computed from inputs."""
    function = main_function(module)
    computed = dependent_names(function)
    batch = next((shape[0] for shape in (shape_of(each) for each in function.params) if shape), 1)
    found = set()
    for name, value in writer.outside.items():
        shape = shape_of(value)
        has_axis = len(shape) == 4 and shape[axis] > 1 if axis else shape[:1] == (batch,) and batch > 1
        if has_axis and name in computed:
            found.add(name)
    return found


@dataclass
class _Parts:
    """Emits the parts of a region's values, in the order of the values."""

    writer: RegionWriter
    values: Mapping[str, Value]
    owned: Mapping[str, tuple[Range, ...]]
    exchanged: Collection[str]
    needs: Needs
    # The ranges of a value that a machine holds, by the value's name and the machine's position.
    held: dict[tuple[str, int], list[tuple[Range, relax.Var]]] = field(default_factory=dict)
    whole: dict[tuple[str, int], relax.Var] = field(default_factory=dict)
    summands: dict[str, list[relax.Var]] = field(default_factory=dict)

    def written(self) -> dict[str, relax.Expr]:
        results: dict[str, relax.Expr] = {}
        for name, value in self.values.items():
            wanted = name in self.writer.wanted
            if isinstance(value.rule, Along):
                self._write_parts(name, value, value.rule)
                if name in self.exchanged:
                    self._write_halos(name, value.rule.axis)
                if wanted:
                    results[name] = self._joined(name, value, value.rule.axis)
            elif isinstance(value.rule, Total):
                self._write_total(name, value, value.rule)
                if wanted:
                    results[name] = self._combined(name, value.rule, name, None)
            else:
                self._write_whole(name, value)
                if wanted:
                    results[name] = self.whole[name, 0]
        return results

    def _write_parts(self, name: str, value: Value, rule: Along) -> None:
        operands = value.operation.operands
        for machine in self._machines():
            if (name, machine) not in self.needs.computed:
                continue
            wanted, own_name = self.needs.computed[name, machine], self._name(name, machine)
            if isinstance(value.operation.expression, relax.TupleGetItem):
                # The machine may hold the tuple for another range: take the field with that range.
                ((wanted, whole_tuple),) = self.held[operands[0].expression.name, machine]
                written = relax.TupleGetItem(whole_tuple, value.operation.expression.index)
            else:
                parts = [
                    self._operand(operand, axis, needed, machine)
                    for operand, axis, needed in zip(operands, rule.operand_axes, rule.needs(wanted), strict=True)
                ]
                written = rule.write(wanted, parts, self._steps(name, own_name, machine))
            self.held[name, machine] = [(wanted, self._emit(written, own_name, name, machine))]

    def _write_halos(self, name: str, axis: int) -> None:
        """Emit the halos that each machine receives of a value, and its own part concatenated with them."""
        for machine in self._machines():
            read, own = self.needs.read.get((name, machine)), self.owned[name][machine]
            if read is None or _contains(own, read):
                continue
            pieces = []
            for owner in self._machines():
                piece = _common(self.owned[name][owner], read)
                if piece is not None:
                    halo = "" if owner == machine else f"{self._name(name, owner)}_halo_for_{self._label(machine)}"
                    pieces.append(self._part(name, axis, piece, owner, halo))
            with_halo = pieces[0]
            if len(pieces) > 1:
                together = relax.op.concat(pieces, axis)
                with_halo = self._emit(together, f"{self._name(name, machine)}_with_halo", name, machine)
            self.held.setdefault((name, machine), []).append((read, with_halo))

    def _write_total(self, name: str, value: Value, rule: Total) -> None:
        (operand,) = value.operation.operands
        for machine in self._machines():
            own = self.needs.computed.get((name, machine))
            if own is not None:
                part = rule.write(
                    self._operand(operand, operand.axis, own, machine),
                    self._steps(name, f"{self._name(name, machine)}_part", machine),
                )
                summand = self._emit(part, f"{self._name(name, machine)}_part", name, machine)
                self.summands.setdefault(name, []).append(summand)
        for machine in sorted(self.needs.whole.get(name, ())):
            self.whole[name, machine] = self._combined(name, rule, self._name(name, machine), machine)

    def _combined(self, name: str, rule: Total, hint: str, machine: int | None) -> relax.Var:
        """Emit the combination of all machines' partial results, in their order; ``hint`` names it."""
        on = None if machine is None else self.writer.region.machines[machine]
        summands = self.summands[name]
        total = summands[0]
        for number, summand in enumerate(summands[1:], 1):
            is_last = number == len(summands) - 1 and rule.finish is None
            step = rule.combine(total, summand)
            total = self.writer.emit(step, hint if is_last else f"{hint}_step_{number}", name, on)
        if rule.finish is not None:
            total = self.writer.emit(rule.finish(total), hint, name, on)
        elif len(summands) == 1:
            # One machine has the whole total. A reshape to the same shape gives it the expected name.
            total = self.writer.emit(relax.op.reshape(total, shape_of(total)), hint, name, on)
        return total

    def _write_whole(self, name: str, value: Value) -> None:
        for machine in sorted(self.needs.whole.get(name, ())):
            variables = {
                operand.expression.name: self._operand(operand, None, None, machine)
                for operand in value.operation.operands
                if isinstance(operand.expression, relax.Var)
            }
            is_result = machine == 0 and name in self.writer.wanted
            hint = name if is_result else self._name(name, machine)
            expression = substitute(value.operation.expression, variables)
            self.whole[name, machine] = self._emit(expression, hint, name, machine)

    def _joined(self, name: str, value: Value, axis: int) -> relax.Var:
        if value.is_tuple:
            raise value.operation.refused("it gives a tuple to an operation behind the region")
        parts = [self._part(name, axis, self.owned[name][machine], machine) for machine in self._machines()]
        return self.writer.emit(relax.op.concat(parts, axis), name, name, None)

    def _operand(self, operand: Operand, axis: int | None, needed: Range | None, machine: int) -> relax.Expr | None:
        """Return the operand that a machine's operation reads: its range ``needed`` along ``axis``, or all of it."""
        expression = operand.expression
        if axis is not None and needed is None:
            return None
        if not isinstance(expression, relax.Var):
            if axis is None or needed is None or needed == (0, operand.shape[axis]):
                return expression
            return constant(np.take(expression.value.numpy(), range(*needed), axis))
        if axis is None or needed is None:
            return self._whole(expression.name, machine)
        if operand.axis is None:
            everything = (0, operand.shape[axis])
            self.held.setdefault((expression.name, machine), [(everything, self._whole(expression.name, machine))])
        elif expression.name in self.writer.outside and (expression.name, machine) not in self.held:
            self._write_cut(expression.name, operand.axis, operand.shape, machine)
        return self._part(expression.name, axis, needed, machine)

    def _whole(self, name: str, machine: int) -> relax.Expr:
        return self.writer.outside[name] if name in self.writer.outside else self.whole[name, machine]

    def _write_cut(self, name: str, axis: int, shape: tuple[int, ...], machine: int) -> None:
        taken, value = self.needs.read[name, machine], self.writer.outside[name]
        if taken != (0, shape[axis]):
            on = self.writer.region.machines[machine] if name in self.writer.parameters else None
            value = self.writer.emit(sliced(value, axis, taken), self._name(name, machine), name, on)
        self.held[name, machine] = [(taken, value)]

    def _part(self, name: str, axis: int, taken: Range, machine: int, hint: str = "") -> relax.Var:
        """Return the range ``taken`` of a value that a machine holds; ``hint`` names a slice, if one is needed."""
        held = self.held[name, machine]
        for there, part in held:
            if there == taken:
                return part
        first, part = next((there[0], part) for there, part in held if _contains(there, taken))
        hint = hint or f"{self._name(name, machine)}_{taken[0]}_to_{taken[1]}"
        piece = sliced(part, axis, (taken[0] - first, taken[1] - first))
        held.append((taken, self._emit(piece, hint, name, machine)))
        return held[-1][1]

    def _machines(self) -> range:
        return range(len(self.writer.region.machines))

    def _label(self, machine: int) -> str:
        return self.writer.region.machines[machine].replace("-", "_")

    def _name(self, name: str, machine: int) -> str:
        return part_name(name, self.writer.region.machines[machine])

    def _steps(self, name: str, hint: str, machine: int) -> Emit:
        """Return a function that binds the intermediate values of a part; ``hint`` is the part's name."""
        numbers = itertools.count(1)
        return lambda expression: self._emit(expression, f"{hint}_step_{next(numbers)}", name, machine)

    def _emit(self, expression: relax.Expr, name: str, source: str, machine: int) -> relax.Var:
        return self.writer.emit(expression, name, source, self.writer.region.machines[machine])


def _contains(outer: Range, inner: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _common(one: Range, other: Range) -> Range | None:
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return (first, end) if first < end else None
