"""Inputs of any number of rows: results equal those of the rows one by one, in order, each once."""

import asyncio
import os
import signal
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies
from torch import Tensor, nn

import tvm_split
from rpc_runtime.client.worker_client import describe
from tvm_split.errors import RecoveryWarning

ROWS = 3
TOKENS = 6
Arrays = dict[str, np.ndarray[Any, Any]]


class Words(nn.Module):
    """Words with a mask and a table of positions, which is no part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> dict[str, Tensor]:
        words = self.encoder(self.embedding(ids) + positions) * mask[..., None]
        return {"words": words.transpose(0, 1), "scores": self.head(words.mean(1))}


def words(count: int, seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    return {
        "ids": generator.integers(0, 11, (count, TOKENS)),
        "mask": generator.integers(0, 2, (count, TOKENS)).astype(np.float32),
        "positions": np.random.default_rng(0).standard_normal((TOKENS, 16)).astype(np.float32),
    }


def row(inputs: Arrays, index: int) -> Arrays:
    return {name: array if name == "positions" else array[index : index + 1] for name, array in inputs.items()}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return Words().eval()


@pytest.fixture(scope="module")
def bundle(network: nn.Module) -> tvm_split.Bundle:
    model = tvm_split.load_model(network, {name: torch.from_numpy(array) for name, array in words(ROWS).items()})
    split = {"machine-a": ["embedding", "encoder"], "machine-b": ["head"]}
    plan = tvm_split.plan(model, tvm_split.Cluster.local(2), split=split, estimate=True)
    return tvm_split.compile(model, plan)


@pytest.fixture(scope="module")
def deployment(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster) -> Iterator[tvm_split.Deployment]:
    with tvm_split.deploy(bundle, three_workers) as deployment:
        yield deployment


def expected(network: nn.Module, inputs: Arrays) -> Arrays:
    with torch.no_grad():
        return {name: y.numpy() for name, y in network(**{n: torch.from_numpy(x) for n, x in inputs.items()}).items()}


def assert_equal(outputs: Any, wanted: Any) -> None:
    for name in ("words", "scores"):
        np.testing.assert_allclose(outputs[name], wanted[name], rtol=1e-4, atol=1e-5)
        assert outputs[name].shape == wanted[name].shape


@given(count=strategies.integers(1, 40), seed=strategies.integers(0, 100))
@settings(max_examples=20)
def test_a_batch_equals_its_rows_one_by_one(
    deployment: tvm_split.Deployment, network: nn.Module, count: int, seed: int
) -> None:
    inputs = words(count, seed)
    outputs = deployment.run(inputs)
    assert_equal(outputs, expected(network, inputs))
    alone = list(deployment.stream(row(inputs, index) for index in range(count)))
    np.testing.assert_allclose(outputs["words"], np.concatenate([one["words"] for one in alone], 1), atol=1e-6)
    np.testing.assert_allclose(outputs["scores"], np.concatenate([one["scores"] for one in alone]), atol=1e-6)


@given(counts=strategies.lists(strategies.integers(0, 9), max_size=8))
@settings(max_examples=20)
def test_a_stream_of_mixed_sizes_keeps_its_order(
    deployment: tvm_split.Deployment, network: nn.Module, counts: list[int]
) -> None:
    batches = [words(count, seed) for seed, count in enumerate(counts)]
    results = list(deployment.stream(iter(batches)))
    assert len(results) == len(batches)
    for outputs, inputs in zip(results, batches, strict=True):
        assert_equal(outputs, expected(network, inputs))


def test_futures_and_coroutines(deployment: tvm_split.Deployment, network: nn.Module) -> None:
    inputs = [words(count, count) for count in (1, 3, 10)]
    wanted = [expected(network, each) for each in inputs]
    futures = []
    for each in inputs:
        changed = {name: array.copy() for name, array in each.items()}
        futures.append(deployment.submit(changed))
        for array in changed.values():
            array[...] = 0

    async def together() -> list[Any]:
        return await asyncio.gather(*(deployment.run_async(**each) for each in inputs))

    for outputs in ([future.result() for future in futures], asyncio.run(together())):
        for one, other in zip(outputs, wanted, strict=True):
            assert_equal(one, other)


def test_stages_count_micro_batches(bundle: tvm_split.Bundle) -> None:
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(2)) as deployment:
        assert deployment.run(words(0))["words"].shape == (TOKENS, 0, 16)
        assert len(list(deployment.stream([words(3), words(8), words(1)]))) == 3
        assert {stage.micro_batches for stage in deployment.stats().stages} == {6}
        report = tvm_split.bench(deployment, [words(7)], rounds=1, micro_batches=3)
    assert report.latency.measured > 0


def test_memory_is_bounded_by_what_is_in_flight(three_workers: tvm_split.Cluster) -> None:
    model = tvm_split.load_model(nn.Linear(256, 2), (torch.ones(64, 256),))
    bundle = tvm_split.compile(model, tvm_split.plan(model, three_workers, stages=1, estimate=True))
    values = np.ones((64 * 500, 256), np.float32)  # 33 MB
    with tvm_split.deploy(bundle, three_workers) as deployment:
        tracemalloc.start()
        try:
            (outputs,) = deployment.run(values)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert len(outputs) == len(values)
    assert most < values.nbytes / 3


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_replicas_and_shards(three_workers: tvm_split.Cluster, kind: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2)).eval()
    model = tvm_split.load_model(network, (torch.ones(2, 3, 8, 8),))
    if kind == "shards":
        shard = tvm_split.Shard("0", "0", "rows", {"machine-a": 0.5, "machine-c": 0.5})
        planned = tvm_split.plan(model, three_workers, shards=[shard])
    else:
        split = {"machine-a": ["0"], "machine-b": ["1"], "machine-c": ["3"]}
        planned = tvm_split.plan(model, three_workers, split=split)
        first, middle, last = planned.stages
        middle = replace(middle, machines=("machine-b", "machine-c"), shares=(0.5, 0.5))
        planned = replace(planned, stages=(first, middle, last))
    images = torch.randn(11, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with tvm_split.deploy(tvm_split.compile(model, planned), three_workers) as deployment, torch.no_grad():
        for count in (11, 1, 2, 5):
            (outputs,) = deployment.run(images[:count])
            np.testing.assert_allclose(outputs, network(images[:count]), rtol=1e-4, atol=1e-5)
        assert "machine-c" in deployment.program.machines


def test_inputs_that_do_not_fit(deployment: tvm_split.Deployment) -> None:
    with pytest.raises(tvm_split.InputError, match="different numbers of rows: ids: 4, mask: 5"):
        deployment.run(**{**words(4), "mask": words(5)["mask"]})
    with pytest.raises(tvm_split.InputError, match=r"positions: float32\[7, 16\].*no rows of the batch"):
        deployment.run(**{**words(4), "positions": np.zeros((7, 16), np.float32)})
    with pytest.raises(tvm_split.InputError, match=r"input 0 must be ids: int64\[3, 6\].*\[4, 5\]"):
        deployment.run(**{**words(4), "ids": np.zeros((4, 5), np.int64)})
    with pytest.raises(tvm_split.InputError, match="micro-batch 1 of the stream"):
        list(deployment.stream([words(4), {**words(4), "mask": words(5)["mask"]}]))


def test_rows_that_mix_are_refused_with_the_layer(three_workers: tvm_split.Cluster) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Softmax(0))
    model = tvm_split.load_model(network, (torch.ones(2, 4),))
    bundle = tvm_split.compile(model, tvm_split.plan(model, three_workers, stages=1, estimate=True), verify=False)
    with tvm_split.deploy(bundle, three_workers) as deployment:
        assert deployment.run(np.ones((2, 4), np.float32))[0].shape == (2, 4)
        with pytest.raises(tvm_split.InputError, match=r"\[5, 4\].*\[2, 4\].*'1' \(relax.nn.softmax\).*Give 2 rows"):
            deployment.run(np.ones((5, 4), np.float32))


def test_a_machine_is_killed_in_the_middle(bundle: tvm_split.Bundle, network: nn.Module) -> None:
    counts = [7, 1, 40, 0, 5, 100, 2, 13]
    with tvm_split.Cluster.local(3) as cluster, tvm_split.deploy(bundle, cluster) as deployment:
        victim = describe(cluster.endpoints()["machine-b"]).process_id

        def batches() -> Iterator[Arrays]:
            for seed, count in enumerate(counts):
                if count == 100:
                    os.kill(victim, signal.SIGKILL)
                yield words(count, seed)

        with pytest.warns(RecoveryWarning):
            results = list(deployment.stream(batches()))
        assert "recovered" in [event.kind for event in deployment.events]
    assert len(results) == len(counts)
    for seed, (count, outputs) in enumerate(zip(counts, results, strict=True)):
        assert_equal(outputs, expected(network, words(count, seed)))
