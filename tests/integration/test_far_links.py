"""Streams over links of 20 ms with wider windows than planned: all values are correct."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import permutations

import numpy as np
import torch
from torch import nn

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers.relay import Relay
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Link, Machine

A, B = "left", "right"
FAR_SECONDS = 0.02
MICRO_BATCHES = 200


def test_machines_that_wait_for_each_others_halos() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).eval()
    inputs = [torch.randn(1, 3, 16, 16) for _ in range(7)]
    with torch.no_grad():
        expected = [network(x).numpy() for x in inputs]
    with ExitStack() as until_end:
        endpoints = until_end.enter_context(LocalWorkers([A, B])).endpoints
        far = {
            name: until_end.enter_context(Relay(endpoint.address, latency_seconds=FAR_SECONDS)).address
            for name, endpoint in endpoints.items()
        }
        cluster = Cluster(
            tuple(Machine(name, 1, endpoint=endpoint) for name, endpoint in endpoints.items()),
            tuple(Link(*ends, address=far[ends[1]]) for ends in permutations(endpoints, 2)),
        )
        model = tvm_split.load_model(network, (inputs[0],))
        shard = tvm_split.Shard("0", "2", "rows", {A: 0.5, B: 0.5}, "each")
        bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, shards=[shard]))
        deployment = until_end.enter_context(tvm_split.deploy(bundle, cluster))
        batches = [(inputs[number % len(inputs)],) for number in range(MICRO_BATCHES)]
        for number, (result,) in enumerate(deployment.stream(batches)):
            np.testing.assert_allclose(result, expected[number % len(inputs)], rtol=1e-4, atol=1e-4)
        assert {stage.micro_batches for stage in deployment.stats().stages} == {MICRO_BATCHES}
