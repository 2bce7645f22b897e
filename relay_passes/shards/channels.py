"""Channels: shard the weights of layers over machines, by output channels, by heads, or in pairs of layers.

With ``exchange="fused"`` a pair of products, column- then row-parallel (Shoeybi et al., 2019), needs one all-reduce:

    conv1 ─ relu ─ conv2 ─▶ Σ      machine-a: channels 0 to 39 of conv1, and the weights of conv2 that read them
                                    machine-b: channels 40 to 63

With ``exchange="each"`` the outputs of each product are gathered before the next one, so that all weights are sharded
by output channels. Every machine that needs a sum or concatenation computes it from the other machines' values, in the
order of the machines. If three or more machines need a large sum, each adds up one part and sends it to the others.
Every machine that needs a whole value (norms between blocks, residuals) computes it. Sequence-parallel norms
(Korthikanti et al., 2022), which would shard that work too, are not implemented.

Requires: a region of single operations, static shapes, layouts NCHW and OIHW, batch norm in inference.
Ensures: the region's operations belong to machines. A machine has only its own part of a sharded weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import constant, leaves_of, main_function, names_of, shape_of, with_leaves
from relay_passes.shards.dealt_axes import Axis
from relay_passes.shards.decisions import Decisions, Step
from relay_passes.shards.region import (
    Region,
    RegionWriter,
    Sharded,
    ShardError,
    bounds,
    has_empty,
    part_name,
    region_reader,
    split_region,
)
from relay_passes.shards.summands import Use


def split_channels(
    module: tvm.IRModule,
    region: Region,
    *,
    unit_by: Literal["channels", "heads"],
    exchange: Literal["fused", "each"],
) -> Sharded:
    """Return the whole graph with a region's weights sharded.

    With ``unit_by="heads"`` a machine has whole heads of an attention, from its projections to the product behind it.
    With ``"channels"`` the projections are sharded by single columns, and every machine computes all heads.

    Raises:
        ShardError: a machine would have no head; or no weight of the region can be sharded, such as if a machine would
            have no channel or group of channels.
    """

    def split(writer: RegionWriter) -> Mapping[str, relax.Expr]:
        decisions = _decided(writer, unit_by, exchange)
        return _Emitter(writer, decisions, set(names_of(main_function(module)))).emit()

    return split_region(module, region, split)


def require_channels(
    module: tvm.IRModule,
    region: Region,
    *,
    unit_by: Literal["channels", "heads"],
    exchange: Literal["fused", "each"],
) -> None:
    """Raise the error that `split_channels` would raise, without rewriting anything."""
    _decided(region_reader(module, region), unit_by, exchange)


def _decided(
    writer: RegionWriter, unit_by: Literal["channels", "heads"], exchange: Literal["fused", "each"]
) -> Decisions:
    by_heads, names = unit_by == "heads", writer.region.names
    decisions = Decisions(writer.bindings, writer.region, by_heads=by_heads, fused=exchange == "fused")
    if not decisions.is_split and decisions.left_whole:
        raise decisions.left_whole
    if not decisions.is_split or (by_heads and not decisions.has_heads):
        missing = "attention's heads" if by_heads else "convolution or matrix product with constant weights"
        instead = "use axis 'channels'" if by_heads else "use axis 'rows', or begin the shard earlier"
        raise ShardError(f"{names[0]!r} to {names[-1]!r} have no {missing} to deal out: {instead}")
    return decisions


LARGE_SUM_BYTES = 1024 * 1024
"""Size from which a reduce-scatter and all-gather is faster than sending all partial sums, even over shared memory."""
SUM_UNIT = 16
"""Parts of a sum are multiples of this many indices, since kernels work on channels in such blocks."""


class _Emitter:
    """Emits what the machines need of each value: their own parts or partial sums, and whole values."""

    def __init__(self, writer: RegionWriter, decisions: Decisions, taken: set[str]) -> None:
        self._writer, self._decisions, self._taken = writer, decisions, taken
        self._machines = writer.region.machines
        self._first = self._machines[0]
        self._needs_own: defaultdict[str, set[str]] = defaultdict(set)
        self._needs_whole: defaultdict[str, set[str | None]] = defaultdict(set)
        self._own: dict[tuple[str, str], relax.Expr] = {}
        self._whole: dict[tuple[str, str | None], relax.Expr] = {}
        self._parts: dict[object, relax.Expr] = {}
        self._sums: dict[str, list[relax.Expr]] = {}

    def emit(self) -> dict[str, relax.Expr]:
        """Emit the region's operations; return the values of the wanted variables."""
        self._find_needs()
        result: dict[str, relax.Expr] = {}
        for binding in self._writer.bindings:
            name = binding.var.name
            step = self._decisions.steps.get(name)
            for machine in self._machines:
                if step is not None and machine in self._needs_own[name]:
                    self._own[name, machine] = self._emit_own(step, machine)
            for place in (*self._machines, None):
                if step is not None and place in self._needs_whole[name]:
                    self._whole[name, place] = self._emit_whole(step, place)
            if name in self._writer.wanted:
                result[name] = self._wanted(binding)
        return result

    def _wanted(self, binding: relax.VarBinding) -> relax.Expr:
        name = binding.var.name
        if name in self._decisions.steps:
            return self._whole[name, None] if (name, None) in self._whole else self._whole[name, self._first]
        known = [self._decisions.constant_of(leaf) for leaf in leaves_of(binding.value)]
        return self._writer.emit(with_leaves(binding.value, known), name, name, self._first)

    def _find_needs(self) -> None:
        """Find which machines compute each value, backward from the wanted variables."""
        for step in reversed(self._decisions.steps.values()):
            own, whole = self._needs_own[step.name], self._needs_whole[step.name]
            if step.name in self._writer.wanted:
                if step.form != "whole" and self._first not in whole:
                    whole.add(None)
                elif step.form == "whole":
                    whole.add(self._first)
            if step.form != "whole" and whole:
                if len(step.passage.results) > 1:
                    raise ShardError(f"{step.name!r} is a tuple, and used behind the shard: end the shard before it")
                own.update(self._machines)
            for leaf, use in zip(leaves_of(step.value), step.uses, strict=True):
                if not isinstance(leaf, relax.Var):
                    continue
                if step.form == "whole":
                    self._needs_whole[leaf.name] |= whole
                elif use is Use.OWN:
                    self._needs_own[leaf.name] |= own
                else:
                    self._needs_whole[leaf.name] |= own & {self._first} if use is Use.WHOLE_ON_FIRST else own

    def _emit_own(self, step: Step, machine: str) -> relax.Expr:
        """Emit a machine's part or partial sum of a step."""
        operands = [
            self._operand(step, leaf, use, machine) for leaf, use in zip(leaves_of(step.value), step.uses, strict=True)
        ]
        name = self._name(part_name(step.name, machine))

        def emit(expression: relax.Expr, ending: str) -> relax.Expr:
            return self._writer.emit(expression, self._name(f"{name}_{ending}"), step.name, machine)

        def scaled(count: int) -> int:
            begin, end, blocks = self._blocks(step, machine)
            return count * (end - begin) // blocks

        if step.passage.adapt is not None:
            expression = step.passage.adapt(step.value, operands, scaled, emit)
        elif step.others is not None and machine != self._first:
            expression = step.others(step.value, operands)
        else:
            expression = with_leaves(step.value, operands)
        if isinstance(expression, relax.Var):
            return expression
        return self._writer.emit(expression, name, step.name, machine)

    def _operand(self, step: Step, leaf: relax.Expr, use: Use | Axis, machine: str) -> relax.Expr | None:
        if use is Use.OWN:
            return self._own[leaf.name, machine]
        if use is Use.WHOLE_ON_FIRST and machine != self._first:
            return None
        if isinstance(use, Axis):
            begin, end, blocks = self._blocks(step, machine)
            return self._part_of(leaf, use, begin * use.period // blocks, end * use.period // blocks, machine)
        return self._whole_of(leaf, machine)

    def _blocks(self, step: Step, machine: str) -> tuple[int, int, int]:
        """Return the (begin, end) of a machine's blocks, and the number of all blocks."""
        begin, end = step.dealing.bounds(self._writer.region.shares)[self._machines.index(machine)]
        return begin, end, step.dealing.blocks

    def _whole_of(self, leaf: relax.Expr, machine: str | None) -> relax.Expr:
        known = self._decisions.constant_of(leaf)
        if known is not None:
            return known
        outside = self._writer.outside.get(leaf.name)
        return self._whole[leaf.name, machine] if outside is None else outside

    def _part_of(self, leaf: relax.Expr, axis: Axis, begin: int, end: int, machine: str) -> relax.Expr:
        """Return a machine's part of a constant, a value from before the region (a cut), or its own whole value."""
        known = self._decisions.constant_of(leaf)
        key = (known, axis, begin, end) if known is not None else (leaf.name, axis, begin, end, machine)
        if key in self._parts:
            return self._parts[key]
        if known is not None:
            part = constant(axis.part_of(known.value.numpy(), begin, end))
        else:
            is_cut = leaf.name in self._writer.outside
            name = self._name(part_name(leaf.name if is_cut else f"{leaf.name}_part", machine))
            by = None if is_cut and leaf.name not in self._writer.parameters else machine
            sliced = relax.op.strided_slice(self._whole_of(leaf, machine), [axis.index], [begin], [end])
            part = self._writer.emit(sliced, name, leaf.name, by)
        self._parts[key] = part
        return part

    def _emit_whole(self, step: Step, machine: str | None) -> relax.Expr:
        """Emit a whole value: computed by one machine, added up, or concatenated from the machines' parts."""
        takes_name = machine is None or (machine == self._first and step.name in self._writer.wanted)
        if step.form == "whole":
            name = step.name if takes_name else self._name(part_name(step.name, str(machine)))
            operands = [self._whole_of(leaf, machine) for leaf in leaves_of(step.value)]
            return self._writer.emit(with_leaves(step.value, operands), name, step.name, machine)
        kind = "sum" if step.form == "summand" else "gathered"
        long = f"{step.name}_{kind}" if machine is None else part_name(f"{step.name}_{kind}", machine)
        name = step.name if takes_name else self._name(long)
        own = [self._own[step.name, each] for each in self._machines]
        if step.form == "summand":
            ranges = self._sum_ranges(step)
            if ranges is not None:
                sums = self._partial_sums(step, *ranges)
                return self._writer.emit(relax.op.concat(sums, ranges[0]), name, step.name, machine)
            return self._emit_sum(own, name, long, step.name, machine)
        axis = step.axis
        if axis.repeats == 1:
            return self._writer.emit(relax.op.concat(own, axis.index), name, step.name, machine)
        stretches = [self._stretches(step, axis, each) for each in self._machines]
        joined = relax.op.concat(stretches, axis.index + 1)
        joined = self._writer.emit(joined, self._name(f"{long}_stretches"), step.name, machine)
        return self._writer.emit(relax.op.reshape(joined, shape_of(step.value)), name, step.name, machine)

    def _emit_sum(
        self, own: Sequence[relax.Expr], name: str, long: str, source: str, machine: str | None
    ) -> relax.Expr:
        total = own[0]
        for count, summand in enumerate(own[1:], 2):
            ending = name if count == len(own) else self._name(f"{long}_of_{count}")
            total = self._writer.emit(relax.op.add(total, summand), ending, source, machine)
        return total

    def _sum_ranges(self, step: Step) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """Return an axis of a sum and the range that each machine adds up; None if each adds up the whole sum.

        If all n machines need the sum, each sends 2 (n - 1) / n times its size instead of n - 1 times, but waits twice.
        This is a reduce-scatter and an all-gather (Thakur et al., 2005), with each part sent directly.
        """
        shape, machines = shape_of(step.value), self._machines
        size = prod(shape) * np.dtype(str(step.value.ty.dtype.dtype)).itemsize
        if len(machines) < 3 or size < LARGE_SUM_BYTES or not self._needs_whole[step.name].issuperset(machines):
            return None
        for index, length in enumerate(shape):
            ranges = bounds(length, self._writer.region.shares, SUM_UNIT)
            if not has_empty(ranges):
                return index, ranges
        return None

    def _partial_sums(self, step: Step, index: int, ranges: Sequence[tuple[int, int]]) -> list[relax.Expr]:
        """Emit each machine's part of a sum, added up in the order of the machines."""
        if step.name not in self._sums:
            self._sums[step.name] = []
            for machine, (begin, end) in zip(self._machines, ranges, strict=True):
                pieces = []
                for source in self._machines:
                    piece = relax.op.strided_slice(self._own[step.name, source], [index], [begin], [end])
                    name = self._name(f"{part_name(step.name, source)}_{begin}_to_{end}")
                    pieces.append(self._writer.emit(piece, name, step.name, source))
                long = part_name(f"{step.name}_part_of_sum", machine)
                self._sums[step.name].append(self._emit_sum(pieces, self._name(long), long, step.name, machine))
        return self._sums[step.name]

    def _stretches(self, step: Step, axis: Axis, machine: str) -> relax.Expr:
        """Emit a machine's part reshaped so that the stretches have their own axis."""
        key = (step.name, machine)
        if key not in self._parts:
            part = self._own[step.name, machine]
            shape = list(shape_of(part))
            shape[axis.index : axis.index + 1] = [axis.repeats, shape[axis.index] // axis.repeats]
            name = self._name(part_name(f"{step.name}_stretches", machine))
            self._parts[key] = self._writer.emit(relax.op.reshape(part, shape), name, step.name, machine)
        return self._parts[key]

    def _name(self, hint: str) -> str:
        """Return the name, with a number appended if another variable of the graph has it."""
        name, number = hint, 0
        while name in self._taken:
            number += 1
            name = f"{hint}_{number}"
        self._taken.add(name)
        return name
