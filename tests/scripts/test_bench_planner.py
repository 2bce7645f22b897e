"""What the figures of plans for many machines must not be, each on its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scripts.bench_planner import Planned, faults

GOOD = Planned(
    machines=64,
    pieces=640,
    kinds="unlike",
    links="alike",
    network="chain",
    replicas=False,
    period_seconds=0.2,
    lower_bound_seconds=0.191,
    gap=0.045,
    simple_ways_seconds={"one machine": 3.0, "first fit": 0.2},
    machines_used=64,
    stages=64,
    method="the best found in 10 s",
    time_limit_seconds=10.0,
    seconds=10.9,
    processor_seconds=10.9,
    largest_bytes=700_000_000,
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"period_seconds": 0.201}, "a simple way is better"),
        ({"gap": 0.051}, "a gap of 5.1%, over 5%"),
        ({"gap": 0.051, "pieces": 639}, None),  # where a machine has few pieces they do not divide
        ({"gap": 0.051, "links": "two racks"}, None),
        ({"largest_bytes": 2_100_000_000}, "2.1 GB, over 2"),
        ({"seconds": 11.1, "processor_seconds": 11.2}, "11.1 s instead of 10"),
        ({"seconds": 15.0}, None),  # others kept the machine busy
    ],
)
def test_faults(change: dict[str, Any], words: str | None) -> None:
    found = list(faults([replace(GOOD, **change)]))
    assert [fault.partition(": ")[0] for fault in found] == ([] if words is None else [words])


def test_fewer_machines_must_not_be_better() -> None:
    fewer = replace(GOOD, machines=32, period_seconds=0.19)
    assert list(faults([GOOD, fewer])) == ["32 machines are better: common, 64 machines, 640 pieces"]
    assert not list(faults([GOOD, replace(fewer, pieces=320)]))
