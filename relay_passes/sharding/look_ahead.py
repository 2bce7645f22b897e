"""Choose how to shard an axis so that the sharding passes most of the operators that follow.

The columns of a fused query-key-value projection can be sharded as one block, or as three blocks with the same bounds.
Only the operators behind it show that each machine needs the same heads of all three. So when a product's columns are
sharded, the look-ahead tries each number of blocks that a later reshape, slice or split suggests. It takes the one that
passes most operators, and the fewest blocks if several pass equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod

from relay_passes.sharding.rule import Axis, Operation, Rule
from relay_passes.sharding.shape_rules import section_ends, slice_ranges

Axes = tuple[Axis | None, ...]


class LookAhead:
    """The operations of a region, by position; ``rule_of`` is None for one before which operands are gathered."""

    def __init__(self, operations: Sequence[Operation], rule_of: Callable[[Operation], Rule | None]) -> None:
        self._operations, self._rule_of = operations, rule_of
        self._last_use = {name: place for place, operation in enumerate(operations) for name in operation.names}

    def best_axis(self, place: int, operand: int, single: Axis, sharded: Mapping[str, Axes]) -> Axis:
        """Return the best sharding of the weights ``operand`` of a product; ``single`` has them as one block.

        ``sharded`` has the axes of values that are sharded already.
        """

        def reached(axis: Axis) -> dict[str, Axes]:
            operation = self._operations[place]
            axes = [(axis,) if index == operand else None for index in range(len(operation.operands))]
            rule = self._rule_of(operation.with_axes(axes))
            return {} if rule is None else self._reached(place, rule.results, sharded)

        of_single = reached(single)
        best, most = single, len(of_single)
        for outer in sorted(self._suggested(place, of_single)):
            if single.length % outer == 0:
                axis = Axis(single.index, outer, single.length // outer)
                if (count := len(reached(axis))) > most:
                    best, most = axis, count
        return best

    def _reached(self, place: int, results: Axes, sharded: Mapping[str, Axes]) -> dict[str, Axes]:
        """Return the values that stay sharded if the one at ``place`` is, with their axes."""
        name = self._operations[place].name
        axes_of = {name: results}
        last = self._last_use.get(name, place)
        while (place := place + 1) <= last:
            operation = self._operations[place]
            operand_axes = [axes_of.get(name) for name in operation.names]
            if not any(operand_axes):
                continue
            # The other operands are sharded as they already are, or gathered if that does not fit.
            beside = [axes or sharded.get(name) for axes, name in zip(operand_axes, operation.names, strict=True)]
            rules = (self._rule_of(operation.with_axes(axes)) for axes in (beside, operand_axes))
            rule = next((rule for rule in rules if rule is not None), None)
            if rule is not None and not rule.reduced:
                axes_of[operation.name] = rule.results
                last = max(last, self._last_use.get(operation.name, place))
        return axes_of

    def _suggested(self, place: int, axes_of: Mapping[str, Axes]) -> set[int]:
        """Return the numbers of blocks that the readers of the values in ``axes_of`` suggest, without 1."""
        suggested: set[int] = set()
        for operation in self._operations[place + 1 :]:
            axis = next((axes_of[name][0] for name in operation.names if name in axes_of), None)
            if axis is not None:
                suggested |= _blocks(operation, axis)
        return suggested - {1}


def _blocks(operation: Operation, axis: Axis) -> set[int]:
    """Return the numbers of blocks into which an operation divides an axis of its first operand."""
    call, shape = operation.expression, operation.operands[0].shape
    length = shape[axis.index] if axis.index < len(shape) else 1
    match operation.operator:
        case "relax.reshape":
            before, after = prod(shape[: axis.index]), operation.shape
            outer = {prod(after[:index]) for index in range(1, len(after))}
            return {blocks // before for blocks in outer if before < blocks < before * length and blocks % before == 0}
        case "relax.split" if int(call.attrs.axis) % len(shape) == axis.index:
            sections = [0, *(section_ends(call) or ()), length]
            return _even([end - begin for begin, end in pairwise(sections)], length)
        case "relax.strided_slice" if axis.index in (ranges := slice_ranges(call) or {}):
            begin, end, _ = ranges[axis.index]
            return _even([end - begin] if begin % max(1, end - begin) == 0 else [], length)
    return set()


def _even(lengths: Sequence[int], whole: int) -> set[int]:
    even = len(set(lengths)) == 1 and lengths[0] > 0 and whole % lengths[0] == 0
    return {whole // lengths[0]} if even else set()
