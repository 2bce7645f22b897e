"""Choose how to shard an axis so that the sharding passes most of the operators that follow.

The columns of a fused query-key-value projection can be sharded as one block, or as three blocks with the same bounds.
Only the operators behind it show that each machine needs the same heads of all three. So when a product's columns are
sharded and a later reshape, slice or split ends that, the look-ahead tries more blocks. It takes the number that passes
most operators, and the fewest blocks if several pass equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relay_passes.sharding.rule import Axis, Operation, Rule

Axes = tuple[Axis | None, ...]
MOST_BLOCKS = 8
"""Fused projections have 2 (gates) to 4 blocks (LSTM), groups that channels are shuffled over up to 8."""
_DIVIDING = ("relax.reshape", "relax.split", "relax.strided_slice")


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
        for outer in range(2, MOST_BLOCKS + 1) if self._is_divided(place, of_single) else ():
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

    def _is_divided(self, place: int, reached: Mapping[str, Axes]) -> bool:
        """Return whether an operation that may divide an axis into blocks ends the sharding of a value."""
        return any(
            operation.operator in _DIVIDING and operation.name not in reached and reached.keys() & {*operation.names}
            for operation in self._operations[place + 1 :]
        )
