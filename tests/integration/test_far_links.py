"""Streams over links of 20 ms with wider windows than planned: all values are correct."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers.relay import Relay
from tests.models.torch_graphs import Skip
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Link, Machine

A, B, C = "left", "middle", "right"
FAR_SECONDS = 0.02
MICRO_BATCHES = 200


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A, B, C]) as started:
        yield started


@pytest.fixture(scope="module")
def far(workers: LocalWorkers) -> Iterator[dict[str, str]]:
    """The address under which each worker seems to be far away."""
    with ExitStack() as until_end:
        yield {
            name: until_end.enter_context(Relay(endpoint.address, latency_seconds=FAR_SECONDS)).address
            for name, endpoint in workers.endpoints.items()
        }


def far_cluster(workers: LocalWorkers, far: dict[str, str], *near: tuple[str, str]) -> Cluster:
    """Return a cluster in which only the given pairs are close to each other; no workers share memory."""
    links = [
        Link(source, end, transport="grpc") if (source, end) in near else Link(source, end, address=far[end])
        for source, end in permutations(workers.endpoints, 2)
    ]
    machines = tuple(Machine(name, 1, endpoint=end) for name, end in workers.endpoints.items())
    return Cluster(machines, tuple(links))


def check(network: nn.Module, inputs: Sequence[torch.Tensor], bundle: tvm_split.Bundle, cluster: Cluster) -> None:
    """Check that the results of a long stream are those of torch."""
    with torch.no_grad():
        expected = [network(x).numpy() for x in inputs]
    with tvm_split.deploy(bundle, cluster) as deployment:
        for number, (result,) in enumerate(
            deployment.stream((inputs[number % len(inputs)],) for number in range(MICRO_BATCHES))
        ):
            np.testing.assert_allclose(result, expected[number % len(inputs)], rtol=1e-4, atol=1e-4)
        assert number == MICRO_BATCHES - 1
        assert all(stage.micro_batches == MICRO_BATCHES for stage in deployment.stats().stages)


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 3, 16, 16, generator=generator) for _ in range(7)]


def test_what_skips_a_far_machine(workers: LocalWorkers, far: dict[str, str]) -> None:
    torch.manual_seed(0)
    network, inputs = Skip().eval(), images()
    cluster = far_cluster(workers, far, (A, C))
    model = tvm_split.load_model(network, (inputs[0],))
    split = {A: ["first"], B: ["middle"], C: ["add"]}
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split))
    assert [(handover.source, handover.destination) for handover in bundle.program.handovers].count((A, C)) == 1
    check(network, inputs, bundle, cluster)


def test_machines_that_wait_for_each_others_halos(workers: LocalWorkers, far: dict[str, str]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).eval()
    inputs = images()
    cluster = far_cluster(workers, far)
    model = tvm_split.load_model(network, (inputs[0],))
    shard = tvm_split.Shard("0", "2", "rows", {A: 0.5, B: 0.5}, "each")
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, shards=[shard]))
    check(network, inputs, bundle, cluster)
