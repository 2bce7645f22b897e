"""Axes in stretches, and the bounds of values that meet."""

from __future__ import annotations

import numpy as np

from tvm_split.relay_passes.shards.dealt_axes import Axis, Dealing, is_dealable


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


def test_each_share_needs_a_block() -> None:
    assert is_dealable(3, (0.4, 0.35, 0.25))
    assert not is_dealable(3, (0.5, 0.3, 0.2))
    assert not is_dealable(2, (0.4, 0.35, 0.25))
