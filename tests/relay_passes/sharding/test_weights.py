"""The bytes of weights that machines hold."""

from __future__ import annotations

from tvm.relax import op

from relay_passes.sharding.emit import shard
from tests.helpers.shard_networks import Network
from tests.helpers.sharded_graphs import region_of
from tests.helpers.split_costs import weight_bytes


def test_parts_and_what_is_held_whole() -> None:
    network = Network((1, 3, 4))
    normed = network.layer_norm(network.layer_norm(network.input))
    module = network.module(network.linear(normed, 8))
    found = shard(module, region_of(module, (0.75, 0.25)), axis="channels", exchange="fused")
    norms = 2 * (4 + 4)
    assert weight_bytes(found) == {"machine-a": 4 * (norms + 6 * 4 + 6), "machine-b": 4 * (norms + 2 * 4 + 2)}


def test_a_constant_that_is_used_twice_counts_once() -> None:
    network = Network((1, 4))
    shared = network.weight(4, 4)
    first = network.add(op.matmul(network.input, shared))
    module = network.module(network.add(op.matmul(first, shared)))
    found = shard(module, region_of(module, (0.5, 0.5)), axis="channels", exchange="each")
    assert weight_bytes(found) == {"machine-a": 4 * 8, "machine-b": 4 * 8}
