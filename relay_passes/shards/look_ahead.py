"""Choose how to shard an axis so that the sharding passes most of the operators that follow.

The columns of a fused query-key-value projection can be sharded as one stretch, or as three stretches with the same
bounds. Only the operators behind it show that each machine needs the same heads of all three. So when a product's
columns are sharded, the look-ahead tries each number of stretches that a later reshape, slice or split suggests. It
takes the one that passes most operators, and the fewest stretches if several pass equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from tvm import relax

from relay_passes.ir import leaves_of, operator_name, shape_of
from relay_passes.shards.dealt_axes import Axis, Dealing, Passage
from relay_passes.shards.passing import RULES, section_ends, slice_ranges


@dataclass(frozen=True)
class Dealt:
    """A sharded value: its axis (or one per field of a tuple), and the bounds."""

    axes: tuple[Axis | None, ...]
    dealing: Dealing


class LookAhead:
    """The operations of a region, by position, and how sharded axes pass them.

    ``is_known`` returns whether an operand is a constant. Without ``by_heads`` no axis is divided into several (heads).
    Without ``fused`` no operation makes partial sums.
    """

    def __init__(
        self,
        bindings: Sequence[relax.VarBinding],
        is_known: Callable[[relax.Expr], bool],
        *,
        by_heads: bool,
        fused: bool,
    ) -> None:
        self.values = [each.value for each in bindings]
        self.names = [each.var.name for each in bindings]
        self.leaves = [leaves_of(value) for value in self.values]
        self.known = [[is_known(leaf) for leaf in leaves] for leaves in self.leaves]
        self.leaf_names = [[getattr(leaf, "name", "") for leaf in leaves] for leaves in self.leaves]
        self._last_use = {name: place for place, names in enumerate(self.leaf_names) for name in names}
        self._by_heads, self._fused = by_heads, fused

    def passage(self, place: int, axes: Sequence[Axis | None]) -> Passage | None:
        """Return how the operands' sharded axes pass an operation; None if they must be gathered before it."""
        rule = RULES.get(operator_name(self.values[place]))
        passage = rule(self.values[place], axes) if rule is not None else None
        if passage is None or (passage.sums and not self._fused) or (passage.cuts and not self._by_heads):
            return None
        for axis, wanted, known in zip(axes, passage.operands, self.known[place], strict=True):
            # Taking a part of several stretches from a whole value would cost as much as the operation.
            if axis != wanted and (axis is not None or not (known or (wanted is not None and wanted.repeats == 1))):
                return None
        return passage

    def best_axis(
        self, place: int, axes: Sequence[Axis | None], operand: int, dealt: Mapping[str, Dealt]
    ) -> Axis | None:
        """Return the best sharding of the weights of the product at ``place``; ``axes`` has them as one stretch."""
        single = axes[operand]
        if single is None:
            return None

        def reached(axis: Axis) -> dict[str, tuple[Axis | None, ...]]:
            passage = self.passage(place, [axis if each is not None else None for each in axes])
            return {} if passage is None else self._reached(place, passage.results, dealt)

        found = reached(single)
        best, most = single, len(found)
        for repeats in sorted(self._suggested(place, found)):
            if single.period % repeats == 0:
                axis = Axis(single.index, repeats, single.period // repeats)
                if (count := len(reached(axis))) > most:
                    best, most = axis, count
        return best

    def _reached(
        self, place: int, results: tuple[Axis | None, ...], dealt: Mapping[str, Dealt]
    ) -> dict[str, tuple[Axis | None, ...]]:
        """Return the values that stay sharded if the one at ``place`` is, with their axes."""
        name = self.names[place]
        reached = {name: results}
        last = self._last_use.get(name, place)
        while (place := place + 1) <= last:
            names = self.leaf_names[place]
            if not any(each in reached for each in names):
                continue
            value = self.values[place]
            if isinstance(value, relax.TupleGetItem):
                passed: tuple[Axis | None, ...] | None = (reached[names[0]][value.index],)
            else:
                passed = self._passed(place, [reached[each][0] if each in reached else None for each in names], dealt)
            if passed is not None:
                reached[self.names[place]] = passed
                last = max(last, self._last_use.get(self.names[place], place))
        return reached

    def _passed(
        self, place: int, axes: Sequence[Axis | None], dealt: Mapping[str, Dealt]
    ) -> tuple[Axis | None, ...] | None:
        """Return the axes of an operation's results; None if it needs whole operands, or makes partial sums.

        The other operands are sharded as they already are, or gathered if that does not fit.
        """
        with_others = [
            axis or (dealt[name].axes[0] if name in dealt else None)
            for axis, name in zip(axes, self.leaf_names[place], strict=True)
        ]
        for tried in (with_others, axes):
            passage = self.passage(place, tried)
            if passage is not None:
                return None if passage.sums else passage.results
        return None

    def _suggested(self, place: int, reached: Mapping[str, tuple[Axis | None, ...]]) -> set[int]:
        """Return the numbers of stretches that the readers of the values in ``reached`` suggest, without 1."""
        found: set[int] = set()
        for later in range(place + 1, len(self.values)):
            axis = next((reached[each][0] for each in self.leaf_names[later] if each in reached), None)
            if axis is not None and isinstance(self.values[later], relax.Call):
                found |= _stretches(self.values[later], axis)
        return found - {1}


def _stretches(call: relax.Call, axis: Axis) -> set[int]:
    operator = operator_name(call)
    shape = shape_of(leaves_of(call)[0])
    length = shape[axis.index]
    if operator == "relax.reshape":
        before, after = prod(shape[: axis.index]), shape_of(call)
        outer = {prod(after[:index]) for index in range(1, len(after))}
        return {each // before for each in outer if before < each < before * length and each % before == 0}
    if operator == "relax.split" and int(call.attrs.axis) % len(shape) == axis.index:
        sections = [0, *(section_ends(call) or ()), length]
        return _even([end - begin for begin, end in pairwise(sections)], length)
    if operator == "relax.strided_slice" and axis.index in (ranges := slice_ranges(call) or {}):
        begin, end, _ = ranges[axis.index]
        return _even([end - begin] if begin % max(1, end - begin) == 0 else [], length)
    return set()


def _even(lengths: Sequence[int], whole: int) -> set[int]:
    even = len(set(lengths)) == 1 and lengths[0] > 0 and whole % lengths[0] == 0
    return {whole // lengths[0]} if even else set()
