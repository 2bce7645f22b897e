"""What check-unequal shares, without measuring it."""

from __future__ import annotations

from dataclasses import replace

from scripts.bench_shards import SHARDS
from scripts.check_unequal import NAMES, SHARES, shared_by


def test_both_ways_share_the_layers_of_the_benchmark_in_their_own_parts() -> None:
    (benchmarked,) = SHARDS["vgg16"].values()
    for shares in SHARES.values():
        parts = dict(zip(NAMES, shares, strict=True))
        assert shared_by(shares) == [replace(each, shares=parts) for each in benchmarked]
