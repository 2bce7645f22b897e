"""Weights are sent once, and only to the worker that needs them."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.program.specs import StageSpec
from tvm_split.cluster.machine import Machine


@pytest.fixture(scope="module")
def bundle() -> tvm_split.Bundle:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096)).eval()
    model = tvm_split.load_model(network, (torch.randn(1, 256),))
    cluster = tvm_split.Cluster.local(2)
    split = {"machine-a": ["0"], "machine-b": ["2"]}
    return tvm_split.compile(model, tvm_split.plan(model, cluster, split=split))


def blob_bytes(stages: tuple[StageSpec, ...]) -> int:
    return sum({blob.sha256: blob.size_bytes for stage in stages for blob in stage.blobs}.values())


def test_each_blob_is_sent_once_and_each_worker_says_what_it_holds(
    bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster
) -> None:
    with tvm_split.deploy(bundle, three_workers) as first:
        statistics = first.stats()
    assert statistics.blob_bytes_sent == blob_bytes(bundle.program.stages)
    held = {"machine-a": 4 * (256 * 64 + 64), "machine-b": 4 * (64 * 4096 + 4096 + 4096 * 4096 + 4096)}
    assert statistics.weight_bytes == held
    with tvm_split.deploy(bundle, three_workers) as second:
        assert second.stats().blob_bytes_sent == 0


def test_equal_weights_of_a_machine_s_stages_are_held_once(three_workers: tvm_split.Cluster) -> None:
    """A weight may have another name in each stage: here the second of the first stage, and the first of the last."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64, False), nn.Linear(64, 64, False), nn.ReLU(), nn.Linear(64, 64, False))
    network[3].load_state_dict(network[1].state_dict())
    model = tvm_split.load_model(network.eval(), (torch.randn(1, 8),))
    plan = tvm_split.plan(model, three_workers, split={"machine-a": ["0", "3"], "machine-b": ["2"]})
    with tvm_split.deploy(tvm_split.compile(model, plan), three_workers) as deployment:
        assert deployment.stats().weight_bytes == {"machine-a": 4 * (8 * 64 + 64 * 64), "machine-b": 0}


def test_a_worker_gets_only_its_own_stages(bundle: tvm_split.Bundle, tmp_path: Path) -> None:
    """Two workers with separate caches, as on two hosts: each stores only what its stages need."""
    names = bundle.program.machines
    with ExitStack() as stack:
        workers = {name: stack.enter_context(LocalWorkers([name], cache=tmp_path / name)) for name in names}
        machines = tuple(Machine(name, endpoint=workers[name].endpoints[name]) for name in names)
        deployment = stack.enter_context(tvm_split.deploy(bundle, tvm_split.Cluster(machines)))
        deployment.run(torch.zeros(1, 256))
        for name in names:
            stages = bundle.program.stages_on(name)
            held = {path.name for path in (tmp_path / name).rglob("*") if path.is_file()}
            assert {digest for digest in held if len(digest) == 64} == {b.sha256 for s in stages for b in s.blobs}
