"""Schedules are proportional, even and deterministic; recurrences behave as the sets that they represent."""

import collections
import itertools
import math

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.program.round_robin import (
    DIVISIBLE,
    LONGEST_CYCLE,
    Recurrence,
    cycle_of,
    longest_schedule,
    micro_batches_of,
    schedule_by_share,
)

shares = st.lists(st.floats(0.2, 1.0), min_size=1, max_size=6)
recurrences = st.integers(1, 24).flatmap(
    lambda period: st.builds(
        lambda members: Recurrence(period, tuple(sorted(members))), st.sets(st.integers(0, period - 1), min_size=1)
    )
)


@given(shares)
def test_each_replica_has_its_share_within_one_micro_batch(shares: list[float]) -> None:
    schedule = schedule_by_share(shares)
    assert schedule == schedule_by_share(shares)
    assert len(schedule) <= longest_schedule(len(shares))
    for replica, share in enumerate(shares):
        count = schedule.count(replica)
        assert count >= 1
        assert abs(count - len(schedule) * share / sum(shares)) < 1
        given_so_far = 0
        for place, computing in enumerate(schedule * 2, 1):
            given_so_far += computing == replica
            assert abs(given_so_far - place * count / len(schedule)) < 1


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([], "positive numbers"),
        ([1.0, 0.0], "positive numbers"),
        ([1.0, -1.0], "positive numbers"),
        ([1.0, float("nan")], "positive numbers"),
        ([1.0, float("inf")], "positive numbers"),
        ([1.0, 0.001], "share 0.000999 of replica 1 is less than one micro-batch of 60"),
    ],
)
def test_shares_that_cannot_be_dealt(shares: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schedule_by_share(shares)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=400).filter(lambda counts: sum(counts) <= 20 * len(counts)))
def test_shares_of_whole_weights_are_met_exactly(counts: list[int]) -> None:
    """Shares that are exact for some length get the shortest such length, which nobody has to state."""
    schedule = schedule_by_share([count / sum(counts) for count in counts])
    assert len(schedule) == sum(counts) // math.gcd(*counts)
    weights = collections.Counter(schedule)
    assert [weights[replica] * sum(counts) for replica in range(len(counts))] == [
        count * len(schedule) for count in counts
    ]


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=60))
def test_other_shares_get_lengths_that_repeat_together(shares: list[float]) -> None:
    length = len(schedule_by_share(shares))
    assert DIVISIBLE % length == 0 or [share * length / sum(shares) for share in shares] == pytest.approx(
        [round(share * length / sum(shares)) for share in shares], rel=1e-9
    )


def test_the_least_cycle_of_several_schedules() -> None:
    assert cycle_of([]) == 1
    assert cycle_of([6, 10, 15]) == 30
    assert cycle_of([1 << 14, 1 << 3]) == LONGEST_CYCLE
    with pytest.raises(ValueError, match="repeat together after more than 16384 micro-batches"):
        cycle_of(iter(range(1, 1 << 62)))  # before the list grows


@given(recurrences, st.integers(0, 200), st.integers(0, 100))
def test_a_recurrence_is_the_set_it_stands_for(when: Recurrence, sequence: int, window: int) -> None:
    members = [number for number in range(1000) if number % when.period in when.remainders]
    assert [when.nth(number) for number in range(20)] == members[:20]
    assert when.count_before(sequence) == sum(member < sequence for member in members)
    assert (sequence in when) == (sequence in members)
    assert when.longest_gap == max(b - a for a, b in itertools.pairwise(members))
    assert when.within(5 * when.period) == [member for member in members if member < 5 * when.period]
    counts = [sum(start <= member < start + window for member in members) for start in range(when.period)]
    assert when.most_in(window) == max(counts)


@given(recurrences, recurrences)
def test_intersection_and_union(left: Recurrence, right: Recurrence) -> None:
    both, any_of = left & right, left | right
    for sequence in range(2 * 24 * 23):
        assert (both is not None and sequence in both) == (sequence in left and sequence in right)
        assert (sequence in any_of) == (sequence in left or sequence in right)


@pytest.mark.parametrize(
    ("period", "remainders"), [(0, (0,)), (LONGEST_CYCLE + 1, (0,)), (2, ()), (2, (2,)), (2, (-1,)), (3, (1, 0))]
)
def test_what_is_no_recurrence(period: int, remainders: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="recur with"):
        Recurrence(period, remainders)


def test_a_replica_that_is_not_in_the_schedule() -> None:
    assert micro_batches_of(1, (0, 1, 0)) == Recurrence(3, (1,))
    with pytest.raises(ValueError, match="not \\(\\)"):
        micro_batches_of(2, (0, 1, 0))
