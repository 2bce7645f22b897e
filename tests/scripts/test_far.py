"""How check-far judges, without measuring it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import check_far


@pytest.mark.parametrize(("of_limit", "of_near", "code"), [(0.97, 0.9, 0), (0.9, 0.97, 0), (0.9, 0.93, 1)])
def test_what_was_measured_is_judged_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_limit: float, of_near: float, code: int
) -> None:
    seconds = {"far_seconds": 0.01, "near_seconds": 0.01, "limit_seconds": 0.01}
    found = {**seconds, "share_of_limit": of_limit, "share_of_near": of_near}
    asked: list[check_far.Case] = []
    monkeypatch.setattr(check_far, "check", lambda case, workers, rounds, seconds: asked.append(case) or found)
    output = tmp_path / "results.json"
    options = ["--stages", "2", "--tensors", "small", "--latency", "0.02", "--output", str(output)]
    assert check_far.main(options) == code
    assert asked == [check_far.Case(2, "small", 0.02)]
    assert json.loads(output.read_text())["results"] == [{"case": "2 stages, small tensors, 20 ms", **found}]
