"""Well-known networks whose channels or heads are dealt out: what they compute, and what each machine holds."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

import tvm_split
from relay_passes.ir import main_function, names_of
from relay_passes.sharding.emit import shard
from relay_passes.sharding.region import Sharded
from tests.helpers.placements import run
from tests.helpers.relax_values import values_of
from tests.helpers.sharded_graphs import region_of
from tests.helpers.split_costs import weight_bytes
from tests.models import torch_models

SMALL = torch_models.small_models()
BY_HEADS = ("vit", "bert", "gpt2", "bert_base", "gpt2_small")


def split(
    model: tvm_split.Model, name: str, shares: tuple[float, ...], exchange: Literal["fused", "each"] = "fused"
) -> Sharded:
    axis: Literal["heads", "channels"] = "heads" if name in BY_HEADS else "channels"
    return shard(model.module, region_of(model.module, shares), axis=axis, exchange=exchange)


def arrays(inputs: tuple[Any, ...]) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in inputs]


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_compute_the_same(name: str) -> None:
    network, inputs = SMALL[name]
    model = tvm_split.load_model(network, inputs)
    expected = values_of(model.module, *arrays(inputs))
    for shares, exchange in (((0.6, 0.4), "fused"), ((0.35, 0.65), "each")):
        outputs = values_of(split(model, name, shares, exchange).module, *arrays(inputs))
        for actual, reference in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-9 * abs(reference).max())


@pytest.mark.long
@pytest.mark.parametrize(("name", "shares"), [("vgg", (0.5, 0.3, 0.2)), ("bert", (0.4, 0.6)), ("gpt2", (0.6, 0.4))])
def test_small_networks_that_tvm_compiles_compute_the_same(name: str, shares: tuple[float, ...]) -> None:
    network, inputs = SMALL[name]
    model = tvm_split.load_model(network, inputs)
    outputs = run(split(model, name, shares).module, *arrays(inputs))
    for actual, reference in zip(outputs, run(model.module, *arrays(inputs)), strict=True):
        np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-5 * abs(reference).max())


@pytest.mark.long
@pytest.mark.parametrize(("name", "shares"), [("vgg16", (0.5, 0.3, 0.2)), ("resnet50", (0.6, 0.4))])
def test_published_sizes_compute_the_same(name: str, shares: tuple[float, ...]) -> None:
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model = tvm_split.load_model(getattr(torch_models, name)(), (image,))
    (actual,) = values_of(split(model, name, shares).module, image.numpy())
    (expected,) = values_of(model.module, image.numpy())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9 * abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize("name", ["vgg16", "bert_base"])
def test_two_equal_machines_hold_half_of_the_weights_each(name: str) -> None:
    network, inputs = torch_models.published_models()[name]
    model = tvm_split.load_model(network(), inputs)
    names = names_of(main_function(model.module))
    whole = weight_bytes(Sharded(model.module, dict.fromkeys(names, "one"), {}))["one"]
    held = weight_bytes(split(model, name, (0.5, 0.5)))
    assert sorted(held) == ["machine-a", "machine-b"]
    assert max(held.values()) <= 0.55 * whole
