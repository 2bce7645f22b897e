"""Any region of a network of published blocks, split along any axis, computes what it did, or is refused in words."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import tvm
from hypothesis import given, settings, strategies as st
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, shape_of
from relay_passes.sharding.emit import shard
from relay_passes.sharding.region import Exchange, ShardAxis, ShardError
from tests.helpers import shard_grammar
from tests.helpers.relax_values import values_of
from tests.helpers.shard_networks import Network
from tests.helpers.sharded_graphs import BOTH, region_of

AXES: tuple[ShardAxis, ...] = ("channels", "channels", "channels", "heads", "rows", "columns")


def assert_same_values(module: tvm.IRModule, sharded: tvm.IRModule) -> None:
    (parameter,) = main_function(module).params
    x = np.random.default_rng(0).standard_normal(shape_of(parameter)).astype(np.float32)
    for actual, expected in zip(values_of(sharded, x), values_of(module, x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * max(abs(expected).max(), 1e-3))


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_random_regions(seed: int, blocks: int) -> None:
    random = Random(seed)
    module = shard_grammar.network_of(random, blocks)
    for _ in range(6):
        region, axis, exchange = shard_grammar.random_region(random, module), random.choice(AXES), random.choice(BOTH)
        try:
            sharded = shard(module, region, axis=axis, exchange=exchange)
        except ShardError:
            continue
        assert_same_values(module, sharded.module)


def mixer(network: Network) -> relax.Var:
    """Products over tokens and over channels, which are sharded along different axes of the values between them."""
    x: relax.Expr = network.input
    for _ in range(2):
        turned = network.add(op.permute_dims(network.layer_norm(x), [0, 2, 1]))
        mixed = network.add(op.permute_dims(network.linear(turned, shape_of(x)[1]), [0, 2, 1]))
        x = network.add(op.add(x, mixed))
        hidden = network.add(op.nn.gelu(network.linear(network.layer_norm(x), 64)))
        x = network.add(op.add(x, network.linear(hidden, shape_of(x)[2])))
    return x


def grouped(network: Network) -> relax.Var:
    """Two blocks of channels, and a convolution that takes them as one."""
    both = network.add(op.concat([network.convolution(network.input, 24, 1) for _ in range(2)], 1))
    return network.convolution(both, 16, 3, groups=4)


def residual_of_blocks(network: Network) -> relax.Var:
    """A residual whose channels are one block, of a value whose channels are two."""
    stem = network.convolution(network.input, 16, 3)
    narrow = shard_grammar.ghost_of(network, shard_grammar.ghost_of(network, stem, 49), 16)
    return network.add(op.add(stem, narrow))


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize(
    ("build", "shape", "first"),
    [(mixer, (1, 16, 32), 10), (grouped, (1, 8, 6, 6), 0), (residual_of_blocks, (1, 3, 6, 6), 0)],
    ids=["mixer", "grouped", "residual of blocks"],
)
def test_a_value_is_read_in_other_blocks_than_its_owners_have(
    build: Callable[[Network], relax.Var], shape: tuple[int, ...], first: int, exchange: Exchange
) -> None:
    network = Network(shape)
    module = network.module(build(network))
    for shares in ((0.5, 0.5), (0.75, 0.25), (0.5, 0.25, 0.25)):
        sharded = shard(module, region_of(module, shares, first), axis="channels", exchange=exchange)
        assert_same_values(module, sharded.module)


@pytest.mark.parametrize("exchange", BOTH)
def test_only_machines_whose_range_has_a_constant_field_concatenate_it(exchange: Exchange) -> None:
    """A class token is before the tokens of an image whose rows are sharded."""
    network = Network((1, 4, 6, 6))
    tokens = shard_grammar.to_tokens(Random(), network, network.add(op.nn.relu(network.input)))
    fields = [network.weight(1, 1, 4), tokens, network.weight(1, 2, 4)]
    module = network.module(network.add(op.nn.relu(network.add(op.concat(fields, 1)))))
    sharded = shard(module, region_of(module, (0.5, 0.25, 0.25)), axis="rows", exchange=exchange)
    assert_same_values(module, sharded.module)
