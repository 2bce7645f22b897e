"""Bounds of parts: near the shares, at multiples of vectors, and common to values that operators combine."""

from hypothesis import assume, given, strategies as st

from relay_passes.sharding.region import CommonBounds, bounds, has_empty


@given(st.integers(1, 200), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([1, 2, 8]))
def test_bounds_are_near_the_shares(total: int, weights: list[int], unit: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    assume(min(shares) * total > unit)
    parts = bounds(total, shares, unit)
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
    for place, (_, end) in enumerate(parts[:-1]):
        assert end % unit == 0 or end == total
        assert abs(end - sum(shares[: place + 1]) * total) <= unit


def test_a_part_of_too_small_a_share_is_empty() -> None:
    parts = bounds(12, (0.9, 0.1), 4)
    assert parts == ((0, 12), (12, 12))
    assert has_empty(parts)
    assert not has_empty(bounds(12, (0.6, 0.4), 4))


def ranges(blocks: int, shares: tuple[float, ...], length: int) -> tuple[tuple[int, int], ...]:
    return CommonBounds(blocks, length).ranges(shares, length)


def test_parts_are_whole_vectors_where_shares_allow_it() -> None:
    assert ranges(512, (2 / 3, 1 / 3), 512) == ((0, 336), (336, 512))
    assert ranges(64, (0.6, 0.4), 64) == ((0, 40), (40, 64))
    assert ranges(10, (0.6, 0.4), 10) == ((0, 6), (6, 10))
    assert ranges(32, (0.9, 0.06, 0.04), 32) == ((0, 29), (29, 31), (31, 32))
    # Of heads, or groups of channels, each block may be a vector, or several.
    assert ranges(12, (0.6, 0.4), 768) == ((0, 448), (448, 768))


def test_combined_values_have_the_bounds_that_all_allow() -> None:
    wide, narrow = CommonBounds(512, 512), CommonBounds(64, 64)
    wide.join(narrow, 0)
    assert wide.ranges((2 / 3, 1 / 3), 512) == ((0, 320), (320, 512))
    assert narrow.ranges((2 / 3, 1 / 3), 64) == ((0, 40), (40, 64))
