"""`scripts/prove_gpu.py` where its workers do not start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import prove_gpu
from scripts.gpu_pipelines import transports_between_gpus


def test_workers_that_are_not_ready_in_time_are_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove_gpu, "TIMEOUT_SECONDS", 0.0)
    output = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["prove_gpu", "--target", "llvm", "--output", str(output)])
    assert prove_gpu.main() == 1
    said = capsys.readouterr()
    assert said.out.startswith("nothing can be proven: ")
    assert "Traceback" not in said.out + said.err
    results = json.loads(output.read_text())
    assert list(results["failed"]) == ["workers"]
    assert results["failed"]["workers"].startswith("DeadlineError: ")
    assert results["not_reached"] == []


def test_what_two_gpus_cannot_exchange_by_is_told() -> None:
    assert transports_between_gpus(1, is_rehearsal=False) == (
        (),
        "this machine has 1 GPU, and nothing is exchanged between two",
    )
    transports, why_no_others = transports_between_gpus(2, is_rehearsal=False)
    assert transports[:2] == ("grpc", "shm")
    assert ("nccl" in transports) == (why_no_others == "")
