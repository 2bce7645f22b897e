"""Graphs other than chains, on worker processes and in this process, compared with torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime.transports.credits import MOST_MORE
from tests.models.torch_graphs import (
    Constants,
    OnlyConstants,
    Scalars,
    SeveralOutputs,
    Skip,
    Swap,
    TwoConsumers,
    TwoInputs,
)

Case = tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], dict[str, list[str]], list[str]]
GENERATOR = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


WORDS = torch.tensor([3, 10])
CASES: dict[str, Case] = {
    "skip over a stage": (
        Skip,
        (_random(1, 3, 9, 9),),
        {"machine-a": ["first"], "machine-b": ["middle"], "machine-c": ["add"]},
        ["machine-a", "machine-b", "machine-c"],
    ),
    "one machine, two stages": (
        Skip,
        (_random(1, 3, 9, 9),),
        {"machine-a": ["first", "add"], "machine-b": ["middle"]},
        ["machine-a", "machine-b", "machine-a"],
    ),
    "two consumers on two machines": (
        TwoConsumers,
        (_random(2, 6),),
        {"machine-a": ["stem"], "machine-b": ["left"], "machine-c": ["right"]},
        ["machine-a", "machine-b", "machine-c"],
    ),
    "two consumers on one machine": (
        TwoConsumers,
        (_random(2, 6),),
        {"machine-a": ["stem", "right"], "machine-b": ["left"], "machine-c": ["join"]},
        ["machine-a", "machine-b", "machine-a", "machine-c"],
    ),
    "inputs at different stages": (
        TwoInputs,
        (_random(2, 5), WORDS, _random(3)),
        {"machine-a": ["image"], "machine-b": ["words", "mul"], "machine-c": ["head"]},
        ["machine-a", "machine-b", "machine-c"],
    ),
    "outputs from different stages": (
        SeveralOutputs,
        (_random(2, 4),),
        {"machine-a": ["first"], "machine-b": ["second"], "machine-c": ["third"]},
        ["machine-a", "machine-b", "machine-c"],
    ),
    "scalars": (
        Scalars,
        (_random(3, 4), _random()),
        {"machine-a": ["first"], "machine-b": ["mul_1"], "machine-c": ["sum_1"]},
        ["machine-a", "machine-b", "machine-c"],
    ),
    "constants beside layers": (
        Constants,
        (_random(2, 4),),
        {"machine-a": ["first"], "machine-b": ["second"], "machine-c": ["output_0", "output_3"]},
        ["machine-a", "machine-b", "machine-c"],
    ),
    "constants alone": (
        OnlyConstants,
        (_random(2, 4),),
        {"machine-a": ["output_0"], "machine-b": ["output_1"]},
        ["machine-a", "machine-b"],
    ),
    "a constant on one machine": (OnlyConstants, (_random(2, 4),), {"machine-b": ["output_0"]}, ["machine-b"]),
    "an input that nothing changes": (nn.Identity, (_random(2, 4),), {"machine-b": ["output_0"]}, ["machine-b"]),
    "dropout in evaluation": (nn.Dropout, (_random(2, 4),), {"machine-a": ["output_0"]}, ["machine-a"]),
    "a scalar that nothing changes": (nn.Identity, (_random(),), {"machine-a": ["output_0"]}, ["machine-a"]),
    "inputs in another order": (
        Swap,
        (_random(2, 4), _random()),
        {"machine-a": ["output_0"], "machine-b": ["output_1", "output_2"]},
        ["machine-a", "machine-b"],
    ),
}


@pytest.fixture(params=["local", "in process"])
def cluster(request: pytest.FixtureRequest, three_workers: tvm_split.Cluster) -> tvm_split.Cluster:
    return three_workers if request.param == "local" else tvm_split.Cluster.in_process(3, threads=1)


@cache
def compiled(name: str) -> tuple[nn.Module, tvm_split.Bundle]:
    """Return the compiled case; shared by both kinds of clusters, whose machines have the same target."""
    network, inputs, split, _ = CASES[name]
    module = network().eval()
    model = tvm_split.load_model(module, inputs)
    plan = tvm_split.plan(model, tvm_split.Cluster.in_process(3, threads=1), split=split)
    return module, tvm_split.compile(model, plan)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_torch(name: str, cluster: tvm_split.Cluster) -> None:
    _, inputs, _, machines = CASES[name]
    module, bundle = compiled(name)
    with tvm_split.deploy(bundle, cluster) as deployment:
        assert [stage.machine for stage in deployment.stages] == machines
        batches = [tuple(tensor + index for tensor in inputs) for index in range(5)]
        batches = [
            tuple(tensor if tensor.is_floating_point() else inputs[i] for i, tensor in enumerate(batch))
            for batch in batches
        ]
        for batch, outputs in zip(batches, deployment.stream(batches), strict=True):
            with torch.no_grad():
                expected = module(*batch)
            expected = expected if isinstance(expected, tuple) else (expected,)
            assert len(outputs) == len(expected)
            for output, right in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(output, right.numpy(), rtol=1e-5, atol=1e-5)
                assert output.dtype == right.numpy().dtype


@pytest.fixture(scope="module")
def chain_deployment(three_workers: tvm_split.Cluster):
    torch.manual_seed(0)
    module = SeveralOutputs().eval()
    split = {"machine-a": ["first"], "machine-b": ["second"], "machine-c": ["third"]}
    with tvm_split.compile_and_deploy(module, (torch.zeros(1, 4),), three_workers, split=split) as deployment:
        yield module, deployment


@pytest.mark.parametrize("count", [0, 1, 2, 500, pytest.param(10_000, marks=pytest.mark.long)])
def test_any_number_of_micro_batches(chain_deployment, count: int) -> None:
    module, deployment = chain_deployment
    before = deployment.stats().stages[-1].micro_batches
    x = np.random.default_rng(0).standard_normal((count, 1, 4)).astype(np.float32)
    results = [outputs[0] for outputs in deployment.stream((array,) for array in x)]
    assert len(results) == count
    assert deployment.stats().stages[-1].micro_batches - before == count
    if count:
        with torch.no_grad():
            expected = module(torch.from_numpy(x[:, 0]))[0].numpy()
        np.testing.assert_allclose(np.concatenate(results), expected, rtol=1e-5, atol=1e-5)


def test_an_endless_stream_is_read_lazily(chain_deployment) -> None:
    _, deployment = chain_deployment
    read_indices = []

    def endless():
        for index in itertools.count():
            read_indices.append(index)
            yield np.full((1, 4), index, np.float32)

    results = deployment.stream(endless())
    first = [next(results) for _ in range(50)]
    results.close()
    assert len(first) == 50
    # Reading ahead is bounded by the queues between stages and the widest windows of links.
    assert len(read_indices) < 50 + 60 + MOST_MORE
    # Results of an abandoned stream do not appear later.
    (again, *_) = deployment.run(np.zeros((1, 4), np.float32))
    np.testing.assert_array_equal(again, first[0][0])
