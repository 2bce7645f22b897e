"""Wrong use gives one clear error quickly, and leaves no process behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import tvm_split
from tvm_split.cluster.machine import Machine
from tvm_split.launchers.local import Local


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv1(x))
        return self.fc(torch.relu(self.conv2(x)).flatten(1))


X = torch.ones(1, 3, 6, 6)
SPLIT = {"machine-a": ["conv1"], "machine-b": ["conv2"]}
pytestmark = pytest.mark.usefixtures("no_process_stays")


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    torch.manual_seed(0)
    return tvm_split.load_model(Network().eval(), (X,))


@pytest.fixture(scope="module")
def bundle(model: tvm_split.Model) -> tvm_split.Bundle:
    return tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(2), split=SPLIT))


@pytest.fixture(scope="module")
def shared_bundle(model: tvm_split.Model) -> tvm_split.Bundle:
    """Two machines that compute each layer together, and exchange tensors in between."""
    shard = tvm_split.Shard("conv1", "conv2", "rows", {"machine-a": 0.5, "machine-b": 0.5}, "each")
    return tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(2), shards=[shard]))


def test_a_cluster_without_the_machine(bundle: tvm_split.Bundle) -> None:
    with pytest.raises(tvm_split.ClusterError, match=r"stages for machine 'machine-b'; the cluster has machine-a"):
        tvm_split.deploy(bundle, tvm_split.Cluster.local(1))


def test_a_stage_for_a_gpu_that_is_not_there(model: tvm_split.Model, three_workers: tvm_split.Cluster) -> None:
    cuda = Machine("machine-b", target={"kind": "cuda", "arch": "sm_90"})
    planned = tvm_split.plan(model, tvm_split.Cluster((Machine("machine-a"), cuda), launcher=Local()), split=SPLIT)
    bundle = tvm_split.compile(model, planned)
    with pytest.raises(tvm_split.ClusterError, match=r"stage_1 on 'machine-b' is compiled for CUDA.*no CUDA device"):
        tvm_split.deploy(bundle, three_workers)


@pytest.mark.parametrize("victim", ["blob", "ir", "manifest"])
def test_a_bundle_with_a_changed_byte(bundle: tvm_split.Bundle, tmp_path: Path, victim: str) -> None:
    bundle.save(tmp_path)
    path = {
        "blob": next((tmp_path / "blobs").iterdir()),
        "ir": tmp_path / "ir" / "machine-a.py",
        "manifest": tmp_path / "manifest.json",
    }[victim]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(tvm_split.BundleError, match=rf"{path.name} was changed: its SHA-256 is"):
        tvm_split.Bundle.load(tmp_path)


def test_a_bundle_of_another_version(bundle: tvm_split.Bundle, tmp_path: Path) -> None:
    import hashlib

    bundle.save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    text = json.dumps({**manifest, "version": 99})
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(tvm_split.BundleError, match=r"of version 99; this version of tvm-split reads .* of version \d"):
        tvm_split.Bundle.load(tmp_path)


def test_a_worker_that_dies_in_mid_stream(shared_bundle: tvm_split.Bundle) -> None:
    with tvm_split.deploy(shared_bundle, tvm_split.Cluster.local(2)) as deployment:
        named = [child for child in psutil.Process().children() if "--name=machine-b" in child.cmdline()]
        victim = max(named, key=psutil.Process.create_time)  # others have started before

        def batches() -> Iterator[torch.Tensor]:
            for index in range(100_000):
                if index == 200:
                    victim.kill()
                yield X

        with pytest.raises(tvm_split.WorkerUnavailableError, match=r"machine-b.*stage_0_machine_b_0"):
            for _ in deployment.stream(batches()):
                pass


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(words))


def test_a_word_that_does_not_exist_is_no_number_and_hurts_no_worker(three_workers: tvm_split.Cluster) -> None:
    words = torch.zeros(2, 5, dtype=torch.int64)
    model = tvm_split.load_model(Words().eval(), (words,))
    bundle = tvm_split.compile(model, tvm_split.plan(model, three_workers, stages=2, estimate=True))
    with tvm_split.deploy(bundle, three_workers) as deployment:
        (expected,) = deployment.run(words)
        wrong = words.clone()
        wrong[0, 1], wrong[1, 2] = 10**12, -(10**12)
        (output,) = deployment.run(wrong)
    outside = np.isnan(output).all(axis=-1)
    assert np.argwhere(outside).tolist() == [[0, 1], [1, 2]]
    np.testing.assert_array_equal(output[~outside], expected[~outside])
