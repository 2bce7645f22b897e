"""Any region of a network of published blocks, split along any axis, computes what it did, or is refused in words."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import tvm
from hypothesis import assume, given, settings, strategies as st
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of, operator_name, shape_of
from relay_passes.sharding.emit import shard
from relay_passes.sharding.region import Exchange, ShardAxis, Sharded, ShardError
from tests.helpers import shard_grammar
from tests.helpers.shard_networks import Network, product_bytes, require_same
from tests.helpers.sharded_graphs import BOTH, region_of

AXES: tuple[ShardAxis, ...] = ("channels", "channels", "channels", "heads", "rows", "columns")


REFUSED = (
    "too few",
    "to shard",
    "choose another axis",
    "end the sharded layers",
    "end them before it",
    "is nothing",
    "is used",
)
"""What some random region cannot be, in the words of its refusal."""
SHARES = st.lists(st.integers(2, 4), min_size=2, max_size=4).map(lambda parts: [part / sum(parts) for part in parts])


def require_equal(module: tvm.IRModule, sharded: Sharded) -> None:
    (parameter,) = main_function(module).params
    x = np.random.default_rng(0).standard_normal(shape_of(parameter)).astype(np.float32)
    require_same(module, sharded, x, tolerance=1e-6)


def held_bytes(sharded: Sharded, source: str) -> list[int]:
    """The bytes of the weights of each part of a product."""
    parts = [name for name, machine in sharded.machine_of.items() if machine and sharded.source_of[name] == source]
    return [product_bytes(sharded.module, [name]) for name in parts]


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_random_regions(seed: int, blocks: int) -> None:
    random = Random(seed)
    module = shard_grammar.network_of(random, blocks)
    for _ in range(6):
        region, axis, exchange = shard_grammar.random_region(random, module), random.choice(AXES), random.choice(BOTH)
        try:
            sharded = shard(module, region, axis=axis, exchange=exchange)
        except ShardError as error:
            if not any(words in str(error) for words in REFUSED):
                raise
            continue
        require_equal(module, sharded)
        for source in region.names if axis == "channels" else ():
            held, whole = held_bytes(sharded, source), product_bytes(module, [source])
            assert sum(held) == whole or set(held) <= {whole}, source  # parts of its weights, or each machine all


def attention_block(network: Network, form: str, heads: int, groups: int, depth: int) -> tvm.IRModule:
    """Norm, attention, residual, norm, two products with GELU between them, residual."""
    x = shard_grammar.attention_of(network, network.layer_norm(network.input), form, heads, groups, depth)
    return network.module(network.add(op.add(x, shard_grammar.products(Random(0), network, network.layer_norm(x)))))


@settings(max_examples=30)
@given(
    st.integers(1, 2), st.sampled_from(shard_grammar.FORMS), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4),
    SHARES, st.sampled_from(BOTH), st.sampled_from(["heads", "channels"]),
)  # fmt: skip
def test_attention(
    batch: int, form: str, groups: int, repeated: int, depth: int, shares: list[float], exchange: Exchange,
    axis: ShardAxis,
) -> None:  # fmt: skip
    module = attention_block(Network((batch, 3, 8)), form, groups * repeated, groups, depth)
    try:
        sharded = shard(module, region_of(module, shares), axis=axis, exchange=exchange)
    except ShardError as error:
        if not any(words in str(error) for words in REFUSED[:2]):
            raise
        assume(False)
    require_equal(module, sharded)


@pytest.mark.parametrize("form", shard_grammar.FORMS)
def test_twelve_heads_are_sharded_unevenly(form: str) -> None:
    """And a block has two sums: behind its attention, and behind the second product."""
    module = attention_block(Network((1, 3, 24)), form, 12, 12, 2)
    sharded = shard(module, region_of(module, (0.5, 0.3, 0.2)), axis="heads", exchange="fused")
    require_equal(module, sharded)
    softmaxes = {
        sharded.machine_of[binding.var.name]: shape_of(binding.value)[1]
        for binding in operations_of(main_function(sharded.module))
        if operator_name(binding.value) == "relax.nn.softmax"
    }
    assert softmaxes == {"machine-a": 6, "machine-b": 4, "machine-c": 2}
    assert len({source for name, source in sharded.source_of.items() if "_sum_" in name}) == 2


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.25, 0.25)])
def test_machines_together_hold_each_weight_once(groups: int, shares: tuple[float, ...]) -> None:
    """Of too few groups for so many machines, one machine holds all."""
    network = Network((1, 3, 8, 8))
    x = network.convolution(network.add(op.nn.relu(network.convolution(network.input, 8, 3))), 8, 3, groups)
    module = network.module(network.batch_norm(x))
    region = region_of(module, shares)
    sharded = shard(module, region, axis="channels", exchange="fused")
    for source in region.names:
        assert sum(held_bytes(sharded, source)) == product_bytes(module, [source])
    assert any(sharded.machine_of[name] == "machine-b" for name in sharded.machine_of)


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
        require_equal(module, sharded)


@pytest.mark.parametrize("exchange", BOTH)
def test_only_machines_whose_range_has_a_constant_field_concatenate_it(exchange: Exchange) -> None:
    """A class token is before the tokens of an image whose rows are sharded."""
    network = Network((1, 4, 6, 6))
    tokens = shard_grammar.to_tokens(Random(), network, network.add(op.nn.relu(network.input)))
    fields = [network.weight(1, 1, 4), tokens, network.weight(1, 2, 4)]
    module = network.module(network.add(op.nn.relu(network.add(op.concat(fields, 1)))))
    sharded = shard(module, region_of(module, (0.5, 0.25, 0.25)), axis="rows", exchange=exchange)
    require_equal(module, sharded)
