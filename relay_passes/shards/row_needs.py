"""The indices of each value that every machine computes, and those that it reads.

A forward walk follows the axis through the region, from the values before it that have the axis. A value is *split*
along an axis, or *whole*: then every machine that needs it computes all of it. A backward walk starts at the indices
that each machine owns of the region's results, and collects the needs. A machine computes all indices of a value that
its own operations read. If the machines exchange the value, it computes the indices that it owns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from tvm import relax

from relay_passes.ir import leaves_of, shape_of, used_variables
from relay_passes.shards.along.rule import Along, Operand, Operation, Range, Total
from relay_passes.shards.along.table import rule_of
from relay_passes.shards.region import RegionWriter, ShardError, bounds, has_empty

SHARE_TOLERANCE = 0.02
"""Largest deviation of a part from its share, as a fraction of the axis, at which scaled parts are kept.

Keeping them saves an exchange, but a machine may have that much more work.
"""


@dataclass(frozen=True)
class Value:
    """A variable of the region; ``rule`` is None if it reads no split value, ``axis`` is None if it is whole."""

    operation: Operation
    rule: Along | Total | None

    @property
    def axis(self) -> int | None:
        return self.rule.axis if isinstance(self.rule, Along) else None

    @property
    def is_tuple(self) -> bool:
        return isinstance(self.operation.expression.ty, relax.TupleType)


@dataclass
class Needs:
    """The indices that machines compute and read, by a variable's name and a machine's position in the region.

    ``computed`` has the indices that a machine computes; for a `Total`, the operand's indices that it reduces. ``read``
    has those that its operations read. ``whole`` has the machines that need all of a value, by its name.
    """

    computed: dict[tuple[str, int], Range] = field(default_factory=dict)
    read: dict[tuple[str, int], Range] = field(default_factory=dict)
    whole: dict[str, set[int]] = field(default_factory=dict)


def split_values(writer: RegionWriter, outside_axes: Mapping[str, int], axis_name: str) -> dict[str, Value]:
    """Return the region's variables in order, with the rules of those that read a split value.

    Raises:
        ShardError: an operation cannot be split along the axis, or no value of the region has the axis.
    """
    axes: dict[str, int | None] = dict(outside_axes)
    values: dict[str, Value] = {}
    for binding in writer.bindings:
        name, expression = binding.var.name, binding.value
        is_operation = isinstance(expression, relax.Call | relax.TupleGetItem)
        operands = tuple(
            Operand(each, shape_of(each), axes.get(each.name) if isinstance(each, relax.Var) else None)
            for each in (leaves_of(expression) if is_operation else ())
        )
        split = {each.expression.name for each in operands if each.axis is not None}
        # An expression that is no operation has no operands here, but may still read split variables.
        hidden = {each.name for each in used_variables(expression) if axes.get(each.name) is not None} - split
        operation = Operation(name, expression, operands, shape_of(binding.var), axis_name)
        if isinstance(expression, relax.TupleGetItem) and split & set(outside_axes):
            raise operation.refused("the tuple that it reads is from before the region")
        if hidden:
            raise operation.refused(f"it reads {sorted(hidden)} in a form that is not known")
        values[name] = Value(operation, rule_of(operation) if split else None)
        axes[name] = values[name].axis
    if not any(value.rule for value in values.values()):
        raise ShardError(
            f"nothing from {writer.region.names[0]!r} to {writer.region.names[-1]!r} can be split along {axis_name}:"
            " no value before it has that axis with more than one index; choose another axis, or other layers"
        )
    return values


def exchanged_values(values: Mapping[str, Value], exchange: str | Collection[str], axis_name: str) -> frozenset[str]:
    """Return the variables of which each machine computes the part that it owns, and receives the rest that it reads.

    Raises:
        ShardError: ``exchange`` is unknown, or names a variable that is not split.
    """
    split = {name for name, value in values.items() if value.axis is not None and not value.is_tuple}
    if exchange == "fused":
        return frozenset()
    if exchange == "each":
        return frozenset(
            operand.expression.name
            for value in values.values()
            if isinstance(value.rule, Along) and not value.rule.local
            for operand in value.operation.operands
            if operand.axis is not None and operand.expression.name in split
        )
    if isinstance(exchange, str):
        raise ShardError(f"exchange is 'fused', 'each' or names of variables, not {exchange!r}")
    if unknown := sorted(set(exchange) - split):
        raise ShardError(
            f"{unknown} cannot be exchanged: these are no variables of the region that have {axis_name}; name some of"
            f" {sorted(split)}"
        )
    return frozenset(exchange)


def owned_ranges(values: Mapping[str, Value], writer: RegionWriter, axis_name: str) -> dict[str, tuple[Range, ...]]:
    """Return the indices that each machine owns of each split value, and of reduced values from before the region.

    Results of the region are divided by the shares. Other values are divided at the same relative positions as the last
    result. So the parts of successive values fit when strides make them shorter. These positions are coarse if the
    result has few indices. Where they miss the shares of a longer value by more than `SHARE_TOLERANCE`, that value is
    divided by the shares. A slice keeps the owners of its operand. A machine may own nothing of a value that is no
    result: it receives or computes the indices that it reads.

    Raises:
        ShardError: a machine would get nothing of a result, or no value of the region is used.
    """
    shares = writer.region.shares
    lengths = {
        name: value.operation.shape[value.rule.axis] for name, value in values.items() if isinstance(value.rule, Along)
    }
    results = [name for name in lengths if name in writer.wanted]
    reduced = [value.operation for value in values.values() if isinstance(value.rule, Total)]
    for operation in reduced:
        lengths.setdefault(_first_name(operation), operation.operands[0].shape[operation.only_first()])
    if not results and not reduced:
        raise ShardError(f"nobody needs any of {sorted(lengths)}; choose layers whose results are used")

    indices = "samples" if axis_name == "batch" else axis_name

    def by_shares(name: str, length: int) -> tuple[Range, ...]:
        parts = bounds(length, shares)
        if has_empty(parts):
            share = next(share for share, (first, end) in zip(shares, parts, strict=True) if first >= end)
            raise ShardError(
                f"{name!r} has {length} {indices} for {len(shares)} machines: a share of {share:g} of {length} is"
                " nothing; take fewer machines or more even shares, or end the shard before it"
            )
        return parts

    reference, length = (results[-1], lengths[results[-1]]) if results else _before_slices(reduced[-1], values)
    parts = by_shares(reference, length)

    longer, shorter = {length: parts}, length
    for total in sorted({each for each in lengths.values() if each > length}):
        longer[total] = _fitted(total, shorter, longer[shorter], shares)
        shorter = total

    def scaled(total: int) -> tuple[Range, ...]:
        return longer.get(total) or _scaled(total, length, parts)

    owned: dict[str, tuple[Range, ...]] = {}
    for name, total in lengths.items():
        if name in results:
            owned[name] = by_shares(name, total)
        elif name in values and (rule := _slice_rule(values[name])):
            taken = [each[0] for index in range(total) for each in rule.needs((index, index + 1)) if each is not None]
            operation = values[name].operation
            before = owned.get(_first_name(operation)) or scaled(operation.operands[0].shape[operation.only_first()])
            owned[name] = tuple(
                (sum(each < first for each in taken), sum(each < end for each in taken)) for first, end in before
            )
        else:
            owned[name] = scaled(total)
    return owned


def _scaled(total: int, length: int, parts: Sequence[Range]) -> tuple[Range, ...]:
    """Return the parts of ``total`` indices at the same relative positions as ``parts`` of ``length``."""
    return tuple(pairwise([0, *(round(end * total / length) for _, end in parts)]))


def _fitted(total: int, length: int, parts: Sequence[Range], shares: Sequence[float]) -> tuple[Range, ...]:
    """Return the scaled parts, or parts by the shares if the scaled ones miss these by more than `SHARE_TOLERANCE`."""
    found = _scaled(total, length, parts)
    missed = (abs(end / total - share) for (_, end), share in zip(found, accumulate(shares), strict=True))
    return bounds(total, shares) if max(missed) > SHARE_TOLERANCE else found


def needs_of(
    values: Mapping[str, Value],
    writer: RegionWriter,
    owned: Mapping[str, tuple[Range, ...]],
    exchanged: Collection[str],
) -> Needs:
    """Return the indices that each machine computes and reads, collected backward from the results."""
    found = Needs()
    machines = range(len(writer.region.machines))

    def read(operand: Operand, axis: int | None, needed: Range | None, machine: int) -> None:
        if not isinstance(operand.expression, relax.Var) or (axis is not None and needed is None):
            return
        name = operand.expression.name
        if operand.axis is None:
            found.whole.setdefault(name, set()).add(machine)
        elif needed is not None:
            found.read[name, machine] = hull(found.read.get((name, machine)), needed)

    for name, value in reversed(list(values.items())):
        operands, rule, wanted = value.operation.operands, value.rule, name in writer.wanted
        if isinstance(rule, Along):
            for machine in machines:
                own = owned[name][machine]
                needed = own if wanted or name in exchanged else None
                if name not in exchanged and (name, machine) in found.read:
                    needed = hull(needed, found.read[name, machine])
                if needed is not None and needed[0] < needed[1]:
                    found.computed[name, machine] = needed
                    for operand, axis, part in zip(operands, rule.operand_axes, rule.needs(needed), strict=True):
                        read(operand, axis, part, machine)
        elif wanted or name in found.whole:
            if isinstance(rule, Total):
                (operand,) = operands
                for machine, own in enumerate(owned[operand.expression.name]):
                    if own[0] < own[1]:
                        found.computed[name, machine] = own
                        read(operand, operand.axis, own, machine)
            elif wanted:
                found.whole.setdefault(name, set()).add(0)
            for machine in found.whole.get(name, ()) if rule is None else ():
                for operand in operands:
                    read(operand, None, None, machine)
    return found


def hull(one: Range | None, other: Range) -> Range:
    """Return the smallest range that contains both; None is an empty range."""
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))


def _first_name(operation: Operation) -> str:
    return str(operation.operands[0].expression.name)


def _slice_rule(value: Value) -> Along | None:
    """Return the rule of a slice along the split axis; None for any other value."""
    is_slice = value.operation.operator == "relax.strided_slice"
    return value.rule if is_slice and isinstance(value.rule, Along) and not value.rule.local else None


def _before_slices(operation: Operation, values: Mapping[str, Value]) -> tuple[str, int]:
    """Return the name of an operation's first operand, traced back through slices, and its length along the axis."""
    while _first_name(operation) in values and _slice_rule(values[_first_name(operation)]):
        operation = values[_first_name(operation)].operation
    return _first_name(operation), operation.operands[0].shape[operation.only_first()]
