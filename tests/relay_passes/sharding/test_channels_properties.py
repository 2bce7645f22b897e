"""Random convolutional networks and attention blocks compute the same when their channels or heads are dealt out."""

from math import gcd
from typing import Literal

import numpy as np
import pytest
import tvm
from hypothesis import assume, given, settings, strategies as st
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of, operator_name, shape_of
from relay_passes.sharding.emit import shard
from relay_passes.sharding.region import Region, Sharded, ShardError, fit_blocks
from tests.helpers.shard_networks import Network, product_bytes, require_same
from tests.helpers.sharded_graphs import region_of

SHARES = st.lists(st.integers(2, 4), min_size=2, max_size=4).map(lambda parts: [part / sum(parts) for part in parts])
STEPS = ("convolution", "group", "depthwise", "norm", "relu", "pool", "average", "residual", "concat", "gate")
EXCHANGES = st.sampled_from(["fused", "each"])


def grown(draw: st.DrawFn, network: Network, size: int) -> list[relax.Var]:
    """A random chain of convolutions and what stands between them, with residuals; all values that it goes through."""
    values = [network.convolution(network.input, draw(st.sampled_from([4, 8, 12])), 3)]
    for _ in range(size):
        x = values[-1]
        channels = shape_of(x)[1]
        alike = [value for value in values if shape_of(value) == shape_of(x)]
        beside = [value for value in values if shape_of(value)[2:] == shape_of(x)[2:]]
        match draw(st.sampled_from(STEPS)):
            case "convolution":
                x = network.convolution(x, draw(st.sampled_from([6, 8, 12])), draw(st.sampled_from([1, 3])))
            case "group":
                groups = draw(st.sampled_from([count for count in (2, 4) if channels % count == 0]))
                x = network.convolution(x, groups * draw(st.integers(1, 4)), 3, groups)
            case "depthwise":
                x = network.convolution(x, channels * draw(st.integers(1, 2)), 3, channels)
            case "norm":
                x = network.batch_norm(x)
            case "relu":
                x = network.add(op.nn.relu(x))
            case "pool" if shape_of(x)[2] > 2:
                x = network.add(op.nn.max_pool2d(x, (2, 2), (2, 2)))
            case "average" if shape_of(x)[2] > 2:
                x = network.add(op.nn.avg_pool2d(x, (2, 2), (2, 2)))
            case "residual":
                x = network.add(op.add(x, draw(st.sampled_from(alike))))
            case "concat":
                x = network.add(op.concat([x, draw(st.sampled_from(beside))], axis=1))
            case "gate":
                pooled = network.add(op.mean(x, [2, 3], keepdims=True))
                x = network.add(op.multiply(x, network.add(op.sigmoid(network.convolution(pooled, channels, 1)))))
        values.append(x)
    return values


def split_or_too_few(
    module: tvm.IRModule, region: Region, axis: Literal["heads", "channels"], exchange: Literal["fused", "each"]
) -> Sharded | None:
    """None where a machine would have nothing; any other refusal is an error."""
    try:
        return shard(module, region, axis=axis, exchange=exchange)
    except ShardError as error:
        if "too few" not in str(error) and "to shard" not in str(error):
            raise
        return None


@settings(max_examples=12)
@given(st.data(), st.integers(1, 7), SHARES, EXCHANGES)
def test_convolutions(data: st.DataObject, size: int, shares: list[float], exchange: Literal["fused", "each"]) -> None:
    network = Network((1, 3, 8, 8))
    values = data.draw(st.composite(grown)(network, size))
    x = values[-1]
    flat = network.add(op.reshape(network.add(op.mean(x, [2, 3])), (1, shape_of(x)[1])))
    ends = [*values, network.linear(flat, 8)]
    second_output = data.draw(st.sampled_from(values))
    module = network.module(ends[-1], second_output)
    # A region may begin and end anywhere, but between a batch norm and its first field.
    names = [value.name for value in ends]
    first, last = sorted(data.draw(st.lists(st.integers(0, len(names) - 1), min_size=2, max_size=2)))
    region = region_of(module, shares, names[first], names[last])
    sharded = split_or_too_few(module, region, "channels", exchange)
    assume(sharded is not None)
    image = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    require_same(module, sharded, image)
    # Each machine has only its part of a product's weights, or, of too few channels, the whole.
    blocks = gcd(
        *(blocks_of(binding) for binding in operations_of(main_function(module)) if binding.var.name in region.names)
    )
    for source in region.names:
        parts = [name for name, machine in sharded.machine_of.items() if machine and sharded.source_of[name] == source]
        held, whole = [product_bytes(sharded.module, [name]) for name in parts], product_bytes(module, [source])
        if sum(held) != whole:
            assert not fit_blocks(blocks, shares)
            assert set(held) == {whole}


def blocks_of(binding: relax.VarBinding) -> int:
    """Return the number of blocks into which a value's channels divide: the channels of a group stay together."""
    is_tensor = isinstance(binding.var.ty, relax.TensorType) and len(shape_of(binding.var)) > 1
    channels = shape_of(binding.var)[1] if is_tensor else 0
    is_convolution = operator_name(binding.value) == "relax.nn.conv2d"
    groups = int(binding.value.attrs.groups) if is_convolution else 1
    return gcd(channels, groups) if groups > 1 else channels


def projected(network: Network, x: relax.Expr, form: str, heads: int, groups: int, depth: int) -> list[relax.Var]:
    """Queries, keys and values as [batch, heads, tokens, depth]; keys and values have ``groups`` heads."""
    batch, tokens, _ = shape_of(x)

    def by_heads(value: relax.Expr, count: int) -> relax.Var:
        split = network.add(op.reshape(value, (batch, tokens, count, depth)))
        return network.add(op.permute_dims(split, [0, 2, 1, 3]))

    if form == "one matrix, then a reshape":
        fused = network.add(op.reshape(network.linear(x, 3 * heads * depth), (batch, tokens, 3, heads, depth)))
        turned = network.add(op.permute_dims(fused, [2, 0, 3, 1, 4]))
        parts = [network.add(op.strided_slice(turned, [0], [index], [index + 1])) for index in range(3)]
        return [network.add(op.squeeze(part, [0])) for part in parts]
    if form == "one matrix, then a split":
        fused = network.add(op.reshape(network.linear(x, 3 * heads * depth), (batch, tokens, 3 * heads * depth)))
        pieces = network.add(op.split(fused, 3, 2))
        return [by_heads(network.add(relax.TupleGetItem(pieces, index)), heads) for index in range(3)]
    query = by_heads(network.linear(x, heads * depth), heads)
    shared = []
    for _ in range(2):
        value = by_heads(network.linear(x, groups * depth), groups)
        if groups != heads:
            value = network.add(op.expand_dims(value, 2))
            value = network.add(op.broadcast_to(value, (batch, groups, heads // groups, tokens, depth)))
            value = network.add(op.reshape(value, (batch, heads, tokens, depth)))
        shared.append(value)
    return [query, *shared]


def attention_block(network: Network, x: relax.Expr, form: str, heads: int, groups: int, depth: int) -> relax.Var:
    """Norm, attention, residual, norm, two products with GELU between them, residual."""
    batch, tokens, width = shape_of(x)
    query, key, value = projected(network, network.layer_norm(x), form, heads, groups, depth)
    scores = network.add(op.matmul(query, network.add(op.permute_dims(key, [0, 1, 3, 2]))))
    scores = network.add(op.add(scores, network.weight(1, 1, tokens, tokens)))
    mixed = network.add(op.matmul(network.add(op.nn.softmax(scores, -1)), value))
    joined = network.add(op.reshape(network.add(op.permute_dims(mixed, [0, 2, 1, 3])), (batch, tokens, heads * depth)))
    x = network.add(op.add(x, network.linear(joined, width)))
    hidden = network.add(op.nn.gelu(network.linear(network.layer_norm(x), 2 * width)))
    return network.add(op.add(x, network.linear(hidden, width)))


FORMS = ["one matrix, then a reshape", "one matrix, then a split", "three matrices"]


@settings(max_examples=30)
@given(
    st.integers(1, 2), st.sampled_from(FORMS), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), SHARES,
    EXCHANGES, st.sampled_from(["heads", "channels"]),
)  # fmt: skip
def test_attention(
    batch: int, form: str, groups: int, repeated: int, depth: int, shares: list[float],
    exchange: Literal["fused", "each"], axis: Literal["heads", "channels"],
) -> None:  # fmt: skip
    heads = groups * repeated
    assume(heads * depth > 1)
    network = Network((batch, 3, 8))
    module = network.module(attention_block(network, network.input, form, heads, groups, depth))
    sharded = split_or_too_few(module, region_of(module, shares), axis, exchange)
    assume(sharded is not None)
    require_same(module, sharded, np.random.default_rng(1).standard_normal((batch, 3, 8)).astype(np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_twelve_heads_are_dealt_out_unevenly(form: str) -> None:
    """And a block has two sums: behind its attention, and behind the second product."""
    network = Network((1, 3, 24))
    module = network.module(attention_block(network, network.input, form, 12, 12, 2))
    sharded = shard(module, region_of(module, (0.5, 0.3, 0.2)), axis="heads", exchange="fused")
    require_same(module, sharded, np.random.default_rng(1).standard_normal((1, 3, 24)).astype(np.float32))
    softmaxes = {
        sharded.machine_of[binding.var.name]: shape_of(binding.value)[1]
        for binding in operations_of(main_function(sharded.module))
        if operator_name(binding.value) == "relax.nn.softmax"
    }
    assert softmaxes == {"machine-a": 6, "machine-b": 4, "machine-c": 2}
    summed = {source for name, source in sharded.source_of.items() if "_sum_" in name}
    assert len(summed) == 2
