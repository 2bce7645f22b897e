"""Regions whose channels are dealt out: the pairs, what comes from before and goes behind, and what is refused."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from relay_passes.ir import (
    bindings_of,
    main_function,
    operations_of,
    operator_name,
    shape_of,
)
from relay_passes.sharding.emit import LARGE_SUM_BYTES, shard
from relay_passes.sharding.region import ShardAxis, Sharded, ShardError
from tests.helpers.shard_networks import Network, require_same
from tests.helpers.sharded_graphs import region_of
from tests.helpers.split_costs import transfer_bytes


def test_a_cut_takes_only_the_channels_that_a_machine_needs() -> None:
    """Slices of values from before the region have no machine yet; slices of the model's input are on their machine."""
    network = Network((1, 4, 5, 5))
    before = network.add(op.nn.relu(network.input))
    depthwise = network.convolution(before, 4, 3, groups=4)
    module = network.module(network.convolution(depthwise, 4, 1))
    x = np.random.default_rng(0).standard_normal((1, 4, 5, 5)).astype(np.float32)
    behind = shard(module, region_of(module, (0.5, 0.5), first="layer1"), axis="channels", exchange="fused")
    require_same(module, behind, x)
    assert {name: machine for name, machine in behind.machine_of.items() if behind.source_of[name] == "layer"} == {
        "layer_machine_a": None,
        "layer_machine_b": None,
    }
    network = Network((1, 4, 5, 5))
    module = network.module(network.convolution(network.input, 4, 3, groups=4))
    whole = shard(module, region_of(module, (0.5, 0.5)), axis="channels", exchange="fused")
    require_same(module, whole, x)
    assert whole.machine_of["x_machine_a"] == "machine-a"


def test_a_value_used_behind_and_inside_is_made_whole_once_by_the_first_machine() -> None:
    network = Network((1, 3, 4, 4))
    wide = network.convolution(network.input, 4, 3)
    narrow = network.add(op.nn.relu(network.convolution(wide, 4, 3)))
    last = network.convolution(narrow, 4, 1)
    module = network.module(last, narrow)
    sharded = shard(module, region_of(module, (0.5, 0.5)), axis="channels", exchange="fused")
    require_same(module, sharded, np.ones((1, 3, 4, 4), np.float32))
    assert sharded.machine_of[narrow.name] == "machine-a"
    assert f"{narrow.name}_machine_a" not in sharded.machine_of
    assert sharded.machine_of[last.name] is None


def refused(network: Network, output: relax.Var, shares: tuple[float, ...], by: ShardAxis = "channels") -> str:
    module = network.module(output)
    with pytest.raises(ShardError) as raised:
        shard(module, region_of(module, shares), axis=by, exchange="fused")
    return str(raised.value)


def test_more_machines_than_channels_groups_or_heads_are_refused() -> None:
    shares = (0.5, 0.3, 0.2)
    network = Network((1, 3, 4, 4))
    text = refused(network, network.convolution(network.input, 2, 1), shares)
    assert text == (
        "'layer' (relax.nn.conv2d) has 2 output channels, too few for 3 machines with shares 0.5 / 0.3 / 0.2: "
        "take fewer, or leave it out of the sharded layers"
    )
    network = Network((1, 4, 4, 4))
    assert "has 2 groups of channels" in refused(network, network.convolution(network.input, 8, 1, groups=2), shares)
    network = Network((1, 3, 8))
    heads = network.add(op.reshape(network.linear(network.input, 8), (1, 3, 2, 4)))
    text = refused(network, network.add(op.nn.softmax(heads, -1)), shares, by="heads")
    assert "(relax.reshape) has 2 heads" in text
    assert text.endswith("or split by 'channels'")


@pytest.mark.parametrize("exchange", ["fused", "each"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize(("few", "shares"), [(2, (0.5, 0.3, 0.2)), (4, (0.6, 0.3, 0.1))], ids=["fewer", "no share"])
def test_a_product_with_too_few_channels_for_all_machines_is_computed_whole(
    exchange: str, first: bool, few: int, shares: tuple[float, ...]
) -> None:
    """Every machine that needs it computes it whole; the region's other products are still sharded."""
    network = Network((1, 3, 6, 6))
    value = network.input
    for channels in (few, 20) if first else (20, 20, few):
        value = network.add(op.nn.relu(network.convolution(value, channels, 3)))
    module = network.module(value)
    sharded = shard(module, region_of(module, shares), axis="channels", exchange=exchange)
    require_same(module, sharded, np.random.default_rng(0).standard_normal((1, 3, 6, 6)))
    products = {
        binding.var.name: shape_of(binding.var)[1]
        for binding in bindings_of(main_function(sharded.module))
        if operator_name(binding.value) == "relax.nn.conv2d"
    }
    whole = [sharded.machine_of[name] for name, channels in products.items() if channels == few]
    assert whole == (["machine-a", "machine-b", "machine-c"] if first else ["machine-a"])
    assert len(products) == 6 if first else 7


def test_a_region_without_anything_to_deal_out_is_refused() -> None:
    network = Network((1, 3, 4, 4))
    text = refused(network, network.add(op.nn.relu(network.input)), (0.5, 0.5))
    assert "no convolution or matrix product with constant weights to shard" in text
    network = Network((1, 4))
    assert "use axis 'channels'" in refused(network, network.linear(network.input, 8), (0.5, 0.5), by="heads")


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.25, 0.25, 0.25, 0.25)])
def test_a_large_sum_is_added_up_in_parts(shares: tuple[float, ...]) -> None:
    """Each machine adds up one part for all; it sends each other machine less than its whole partial sum."""

    def crossed(side: int) -> tuple[int, int]:
        network = Network((1, 4, side, side))
        x = op.nn.relu(network.convolution(network.input, 8, 1))
        x = network.convolution(network.add(x), 256, 1)
        module = network.module(network.convolution(network.add(op.nn.relu(x)), 8, 1))
        sharded = shard(module, region_of(module, shares), axis="channels", exchange="fused")
        require_same(module, sharded, np.random.default_rng(0).standard_normal((1, 4, side, side)))
        between = [size for ends, size in transfer_bytes(sharded).items() if None not in ends]
        return sum(between), 256 * side * side * 4

    machines = len(shares)
    sent, size = crossed(31)
    assert size < LARGE_SUM_BYTES
    assert sent == machines * (machines - 1) * size
    sent, size = crossed(32)
    assert sent == 2 * (machines - 1) * size


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
