"""Measures a few items of each kind, and uses their values for the other items of that kind. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Value = TypeVar("Value")


@dataclass(frozen=True)
class SpotChecked(Generic[Item, Value]):
    """A value for each item; ``assumed`` are the items with the value of another item of their kind."""

    values: Mapping[Item, Value]
    assumed: frozenset[Item]


def first_of(items: Iterable[Item], kind_of: Callable[[Item], Hashable]) -> list[Item]:
    """Return the items to measure first: the first and the last of every kind, the two most likely to differ."""
    return [item for kind in _by_kind(items, kind_of) for item in dict.fromkeys((kind[0], kind[-1]))]


def spot_checked(
    items: Sequence[Item],
    kind_of: Callable[[Item], Hashable],
    measure: Callable[[Sequence[Item]], Mapping[Item, Value]],
    agree: Callable[[Value, Value], bool],
    size: Callable[[Value], float],
) -> SpotChecked[Item, Value]:
    """Measure two items of every kind; if they agree, the others of the kind get the value of the first.

    If they disagree, one of them was disturbed. Then a third is measured, and the others get the value of the middle
    ``size``.
    """
    found = dict(measure(first_of(items, kind_of)))
    kinds = _by_kind(items, kind_of)
    thirds = [kind[len(kind) // 2] for kind in kinds if len(kind) > 2 and not agree(found[kind[0]], found[kind[-1]])]
    if thirds:
        found.update(measure(thirds))
    assumed: dict[Item, Value] = {}
    for kind in kinds:
        known = [item for item in kind if item in found]
        typical = sorted(known, key=lambda item: size(found[item]))[1] if len(known) > 2 else known[0]
        assumed.update(dict.fromkeys([item for item in kind if item not in found], found[typical]))
    return SpotChecked({**found, **assumed}, frozenset(assumed))


def _by_kind(items: Iterable[Item], kind_of: Callable[[Item], Hashable]) -> list[list[Item]]:
    kinds: dict[Hashable, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind_of(item), []).append(item)
    return list(kinds.values())
