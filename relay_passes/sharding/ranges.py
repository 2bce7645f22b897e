"""The ranges of each value that every machine owns, computes and reads.

A backward walk starts at the ranges that each machine owns of the region's results, and collects the needs. A machine
computes all indices of a value that its own operations read. If the machines exchange the value, it computes the
indices that it owns. With common bounds (channels, heads), it reads what it owns.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product

import tvm
from tvm import relax

from relay_passes.sharding.propagate import ChannelSteps, Step, range_steps
from relay_passes.sharding.region import (
    INDICES,
    Contents,
    Exchange,
    Range,
    Region,
    ShardAxis,
    ShardError,
    bounds,
    contents_of,
    has_empty,
    hull,
    largest_miss,
)
from relay_passes.sharding.rule import Axis, Operand, Rule

SHARE_TOLERANCE = 0.02
"""Largest deviation of a part from its share, as a fraction of the axis, at which scaled parts are kept.

Keeping them saves an exchange, but a machine may have that much more work.
"""

Steps = Mapping[str, Step]
Owned = Mapping[str, tuple[Range, ...]]
"""By value, each machine's range of its sharded axis; for a partial result, of its operand's sharded axis."""


def _exchanged_values(steps: Steps) -> frozenset[str]:
    """Return the variables of which each machine computes the part that it owns, and receives the halo that it reads.

    These are the values in parts that a window reads, or another operation whose ranges are not those of its operands.
    """
    in_parts = {name for name, step in steps.items() if step.axes is not None and not step.operation.is_tuple}
    rules = ((step, step.rule) for step in steps.values() if step.axes is not None)
    read = (name for step, rule in rules if rule is not None and not rule.is_local for name in step.operation.names)
    return frozenset(in_parts.intersection(read))


def _owned_by_results(steps: Steps, contents: Contents, axis_name: str) -> Owned:
    """Return the ranges of values that follow from the shares of the region's results.

    Results of the region are divided by the shares. Other values are divided at the same relative positions as the last
    result. So the parts of successive values fit when strides make them shorter. These positions are coarse if the
    result has few indices. Where they miss the shares of a longer value by more than `SHARE_TOLERANCE`, that value is
    divided by the shares. A slice keeps the owners of its operand. A machine may own nothing of a value that is not a
    result: it receives or computes the indices that it reads.

    Raises:
        ShardError: a machine would get nothing of a result, or no value of the region is used.
    """
    shares = contents.region.shares
    rules = {name: step.rule for name, step in steps.items() if step.rule is not None}
    lengths = {name: rule.axis.length for name, rule in rules.items() if not rule.reduced}
    results = [name for name in lengths if name in contents.wanted]
    reduced = {name: steps[name].operation.names[0] for name, rule in rules.items() if rule.reduced}
    for name, operand in reduced.items():
        lengths.setdefault(operand, rules[name].axis.length)
    if not results and not reduced:
        raise ShardError(f"no result of {sorted(lengths)} is used; choose layers whose results are used")
    indices = "samples" if axis_name == "batch" else axis_name

    def by_shares(name: str, length: int) -> tuple[Range, ...]:
        parts = bounds(length, shares)
        if has_empty(parts):
            share = next(share for share, (first, end) in zip(shares, parts, strict=True) if first >= end)
            raise ShardError(
                f"{name!r} has {length} {indices} for {len(shares)} machines: a share of {share:g} of {length} is"
                " nothing; take fewer machines or more even shares, or end the sharded layers before it"
            )
        return parts

    def scaled(total: int, length: int, parts: tuple[Range, ...]) -> tuple[Range, ...]:
        return tuple(pairwise([0, *(round(end * total / length) for _, end in parts)]))

    reference = results[-1] if results else reduced[list(reduced)[-1]]
    length = lengths[reference]
    while not results and reference in rules and (rule := _sliced_range(steps[reference])):
        reference, length = steps[reference].operation.names[0], rule.read_axis.length
    parts_of = {length: by_shares(reference, length)}
    for shorter, longer in pairwise(
        [length, *sorted({candidate for candidate in lengths.values() if candidate > length})]
    ):
        parts = scaled(longer, shorter, parts_of[shorter])
        parts_of[longer] = bounds(longer, shares) if largest_miss(parts, longer, shares) > SHARE_TOLERANCE else parts
    owned: dict[str, tuple[Range, ...]] = {}
    for name, total in lengths.items():
        rule = _sliced_range(steps[name]) if name in steps else None
        if name in results:
            owned[name] = by_shares(name, total)
        elif rule is not None:
            before, size = steps[name].operation.names[0], rule.read_axis.length
            starts = [read[0] for index in range(total) for read in rule.ranges((index, index + 1)) if read is not None]
            of_operand = owned.get(before) or parts_of.get(size) or scaled(size, length, parts_of[length])
            owned[name] = tuple(
                (sum(index < first for index in starts), sum(index < end for index in starts))
                for first, end in of_operand
            )
        else:
            owned[name] = parts_of.get(total) or scaled(total, length, parts_of[length])
    return owned | {name: owned[operand] for name, operand in reduced.items()}


def _sliced_range(step: Step) -> Rule | None:
    """Return the rule of a slice along the sharded axis; None for any other value."""
    is_slice = step.operation.operator == "relax.strided_slice"
    return step.rule if is_slice and step.rule is not None and not step.rule.is_local else None


@dataclass
class Needs:
    """What machines compute and read, by a variable's name and a machine's position in the region.

    ``computed`` has the range that a machine computes; for a partial result, the range of the operand that it reduces,
    None for a linear operation on partial sums. ``read`` has the range that a machine's operations read, by variable,
    axis and machine. ``partial`` has the machines whose partial results linear operations read. ``whole`` has the
    machines that need all of a value; None stands for its readers behind the region, unless the first machine has the
    whole value for them.
    """

    computed: dict[tuple[str, int], Range | None] = field(default_factory=dict)
    read: dict[tuple[str, int, int], Range] = field(default_factory=dict)
    partial: dict[str, set[int]] = field(default_factory=dict)
    whole: dict[str, set[int | None]] = field(default_factory=dict)


def reads_whole(operand: Operand, outside: Collection[str]) -> bool:
    """Return whether a machine must gather all of an operand, although its operation reads only a range of it.

    This depends on the operand's axis, not on the value's: the machines may own the value along another axis, or in
    other blocks. A value from ``outside`` the region is never gathered, but sliced.
    """
    return operand.axis is None and getattr(operand.expression, "name", "") not in outside


def _needs_of(
    steps: Steps, contents: Contents, owned: Owned, exchanged: Collection[str], literals: Collection[str]
) -> Needs:
    """Return what each machine computes and reads, collected backward from the results.

    Raises:
        ShardError: a tuple in parts is used behind the region.
    """
    needs = Needs()
    machines = range(len(contents.region.machines))

    def read_whole(operand: Operand, machine: int | None) -> None:
        if isinstance(operand.expression, relax.Var) and operand.expression.name not in literals:
            needs.whole.setdefault(operand.expression.name, set()).add(machine)

    def read(operand: Operand, axis: Axis | None, operand_range: Range | None, machine: int) -> None:
        name = getattr(operand.expression, "name", "")
        if axis is None or reads_whole(operand, contents.outside):
            read_whole(operand, machine)
        elif operand_range is not None and name:
            key = name, axis.index, machine
            needs.read[key] = hull(needs.read.get(key), operand_range)

    for name, step in reversed(list(steps.items())):
        rule, operands = step.rule, step.operation.operands
        whole = needs.whole.setdefault(name, set())
        if name in contents.wanted and (rule is None or 0 not in whole):
            whole.add(0 if rule is None else None)
        if whole and rule is not None and step.operation.is_tuple:
            raise ShardError(f"{name!r} is a tuple, and used behind the sharded layers: end them before it")
        if rule is not None and rule.is_partial:
            for machine in machines if whole else needs.partial.get(name, ()):
                needs.computed[name, machine] = None
                for operand, is_partial, is_on_first in zip(operands, rule.is_partial, rule.is_on_first, strict=True):
                    if is_partial:
                        needs.partial.setdefault(operand.expression.name, set()).add(machine)
                    elif machine == 0 or not is_on_first:
                        read_whole(operand, machine)
        elif rule is not None:
            for machine in machines:
                owned_range, read_range = owned[name][machine], needs.read.get((name, rule.axis.index, machine))
                needed = owned_range if whole or name in exchanged or machine in needs.partial.get(name, ()) else None
                if not rule.reduced and read_range is not None and name not in exchanged:
                    needed = hull(needed, read_range)
                if needed is not None and needed[0] < needed[1]:
                    needs.computed[name, machine] = needed
                    for operand, axis, part in zip(operands, rule.operands, rule.ranges(needed), strict=True):
                        read(operand, axis, part, machine)
        else:
            for operand, place in product(operands, whole):
                read_whole(operand, place)
    return needs


@dataclass(frozen=True)
class RangeLayout:
    """Which range of each value of a region every machine computes, owns and needs.

    ``literals`` are the values computed from constants alone, by name.
    """

    contents: Contents
    steps: Steps
    literals: Mapping[str, relax.Expr]
    owned: Owned
    exchanged: frozenset[str]
    needs: Needs


def layout_of(module: tvm.IRModule, region: Region, axis: ShardAxis, exchange: Exchange) -> RangeLayout:
    contents = contents_of(module, region)
    if axis in INDICES:
        steps, literals = range_steps(contents, axis, INDICES[axis]), {}
        owned = _owned_by_results(steps, contents, axis)
        exchanged = _exchanged_values(steps) if exchange == "each" else frozenset[str]()
    else:
        propagated = ChannelSteps(contents, axis, fused=exchange == "fused")
        steps, literals = propagated.steps, propagated.literals
        owned = {
            name: step.bounds.ranges(region.shares, step.axis.length)
            for name, step in steps.items()
            if step.bounds is not None
        }
        exchanged = frozenset[str]()
    needs = _needs_of(steps, contents, owned, exchanged, literals)
    return RangeLayout(contents, steps, literals, owned, exchanged, needs)


def computed_shares(
    module: tvm.IRModule, region: Region, *, axis: ShardAxis, exchange: Exchange
) -> dict[tuple[str, str], float]:
    """Return the share of each variable's elements that each machine would compute after `emit.shard`.

    Keys are (variable, machine). A share exceeds the machine's part where several machines compute halos. Empty for
    channels and heads, which have no halo. The graph is not rewritten. Raises the errors of `emit.shard`.
    """
    layout = layout_of(module, region, axis, exchange)
    shares: dict[tuple[str, str], float] = {}
    if axis in INDICES:
        for (name, machine), part in layout.needs.computed.items():
            if part is not None:
                shares[name, region.machines[machine]] = (part[1] - part[0]) / layout.steps[name].axis.length
        for name, machines in layout.needs.whole.items():
            if name in layout.steps and layout.steps[name].rule is None:
                shares.update({(name, region.machines[machine or 0]): 1.0 for machine in machines})
    return shares
