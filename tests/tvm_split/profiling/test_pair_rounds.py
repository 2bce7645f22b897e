"""Which pairs of machines are measured at the same time."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, strategies as st

from tvm_split.profiling.pair_rounds import PARALLEL_PAIRS, rounds_of


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
