"""What check-unequal shares, without measuring it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import check_unequal
from scripts.bench_shards import SHARDS
from scripts.check_unequal import NAMES, SHARES, shared_by


def test_both_ways_share_the_layers_of_the_benchmark_in_their_own_parts() -> None:
    (benchmarked,) = SHARDS["vgg16"].values()
    for shares in SHARES.values():
        parts = dict(zip(NAMES, shares, strict=True))
        assert shared_by(shares) == [replace(each, shares=parts) for each in benchmarked]


@pytest.mark.parametrize(("share", "code"), [(0.97, 0), (0.94, 1)])
def test_what_was_measured_is_judged_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, code: int
) -> None:
    found = {"case": "one machine at half speed", "share_of_best": share, "mobilenet_stages": None}
    monkeypatch.setattr(check_unequal, "check", lambda case, console, rounds: found)
    monkeypatch.setattr(sys, "argv", ["check_unequal", "--case", "1", "--output", str(tmp_path / "results.json")])
    assert check_unequal.main() == code
    assert json.loads((tmp_path / "results.json").read_text())["results"] == [found]
