"""When the fastest of several measurements counts, and which pairs are measured together."""

from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
from hypothesis import given, strategies as st

from tvm_split.profiling.rounds import PARALLEL_PAIRS, Confirmed, confirmed_fastest, rounds_of


class Scripted:
    """Measurements with given results; the last one is repeated. ``order`` lists the keys as they were measured."""

    def __init__(self, **seconds: list[float]) -> None:
        self.order: list[str] = []
        self._left: dict[str, Iterator[float]] = {key: iter(times) for key, times in seconds.items()}
        self._last: dict[str, float] = {}

    def measure(self, key: str) -> float:
        self.order.append(key)
        self._last[key] = next(self._left[key], self._last.get(key, 0.0))
        return self._last[key]

    def measures(self) -> dict[str, Callable[[], float]]:
        return {key: lambda key=key: self.measure(key) for key in self._left}


def confirmed(scripted: Scripted, limit_seconds: float = 600.0) -> dict[str, Confirmed[float]]:
    return confirmed_fastest(scripted.measures(), float, limit_seconds=limit_seconds)


@pytest.mark.parametrize(
    ("seconds", "fastest", "is_confirmed", "rounds"),
    [
        ([1.0, 1.01, 1.02], 1.0, True, 3),  # quiet
        ([5.0, 1.04, 1.0], 1.0, True, 3),  # disturbed once
        ([5.0, 7.0, 1.0, 6.0, 1.03], 1.0, True, 5),  # disturbed most of the time
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], 1.0, False, 9),  # the fastest stays the only one
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 1.0, False, 9),
    ],
)
def test_the_fastest_counts_once_another_comes_close(
    seconds: list[float], fastest: float, is_confirmed: bool, rounds: int
) -> None:
    scripted = Scripted(a=seconds)
    assert confirmed(scripted) == {"a": Confirmed(fastest, is_confirmed)}
    assert len(scripted.order) == rounds


def test_rounds_alternate_their_order_and_repeat_only_what_is_unconfirmed() -> None:
    scripted = Scripted(a=[1.0], b=[3.0, 4.0, 2.0, 2.0])
    assert confirmed(scripted) == {"a": Confirmed(1.0, True), "b": Confirmed(2.0, True)}
    assert "".join(scripted.order) == "abbaabb"


def test_no_round_begins_that_would_not_end_in_time() -> None:
    scripted = Scripted(a=[1.0], b=[2.0])
    assert confirmed(scripted, limit_seconds=0.0) == {"a": Confirmed(1.0, False), "b": Confirmed(2.0, False)}
    assert scripted.order == ["a", "b"]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=8))
def test_pairs_are_measured_together_that_share_no_host(hosts_of: list[int]) -> None:
    hosts = {f"machine-{index}": f"host-{host}" for index, host in enumerate(hosts_of)}
    pairs = list(permutations(hosts, 2))
    rounds = list(rounds_of(pairs, hosts))
    assert sorted(pair for together in rounds for pair in together) == sorted(pairs)
    for together in rounds:
        assert len(together) <= PARALLEL_PAIRS
        busy = [host for pair in together for host in {hosts[name] for name in pair}]
        assert len(busy) == len(set(busy))
