"""Networks as the frontends import them, split inside their layers: thin ones, with all layers of the real."""

import numpy as np
import pytest
import torch
import tvm
from torch import Tensor, nn

import tvm_split
from relay_passes.sharding.emit import shard
from relay_passes.sharding.region import ShardAxis
from tests.helpers.relax_values import values_of
from tests.helpers.sharded_graphs import assert_splits_like_whole, region_of
from tests.helpers.split_costs import computed_again, transfer_bytes
from tests.models import torch_models
from tests.models.unet import unet


def imported(network: nn.Module, *inputs: Tensor) -> tvm.IRModule:
    return tvm_split.load_model(network.eval(), inputs).module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "shares"), [("rows", (0.5, 0.3, 0.2)), pytest.param("columns", (0.6, 0.4), marks=pytest.mark.long)]
)
def test_a_unet(axis: ShardAxis, shares: tuple[float, ...]) -> None:
    assert_splits_like_whole(imported(*unet()), axis, shares)


def test_a_region_between_the_skips_of_a_unet() -> None:
    """Values from before the region with other numbers of rows, and one that layers behind it need as well."""
    assert_splits_like_whole(imported(*unet()), "rows", (0.4, 0.6), first="bottom", last="join1_2")


def test_pools_of_several_windows_are_sums_of_those_who_have_the_rows() -> None:
    network = nn.Sequential(nn.Conv2d(2, 2, 3), nn.AdaptiveAvgPool2d((3, 2)), nn.Conv2d(2, 2, (3, 1)))
    module = imported(network, torch.randn(1, 2, 13, 9))
    assert_splits_like_whole(module, "rows", (0.5, 0.2, 0.3), ["fused"])
    region = region_of(module, (0.5, 0.5))
    again = computed_again(shard(module, region, axis="rows", exchange="fused"), region, module)
    assert again[region.names[0]] == 0


def test_squeeze_and_excite() -> None:
    network = torch_models.efficientnet()
    assert_splits_like_whole(imported(network, torch.randn(1, 3, 24, 24)), "rows", (0.6, 0.4), ["fused"])


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.long) for name in ("vit", "gpt2", "resnet"))]
)
def test_a_batch_needs_no_exchange(name: str) -> None:
    network, inputs = torch_models.small_models()[name]
    module = imported(network, *inputs)
    assert_splits_like_whole(module, "batch", (0.5, 0.5), ["fused"])
    region = region_of(module, (0.5, 0.5))
    for exchange in ("fused", "each"):
        transfers = transfer_bytes(shard(module, region, axis="batch", exchange=exchange))
        assert not [ends for ends in transfers if None not in ends]


def test_a_network_s_halos_are_few_where_strides_fit() -> None:
    """Each exchange sends few rows; fused tiles recompute much where a network ends in few rows."""
    module = imported(torch_models.resnet((2, 2), 4), torch.randn(1, 3, 64, 64))
    region = region_of(module, (0.5, 0.5))
    exchanged, fused = (shard(module, region, axis="rows", exchange=exchange) for exchange in ("each", "fused"))
    transfers = transfer_bytes(exchanged)
    # One row of the 32 with 4 channels from above for the first pool, and one of each 3×3 convolution's 16 or 8.
    assert transfers["machine-a", "machine-b"] < 2 * 4 * 32 * 4 * 6
    assert not [name for name, again in computed_again(exchanged, region, module).items() if again and "conv" in name]
    assert sum(computed_again(fused, region, module).values()) > 0
    assert transfer_bytes(fused)["machine-b", "machine-a"] == 4 * 32


BY_HEADS = ("vit", "bert", "gpt2")


@pytest.mark.parametrize("name", torch_models.small_models())
def test_channels_or_heads_of_small_networks(name: str) -> None:
    network, inputs = torch_models.small_models()[name]
    module, arrays = imported(network, *inputs), [tensor.numpy() for tensor in inputs]
    expected, axis = values_of(module, *arrays), "heads" if name in BY_HEADS else "channels"
    for shares, exchange in (((0.6, 0.4), "fused"), ((0.35, 0.65), "each")):
        sharded = shard(module, region_of(module, shares), axis=axis, exchange=exchange)
        for actual, reference in zip(values_of(sharded.module, *arrays), expected, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-9 * abs(reference).max())
