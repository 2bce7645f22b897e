"""Axes in stretches, and the bounds of values that meet."""

from __future__ import annotations

import numpy as np

from relay_passes.shards.dealt_axes import Axis, Dealing, is_dealable


def test_a_part_has_the_same_indices_of_each_stretch() -> None:
    columns = np.arange(24).reshape(2, 12)
    part = Axis(1, repeats=3, period=4).part_of(columns, 1, 3)
    np.testing.assert_array_equal(part[0], [1, 2, 5, 6, 9, 10])
    assert part.flags.c_contiguous
    assert not np.shares_memory(part, columns)


def test_values_that_meet_have_the_bounds_that_all_allow() -> None:
    queries, keys, values = Dealing(12), Dealing(8), Dealing(8)
    queries.join(keys, 0)
    assert (queries.blocks, keys.blocks, values.blocks) == (4, 4, 8)
    values.join(queries, 2)
    assert (queries.blocks, keys.blocks, values.blocks) == (2, 2, 2)
    assert keys.bounds((0.5, 0.5)) == ((0, 1), (1, 2))


def test_parts_are_whole_vectors_where_shares_allow_it() -> None:
    assert Dealing(512).bounds((2 / 3, 1 / 3)) == ((0, 336), (336, 512))
    assert Dealing(64).bounds((0.6, 0.4)) == ((0, 40), (40, 64))
    assert Dealing(64).bounds((0.5, 0.5)) == ((0, 32), (32, 64))
    assert Dealing(10).bounds((0.6, 0.4)) == ((0, 6), (6, 10))
    assert Dealing(32).bounds((0.9, 0.06, 0.04)) == ((0, 29), (29, 31), (31, 32))
    # Of heads, or groups of channels, each block may be a vector, or several.
    assert Dealing(12, 768).bounds((0.6, 0.4)) == ((0, 7), (7, 12))
    assert Dealing(128, 512).bounds((0.6, 0.4)) == ((0, 76), (76, 128))


def test_values_that_meet_are_cut_between_vectors_of_all() -> None:
    wide, narrow = Dealing(512), Dealing(64)
    wide.join(narrow, 0)
    assert wide.bounds((2 / 3, 1 / 3)) == narrow.bounds((2 / 3, 1 / 3)) == ((0, 40), (40, 64))


def test_each_share_needs_a_block() -> None:
    assert is_dealable(3, (0.4, 0.35, 0.25))
    assert not is_dealable(3, (0.5, 0.3, 0.2))
    assert not is_dealable(2, (0.4, 0.35, 0.25))
