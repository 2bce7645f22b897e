"""Stages compiled here for a Raspberry-class machine, run by the same worker there, emulated."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml

import tvm_split
from rpc_runtime.client.worker_client import describe
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.readme_table import run
from tests.helpers.rpc_runtime.worker_process import ready, start_worker
from tests.models.convolutional_networks import resnet
from tests.models.small_onnx_model import small_model
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.bundle import Verified

PYTHON = os.environ["AARCH64_PYTHON"]
RASPBERRY = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tvm_split.Cluster]:
    """This processor, and an emulated Cortex-A72."""
    caches = [tmp_path_factory.mktemp(name) for name in ("desk", "raspberry")]
    options = ("--listen", "127.0.0.1:0", "--threads", "1", "--json")
    workers = [start_worker(caches[0], *options), start_worker(caches[1], *options, python=PYTHON)]
    try:
        desk, raspberry = (
            WorkerEndpoint(name, ready(worker)) for name, worker in zip(("desk", "raspberry"), workers, strict=True)
        )
        machines = (Machine("desk", endpoint=desk), Machine("raspberry", target=RASPBERRY, endpoint=raspberry))
        yield tvm_split.Cluster(machines)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.communicate(timeout=60)


def test_a_stage_of_a_resnet_has_the_same_answers_there(cluster: tvm_split.Cluster, tmp_path: Path) -> None:
    network = resnet((1, 1, 1, 1), 64, 1000)
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model = tvm_split.load_model(network, (x,))
    planned = tvm_split.plan(model, cluster, split={"desk": ["conv1"], "raspberry": ["layer3"]})
    bundle = tvm_split.compile(model, planned)
    assert bundle.verified is Verified.COMPILED_AGAIN
    assert describe(cluster.start().endpoints()["raspberry"], timeout_seconds=60).architecture == "aarch64"
    wanted = network(x).detach().numpy()
    with tvm_split.deploy(bundle, cluster, timeout_seconds=300) as deployment:
        (found,) = deployment.run(x)
        again = [outputs[0] for outputs in deployment.stream([x, x])]
    assert np.abs(found - wanted).max() < 1e-4 * np.ptp(wanted)
    for output in again:
        np.testing.assert_array_equal(output, found)


def test_the_line_of_the_readme(cluster: tvm_split.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(small_model(), tmp_path / "model.onnx")
    listed = {"name": "raspberry", "address": cluster.machine("raspberry").address, "target": RASPBERRY}
    (tmp_path / "raspberry.yaml").write_text(yaml.safe_dump({"machines": [listed]}))
    run("a Raspberry Pi")
    bundle = tvm_split.Bundle.load(tmp_path / "bundle")
    assert [stage.machine for stage in bundle.program.stages] == ["raspberry"]
    assert bundle.verified is Verified.COMPILED_AGAIN
