"""Of each kind two are measured, and where these disagree a third; the others are as the middle one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from tvm_split.profiling.spot_checks import first_of, spot_checked

VALUES = st.dictionaries(st.integers(0, 30), st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12)
"""By item: its kind, and what would be measured of it."""


@given(VALUES)
def test_each_item_has_a_value_of_its_own_or_of_an_agreeing_kind(items: dict[int, tuple[int, int]]) -> None:
    asked: list[int] = []

    def measure(some: Sequence[int]) -> dict[int, int]:
        asked.extend(some)
        return {item: items[item][1] for item in some}

    found = spot_checked(list(items), lambda item: items[item][0], measure, lambda one, other: one == other, float)
    assert set(found.values) == set(items)
    assert len(asked) == len(set(asked))
    assert set(asked) == set(items) - found.assumed
    for item in asked:
        assert found.values[item] == items[item][1]
    kinds = {kind: [item for item in items if items[item][0] == kind] for kind, _ in items.values()}
    for kind in kinds.values():
        looked_at = {kind[0], kind[-1]}
        if items[kind[0]][1] != items[kind[-1]][1] and len(kind) > 2:
            looked_at.add(kind[len(kind) // 2])
        assert found.assumed & set(kind) == set(kind) - looked_at
        typical = sorted(items[item][1] for item in looked_at)[len(looked_at) // 2]
        assert all(found.values[item] == typical for item in found.assumed & set(kind))


def test_the_ends_of_each_kind_come_first() -> None:
    assert first_of("aAbcBC", str.isupper) == ["a", "c", "A", "C"]
    assert first_of("a", str.isupper) == ["a"]
