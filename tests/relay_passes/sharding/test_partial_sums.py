"""Operations that are computed on partial sums before these are added."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of, operator_name
from relay_passes.sharding.emit import shard
from relay_passes.sharding.region import Sharded
from tests.helpers.shard_networks import Network, require_same
from tests.helpers.sharded_graphs import region_of

X = np.random.default_rng(0).standard_normal((1, 4, 4, 4)).astype(np.float32)


def split(network: Network, output: relax.Var) -> Sharded:
    """Return the sharded graph, after checking that it computes the same values."""
    module = network.module(output)
    sharded = shard(module, region_of(module, (0.5, 0.25, 0.25)), axis="channels", exchange="fused")
    require_same(module, sharded, X)
    return sharded


def summed(network: Network) -> relax.Var:
    """Return a pair of convolutions, which has a partial sum on each machine."""
    return network.convolution(network.convolution(network.input, 8, 3), 4, 1)


def sums(sharded: Sharded) -> list[str]:
    """Return the variables of the original graph that are sums of the machines' values."""
    operations = {binding.var.name: binding.value for binding in operations_of(main_function(sharded.module))}
    names = [name for name, machine in sharded.machine_of.items() if machine is None]
    assert all(operator_name(operations[name]) == "relax.add" for name in names)
    return sorted({sharded.source_of[name] for name in names})


def test_two_branches_and_a_residual_need_one_sum() -> None:
    network = Network((1, 4, 4, 4))
    both = network.add(op.subtract(summed(network), network.batch_norm(summed(network))))
    last = network.add(op.subtract(network.input, both))
    assert sums(split(network, last)) == [last.name]


def test_means_are_summed_in_place_of_pixels() -> None:
    network = Network((1, 4, 4, 4))
    mean = network.add(op.mean(summed(network), [2, 3]))
    last = network.add(op.multiply(network.add(op.reshape(mean, (1, 4))), network.weight(4)))
    assert sums(split(network, last)) == [last.name]


def test_a_mean_over_channels_is_of_partial_sums() -> None:
    network = Network((1, 4, 4, 4))
    last = network.add(op.mean(network.convolution(network.input, 8, 3), [1]))
    assert sums(split(network, last)) == [last.name]
