"""Compiled kernels lead back to the model: every layer's work is in exactly one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvm_split
from tests.models import torch_models
from tvm_split.compiler.describe import calls

MODELS = {
    "resnet": (torch_models.resnet, (torch.zeros(1, 3, 32, 32),)),
    "bert": (torch_models.bert, (torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16, dtype=torch.int64))),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_work_is_lost_or_counted_twice(name: str) -> None:
    build, inputs = MODELS[name]
    model = tvm_split.load_model(build(), inputs)
    plan = tvm_split.plan(model, tvm_split.Cluster.in_process(1, threads=1))
    bundle = tvm_split.compile(model, plan, verify=False)
    kernels = [kernel for stage in bundle.kernels.values() for kernel in stage]
    defined = sum(work for _, work, _ in calls(model.module))
    # Folding and reading views in place take away some of what only maps or moves elements; the products stay.
    assert sum(kernel.operations for kernel in kernels) == pytest.approx(defined, rel=0.06)
    assert not any(kernel.is_slow for kernel in kernels)
    products = {kernel.layers[0] for kernel in kernels if kernel.rule in ("conv2d", "winograd", "matmul")}
    assert len(products) > 4
    assert products <= set(model.layer_names)


class Alike(nn.Module):
    """Layers that are named as other forms of a layer's tensor would be."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.gate_padded = nn.Conv2d(3, 17, 1, bias=False), nn.Conv2d(17, 32, 1, bias=False)
        self.gate_plain, self.last = nn.Softmax(1), nn.Conv2d(32, 16, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gate_plain(self.gate_padded(self.gate(x))))


def test_layers_are_told_apart_whatever_their_names() -> None:
    model = tvm_split.load_model(Alike().eval(), (torch.zeros(1, 3, 8, 8),))
    cluster = tvm_split.Cluster.in_process(2, threads=1)
    split = {"machine-a": ["gate", "gate_padded"], "machine-b": ["gate_plain", "last"]}
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split))
    kernels = [kernel for stage in bundle.kernels.values() for kernel in stage]
    assert {layer for kernel in kernels for layer in kernel.layers} == set(model.layer_names)
    products = [kernel for kernel in kernels if kernel.rule == "conv2d"]
    assert [kernel.layers for kernel in products] == [("gate",), ("gate_padded",), ("last",)]
    assert [kernel.operations for kernel in products] == [2 * 64 * 3 * 17, 2 * 64 * 17 * 32, 2 * 64 * 32 * 16]


class PreparedFirst(nn.Module):
    """Convolutions whose operands other kernels raise, pad or repeat first: over one axis, and in narrow groups."""

    def __init__(self) -> None:
        super().__init__()
        self.axis = nn.Conv1d(8, 32, 3, padding=1)
        self.padded = nn.Conv2d(17, 17, 3, groups=17)
        self.repeated = nn.Conv2d(6, 24, 3, groups=6)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.axis(x), self.padded(y), self.repeated(z)


def test_work_belongs_to_the_kernel_that_does_it() -> None:
    inputs = torch.zeros(1, 8, 40), torch.zeros(1, 17, 30, 30), torch.zeros(1, 6, 30, 30)
    model = tvm_split.load_model(PreparedFirst().eval(), inputs)
    bundle = tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.in_process(1, threads=1)), verify=False)
    kernels = bundle.kernels["stage_0"]
    products = [kernel for kernel in kernels if kernel.rule in ("conv2d", "depthwise_conv2d")]
    assert {layer for kernel in products for layer in kernel.layers} == {"axis", "padded", "repeated"}
    for kernel in kernels:
        if kernel not in products:
            assert kernel.operations <= kernel.moved_bytes, kernel
