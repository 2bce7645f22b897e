"""A changed manifest of a bundle gives either a bundle that can be saved, or a `BundleError`.

Neither loading nor saving touches anything outside of the bundle's folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import tvm_split
from tests.helpers.mutations import changed
from tests.helpers.trials import Trials
from tvm_split import Bundle, BundleError, Cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    model = tvm_split.load_model(network, (torch.randn(1, 4),))
    plan = tvm_split.plan(model, Cluster.in_process(2, threads=1), split={"machine-a": ["0", "1"], "machine-b": ["2"]})
    folder_path = tmp_path_factory.mktemp("bundles") / "here" / "bundle"
    tvm_split.compile(model, plan).save(folder_path)
    return folder_path


def test_manifests(folder: Path, trials: Trials) -> None:
    good = (folder / "manifest.json").read_bytes()
    unforeseen: dict[str, str] = {}
    try:
        for _ in trials:
            text = changed(json.loads(good), trials.source)
            (folder / "manifest.json").write_bytes(text)
            (folder / "manifest.sha256").write_text(hashlib.sha256(text).hexdigest())
            try:
                Bundle.load(folder).save(folder.parent / "saved")
                trials.found["accepted"] += 1
            except BundleError:
                trials.found["BundleError"] += 1
            except Exception as error:
                trials.found[type(error).__name__] += 1
                unforeseen.setdefault(
                    f"{type(error).__name__}: {str(error)[:200]}", text[:300].decode(errors="replace")
                )
    finally:
        (folder / "manifest.json").write_bytes(good)
        (folder / "manifest.sha256").write_text(hashlib.sha256(good).hexdigest())
    assert not unforeseen
    assert {path.name for path in folder.parent.iterdir()} <= {"bundle", "saved"}
    assert [path.name for path in folder.parent.parent.iterdir()] == ["here"]
