"""Networks that torchao's quantisers of exported programs (pt2e) made."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer

import tvm_split
from tests.helpers.frontends.comparison import assert_close, run_as_stage
from tvm_split.frontends import load_model
from tvm_split.frontends.building import QUANTIZED_TOLERANCE

quantised = torch.ops.quantized_decomposed


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + x)
        y: torch.Tensor = self.head(nn.functional.max_pool2d(x, 2).flatten(1))
        return y


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    quantizer = X86InductorQuantizer().set_global(x86_inductor_quantizer.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(Network().eval(), (x,)).module(), quantizer)
    for seed in range(4):
        prepared(torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed)))
    converted: nn.Module = convert_pt2e(prepared)
    return converted


def assert_right(model: tvm_split.Model, x: np.ndarray) -> None:
    assert model.tolerance == QUANTIZED_TOLERANCE
    assert model.reference is not None
    split = {"machine-a": [model.layer_names[0]], "machine-b": [model.layer_names[-1]]}
    with tvm_split.compile_and_deploy(model, None, tvm_split.Cluster.in_process(2), split) as deployment:  # verifies
        assert_close(deployment.run(x)[0], model.reference.outputs([x])[0], QUANTIZED_TOLERANCE)
        assert {tensor.dtype for tensor in deployment.stages[0].outputs} == {"uint8"}


def test_a_network_and_its_file(network: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    assert_right(load_model(network, (x,)), x.numpy())
    torch.export.save(torch.export.export(network, (x,)), tmp_path / "network.pt2")
    assert_right(load_model(tmp_path / "network.pt2", (x,)), x.numpy())


class PerTensor(nn.Module):
    def __init__(self, *limits: Any) -> None:
        super().__init__()
        self.limits = limits

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = quantised.quantize_per_tensor(x, 0.25, 3, *self.limits)
        return steps, quantised.dequantize_per_tensor(steps, 0.25, 3, *self.limits)


class PerChannel(PerTensor):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, zeros = torch.tensor([0.25, 0.5, 1.0]), torch.tensor([0, 3, 5])
        steps = quantised.quantize_per_channel(x, scales, zeros, 1, *self.limits)
        return steps, quantised.dequantize_per_channel(steps, scales, None, 1, *self.limits)


@pytest.mark.parametrize("limits", [(0, 255, torch.uint8), (-128, 127, torch.int8), (-127, 100, torch.int8)])
@pytest.mark.parametrize("kind", [PerTensor, PerChannel])
def test_limits_and_ties(kind: type[PerTensor], limits: tuple[Any, ...]) -> None:
    x = np.linspace(-50, 50, 2 * 3 * 801, dtype=np.float32).reshape(2, 3, 801)
    x[0, 0] = np.arange(801) / 8  # ties of the scale, which is a power of 2
    model = load_model(kind(*limits).eval(), (torch.tensor(x),))
    assert model.reference is not None
    for actual, expected in zip(run_as_stage(model, [x]), model.reference.outputs([x]), strict=True):
        np.testing.assert_array_equal(actual, expected)
