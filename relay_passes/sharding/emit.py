"""Shard a region: write what each machine computes of it, and what it fetches from the others.

    batch, rows, columns     each machine computes a range of that axis of every value
    channels                 each machine has a part of the weights, by output channels or in pairs of layers
    heads                    the same, and whole heads of an attention, from its projections to the product behind it

``exchange`` says what the machines send to each other within the region.

               rows, columns, batch                               channels, heads
    fused      nothing: several machines compute the halos        one all-reduce per pair of products, column- then
               (fused tiles: DeepThings, Zhao et al., 2018)       row-parallel (Shoeybi et al., 2019)
    each       the halos of every value that a window reads       the outputs of each product are gathered

    conv1 ─ relu ─ conv2 ─▶ Σ      machine-a: channels 0 to 39 of conv1, and the weights of conv2 that read them
                                    machine-b: channels 40 to 63

A part at the image's border has the layer's padding; between parts there is none. Constants along the axis are sliced.
Every machine that needs a whole value (norms between blocks, residuals) computes it, from the others' parts or partial
results in the order of the machines. If three or more machines need a large sum, each adds up one part and sends it to
the others. Sequence-parallel norms (Korthikanti et al., 2022), which would shard that work too, are not implemented.

Requires: a region of single operations, static shapes, batch norm in inference.
Ensures: the values behind the region are unchanged. Each new operation belongs to a machine, except for slices, gathers
and sums (`region`). A machine has only its own part of a sharded weight.
"""

import itertools
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import (
    array_of,
    constant,
    emit_again,
    free_name,
    is_tensor_constant,
    leaves_of,
    names_of,
    new_function,
    returned_fields,
    shape_of,
    substitute,
    with_leaves,
    with_main,
)
from relay_passes.sharding.propagate import Step
from relay_passes.sharding.ranges import RangeLayout, layout_of, reads_whole
from relay_passes.sharding.region import (
    Exchange,
    Range,
    Region,
    ShardAxis,
    Sharded,
    bounds,
    common_range,
    has_empty,
    part_name,
)
from relay_passes.sharding.rule import Axis, Operand, Operation, Rule, sliced

LARGE_SUM_BYTES = 1024 * 1024
"""Size from which a reduce-scatter and all-gather is faster than sending all partial sums, even over shared memory."""
SUM_UNIT = 16
"""Parts of a sum are multiples of this many indices, since kernels work on channels in such blocks."""


def shard(module: tvm.IRModule, region: Region, *, axis: ShardAxis, exchange: Exchange) -> Sharded:
    """Return the whole graph with a region sharded.

    Raises:
        ShardError: an operation cannot be sharded along a range of that axis; a machine would have no part of a result,
            no channel or no head; or no weight of the region can be sharded.
    """
    layout = layout_of(module, region, axis, exchange)
    contents, emitter = layout.contents, _Emitter(layout)
    values: dict[str, relax.Expr] = {parameter.name: parameter for parameter in contents.function.params}

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        values.update({binding.var.name: emit_again(builder, binding, values) for binding in contents.before})
        values.update(emitter.emit(builder, {name: values[name] for name in contents.outside}))
        values.update({binding.var.name: emit_again(builder, binding, values) for binding in contents.behind})
        return [substitute(field, values) for field in returned_fields(contents.function)]

    sharded = with_main(module, new_function("main", contents.function.params, emit))
    return Sharded(sharded, emitter.machine_of, emitter.source_of)


_COMBINE = {"sum": relax.op.add, "max": relax.op.maximum, "min": relax.op.minimum}


class _Emitter:
    """Emits the machines' operations, in the order of the region's variables; machines are positions in the region."""

    _builder: relax.BlockBuilder
    _outside: Mapping[str, relax.Expr]

    def __init__(self, layout: RangeLayout) -> None:
        self.machine_of: dict[str, str | None] = {}
        self.source_of: dict[str, str] = {}
        self._layout, self._needs = layout, layout.needs
        self._taken = set(names_of(layout.contents.function))
        self._region, self._wanted = layout.contents.region, layout.contents.wanted
        self._machines = range(len(self._region.machines))
        self._held: dict[tuple[str, int, int], list[tuple[Range, relax.Expr]]] = {}
        """The ranges of a value that a machine holds, by the value's name, its axis and the machine."""
        self._slices: dict[tuple[str, int, int, Range], relax.Expr] = {}
        self._partial: dict[tuple[str, int], relax.Expr] = {}
        self._whole: dict[tuple[str, int | None], relax.Expr] = {}
        self._constants: dict[tuple[relax.Expr, Axis, Range], relax.Expr] = {}
        self._sums: dict[str, list[relax.Expr]] = {}

    def emit(self, builder: relax.BlockBuilder, outside: Mapping[str, relax.Expr]) -> dict[str, relax.Expr]:
        """Emit the region's operations on the values from ``outside``; return the values of the wanted variables."""
        self._builder, self._outside = builder, outside
        results: dict[str, relax.Expr] = {}
        for binding in self._layout.contents.bindings:
            name, step = binding.var.name, self._layout.steps.get(binding.var.name)
            if step is not None:
                self._emit_step(name, step)
            if step is None and name in self._wanted:
                leaves = [self._known(leaf) for leaf in leaves_of(binding.value)]
                results[name] = self._emit(with_leaves(binding.value, leaves), name, name, 0)
            elif name in self._wanted:
                results[name] = self._whole[name, None] if (name, None) in self._whole else self._whole[name, 0]
        return results

    def _emit_step(self, name: str, step: Step) -> None:
        for machine in self._machines:
            if (name, machine) in self._needs.computed:
                self._emit_own(name, step, machine)
        for machine in self._machines if name in self._layout.exchanged else ():
            index = step.axis.index
            read = self._needs.read.get((name, index, machine))
            held = self._parts(name, index, machine) if read is not None else []
            if read is not None and not any(common_range(held_range, read) == read for held_range, _ in held):
                self._fetch(name, index, read, machine)
        whole = self._needs.whole.get(name, set())
        for place in (*self._machines, None):
            if place in whole:
                self._whole[name, place] = self._emit_whole(name, step, place)

    def _emit_own(self, name: str, step: Step, machine: int) -> None:
        """Emit a machine's part or partial result of a step."""
        operation, own_name = step.operation, self._name(name, machine)
        result_range = self._needs.computed[name, machine]
        numbers = itertools.count(1)

        def emit(expression: relax.Expr) -> relax.Var:
            return self._emit(expression, f"{own_name}_step_{next(numbers)}", name, machine)

        assert step.rule is not None  # noqa: S101  (a whole value has no own part)
        if result_range is None:
            partial_operands = self._linear_operands(operation, step.rule, machine)
            expression = step.rule.written(operation, (0, 0), partial_operands, emit)
        elif isinstance(operation.expression, relax.TupleGetItem):
            # The machine may hold the tuple for another range: take the field with that range.
            ((result_range, fields),) = self._held[operation.names[0], step.rule.read_axis.index, machine]
            expression = relax.TupleGetItem(fields, operation.expression.index)
        else:
            reads = zip(operation.operands, step.rule.operands, step.rule.ranges(result_range), strict=True)
            operands = [self._operand(operand, axis, operand_range, machine) for operand, axis, operand_range in reads]
            expression = step.rule.written(operation, result_range, operands, emit)
        if not isinstance(expression, relax.Var):
            expression = self._emit(expression, own_name, name, machine)
        if step.is_partial:
            self._partial[name, machine] = expression
        elif result_range is not None:
            self._held[name, step.axis.index, machine] = [(result_range, expression)]

    def _linear_operands(self, operation: Operation, rule: Rule, machine: int) -> list[relax.Expr | None]:
        """Return the operands of a machine's linear operation on partial sums; None for those of the first machine."""
        operands: list[relax.Expr | None] = []
        for operand, is_partial, is_on_first in zip(operation.operands, rule.is_partial, rule.is_on_first, strict=True):
            if is_partial:
                operands.append(self._partial[operand.expression.name, machine])
            else:
                is_read = machine == 0 or not is_on_first
                operands.append(self._operand(operand, None, None, machine) if is_read else None)
        return operands

    def _known(self, leaf: relax.Expr) -> relax.Expr | None:
        """Return the value of an operand that is a constant or computed from constants alone, else None."""
        return leaf if is_tensor_constant(leaf) else self._layout.literals.get(leaf.name)

    def _operand(
        self, operand: Operand, axis: Axis | None, operand_range: Range | None, machine: int | None
    ) -> relax.Expr | None:
        """Return an operand for a machine's operation: a range along ``axis``, or all of it if ``axis`` is None.

        Return None if the operation reads nothing of it. For example, the range of a concatenation may lie behind it.
        """
        leaf = operand.expression
        value = self._known(leaf)
        if axis is None or machine is None:
            return self._whole_of(leaf.name, machine) if value is None else value
        if operand_range is None:
            return None
        if value is None:
            read = self._slice_of_whole if reads_whole(operand, self._outside) else self._fetch
            return read(leaf.name, axis.index, operand_range, machine)
        key = value, axis, operand_range
        if operand_range == (0, axis.length):
            return value
        if key not in self._constants:
            self._constants[key] = constant(axis.part_of(array_of(value), *operand_range))
        return self._constants[key]

    def _whole_of(self, name: str, machine: int | None) -> relax.Expr:
        return self._outside[name] if name in self._outside else self._whole[name, machine]

    def _slice_of_whole(self, name: str, index: int, part: Range, machine: int) -> relax.Expr:
        """Return a range along axis ``index`` of a value that a machine has whole."""
        value, key = self._whole[name, machine], (name, index, machine, part)
        if part == (0, shape_of(value)[index]):
            return value
        if key not in self._slices:
            own_name = f"{self._name(name, machine)}_{part[0]}_to_{part[1]}"
            self._slices[key] = self._emit(sliced(value, index, part), own_name, name, machine)
        return self._slices[key]

    def _parts(self, name: str, index: int, machine: int) -> list[tuple[Range, relax.Expr]]:
        """Return (range, part) for each part of a value that a machine holds.

        Of a value from before the region, it holds the range that it reads.
        """
        key = name, index, machine
        if key not in self._held and name in self._outside:
            value, read_range = self._outside[name], self._needs.read[key]
            if read_range != (0, shape_of(value)[index]):
                is_input = any(name == parameter.name for parameter in self._layout.contents.function.params)
                piece = sliced(value, index, read_range)
                value = self._emit(piece, self._name(name, machine), name, machine if is_input else None)
            self._held[key] = [(read_range, value)]
        return self._held.setdefault(key, [])

    def _fetch(self, name: str, index: int, needed: Range, machine: int, hint: str = "") -> relax.Expr:
        """Return the range ``needed`` of a value on a machine; ``hint`` is the name of the slice, if one is made.

        The result is a part that the machine holds, a slice of it, or the owners' pieces concatenated (halo exchange).
        """
        held, own_name = self._parts(name, index, machine), self._name(name, machine)
        for held_range, part in held:
            if held_range == needed:
                return part
        around = next(((has[0], part) for has, part in held if common_range(has, needed) == needed), None)
        if around is not None:
            piece = sliced(around[1], index, (needed[0] - around[0], needed[1] - around[0]))
            result = self._emit(piece, hint or f"{own_name}_{needed[0]}_to_{needed[1]}", name, machine)
        else:
            pieces = []
            for owner in self._machines:
                if (piece := common_range(self._layout.owned[name][owner], needed)) is not None:
                    halo = self._name(f"{self._name(name, owner)}_halo_for", machine) if owner != machine else ""
                    pieces.append(self._fetch(name, index, piece, owner, halo))
            result = pieces[0]
            if len(pieces) > 1:
                result = self._emit(relax.op.concat(pieces, index), f"{own_name}_with_halo", name, machine)
        held.append((needed, result))
        return result

    def _emit_whole(self, name: str, step: Step, machine: int | None) -> relax.Expr:
        """Emit a whole value: computed by one machine, combined, or concatenated from the machines' parts."""
        takes_name = machine is None or (machine == 0 and name in self._wanted)
        if step.rule is None:
            operands = [self._operand(operand, None, None, machine) for operand in step.operation.operands]
            own_name = name if takes_name else self._name(name, machine)
            return self._emit(with_leaves(step.operation.expression, operands), own_name, name, machine)
        kind = "gathered" if step.axes is not None else step.rule.reduced
        long_name = self._name(f"{name}_{kind or 'sum'}", machine)
        own_name = name if takes_name else long_name
        if step.axes is not None:
            return self._gather(name, step.axes[0], own_name, long_name, machine)
        ranges = self._sum_ranges(name, step)
        if ranges is not None:
            sums = self._partial_sums(name, *ranges)
            return self._emit(relax.op.concat(sums, ranges[0]), own_name, name, machine)
        parts = [self._partial[name, sender] for sender in self._machines if (name, sender) in self._partial]
        return self._combined(parts, own_name, long_name, name, machine, kind or "sum")

    def _gather(self, name: str, axis: Axis | None, own_name: str, long_name: str, machine: int | None) -> relax.Expr:
        assert axis is not None  # noqa: S101  (a tuple is refused before)
        parts = [self._fetch(name, axis.index, self._layout.owned[name][sender], sender) for sender in self._machines]
        if axis.outer == 1:
            return self._emit(relax.op.concat(parts, axis.index), own_name, name, machine)
        blocks = []
        for sender, part in enumerate(parts):
            key = f"{name}_blocks", sender
            if key not in self._partial:
                shape = list(shape_of(part))
                shape[axis.index : axis.index + 1] = [axis.outer, shape[axis.index] // axis.outer]
                self._partial[key] = self._emit(relax.op.reshape(part, shape), self._name(*key), name, sender)
            blocks.append(self._partial[key])
        joined = self._emit(relax.op.concat(blocks, axis.index + 1), f"{long_name}_blocks", name, machine)
        shape = list(shape_of(joined))
        shape[axis.index : axis.index + 2] = [axis.outer * axis.length]
        return self._emit(relax.op.reshape(joined, shape), own_name, name, machine)

    def _combined(
        self, parts: Sequence[relax.Expr], own_name: str, long_name: str, source: str, machine: int | None, kind: str
    ) -> relax.Expr:
        """Emit the combination of partial results, in the order of the machines."""
        total, *more = parts
        if not more:
            # One machine has the whole result. A reshape to the same shape gives it the expected name.
            return self._emit(relax.op.reshape(total, shape_of(total)), own_name, source, machine)
        for count, part in enumerate(more, 2):
            step_name = own_name if count == len(parts) else f"{long_name}_of_{count}"
            total = self._emit(_COMBINE[kind](total, part), step_name, source, machine)
        return total

    def _sum_ranges(self, name: str, step: Step) -> tuple[int, tuple[Range, ...]] | None:
        """Return an axis of a sum and the range that each machine adds up; None if each adds up the whole sum.

        If all n machines need the sum, each sends 2 (n - 1) / n times its size instead of n - 1 times, but waits twice.
        This is a reduce-scatter and an all-gather (Thakur et al., 2005), with each part sent directly.
        """
        shape = step.operation.shape
        size = prod(shape) * np.dtype(str(step.operation.expression.ty.dtype.dtype)).itemsize
        is_sum = step.rule is not None and step.rule.reduced in (None, "sum")
        everywhere = self._needs.whole[name].issuperset(self._machines)
        if not is_sum or len(self._machines) < 3 or size < LARGE_SUM_BYTES or not everywhere:
            return None
        if not all((name, machine) in self._partial for machine in self._machines):
            return None
        for index, length in enumerate(shape):
            ranges = bounds(length, self._region.shares, SUM_UNIT)
            if not has_empty(ranges):
                return index, ranges
        return None

    def _partial_sums(self, name: str, index: int, ranges: Sequence[Range]) -> list[relax.Expr]:
        """Emit and return each machine's range of a sum, added up in the order of the machines."""
        if name not in self._sums:
            self._sums[name] = []
            for machine, sum_range in enumerate(ranges):
                pieces = []
                for source in self._machines:
                    piece = sliced(self._partial[name, source], index, sum_range)
                    piece_name = f"{self._name(name, source)}_{sum_range[0]}_to_{sum_range[1]}"
                    pieces.append(self._emit(piece, piece_name, name, source))
                part = self._name(f"{name}_part_of_sum", machine)
                self._sums[name].append(self._combined(pieces, part, part, name, machine, "sum"))
        return self._sums[name]

    def _name(self, name: str, machine: int | None) -> str:
        return name if machine is None else part_name(name, self._region.machines[machine])

    def _emit(self, expression: relax.Expr, name: str, source: str, machine: int | None) -> relax.Var:
        """Bind an expression that ``machine`` computes, or that is assigned later if it is None.

        ``source`` is the original variable. If another variable has the name, a number is added, except to ``source``.
        """
        free = name if name == source else free_name(name, self._taken)
        variable = self._builder.emit(expression, name_hint=free)
        self.machine_of[variable.name] = None if machine is None else self._region.machines[machine]
        self.source_of[variable.name] = source
        return variable
