"""The benchmarks' shortest forms run to their end and measure something, however fast."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench

pytestmark = pytest.mark.slow


def report_of(folder: Path, *words: str) -> dict[str, Any]:
    path = folder / "report.json"
    code = bench.main([*words, "--rounds", "1", "--json", str(path)])
    report: dict[str, Any] = json.loads(path.read_text())
    assert (code, report["failed"]) == (0, {})
    return report


@pytest.mark.parametrize(
    "words",
    [
        ("links", "1,000 bytes", "--set", "seconds=0.1", "--also", sys.executable),
        ("planner", "common, 8 machines", "unet, replicas, 8 machines", "--set", "seconds=2", "--check"),
        ("simulation", "2 workers, convolutions", "2 replicas", "--set", "blocks=4", "micro-batches=20"),
        ("first", "mobilenet_v2, one worker"),
        ("recovery", "0.3 ms", "--set", "seconds=0.5"),
        ("observing", "0.3 ms", "--set", "seconds=0.1", "--also", sys.executable),
        pytest.param(("kernels", "mobilenet_v2, 1 threads"), marks=pytest.mark.long),
        pytest.param(("streams", "resnet50", "--set", "seconds=0.2"), marks=pytest.mark.long),
        pytest.param(("shards", "bert_base"), marks=pytest.mark.long),
        pytest.param(("plans", "mobilenet_v2"), marks=pytest.mark.long),
        pytest.param(("unequal", "one machine at half speed"), marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)
def test_every_side_has_figures(tmp_path: Path, words: tuple[str, ...]) -> None:
    for subject in report_of(tmp_path, *words)["subjects"].values():
        for figures in subject["medians"].values():
            assert figures
            assert all(math.isfinite(value) for value in figures.values())
            assert all(value > 0 for key, value in figures.items() if key in ("seconds", "period_seconds"))


def test_the_case_of_gpus_is_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    words = ("mobilenet_v2, float16", "two machines", "kernels", "--set", "target=llvm", "--check")
    report = report_of(tmp_path, "gpu", *words)
    assert len(report["subjects"]) == 4
    assert report["over_limit"] == []


def test_a_gpu_that_is_not_there_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "report.json"
    assert bench.main(["gpu", "mobilenet_v2, float32, batch 1", "--json", str(path)]) == 1
    (text,) = set(json.loads(path.read_text())["failed"].values())
    assert "there is no GPU: " in text
