"""Stages send each other images as they compute on them, and the results are torch's."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from tvm_split.compiler.sharding import partition

A, B, C = "machine-a", "machine-b", "machine-c"
INPUT = torch.linspace(-1, 1, 3 * 12 * 12).reshape(1, 3, 12, 12)


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Residual(nn.Module):
    """A skip over a machine, and a pool that works on blocks as well as on plain channels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.bend = convolution(3, 32), nn.ReLU()
        self.middle, self.after = convolution(32, 32), nn.ReLU()
        self.pool, self.last = nn.MaxPool2d(2), convolution(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bend(self.enter(x))
        return self.last(self.pool(x + self.after(self.middle(x))))


class Flattened(nn.Module):
    """The stage behind the cut needs plain channels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.flat, self.dense = convolution(3, 16), nn.Flatten(), nn.Linear(16 * 144, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.flat(self.enter(x)))


class Shown(nn.Module):
    """The transferred tensor is also a result, which the client gets in torch's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.last = convolution(3, 16), convolution(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.enter(x)
        return x, self.last(x)


def compiled(network: nn.Module, split: dict[str, list[str]], **options: object) -> tuple[tvm_split.Bundle, list]:
    torch.manual_seed(0)
    model = tvm_split.load_model(network.eval(), (INPUT,))
    cluster = tvm_split.Cluster.in_process(len(split), threads=1)
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split), **options)
    with tvm_split.deploy(bundle, cluster) as deployment:
        return bundle, deployment.run(INPUT)


def crossing(bundle: tvm_split.Bundle) -> list[tuple[int, ...]]:
    return [tensor.shape for stage in bundle.program.stages[:-1] for tensor in stage.outputs]


@pytest.mark.parametrize(
    ("network", "split", "ranks"),
    [
        (Residual, {A: ["enter", "bend"], B: ["middle", "after"], C: ["pool", "last"]}, {5}),
        (Flattened, {A: ["enter"], B: ["flat", "dense"]}, {4}),
        (Shown, {A: ["enter"], B: ["last"]}, {4}),
    ],
)
def test_images_cross_as_both_sides_compute_on_them(network, split, ranks) -> None:
    module = network()
    bundle, results = compiled(module, split)
    assert bundle.verified == "yes"
    assert {len(shape) for shape in crossing(bundle)} == ranks
    expected = module(INPUT)
    for actual, reference in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(actual, reference.detach().numpy(), rtol=1e-4, atol=1e-5)
    if ranks == {5}:
        changes = [
            kernel
            for stage_kernels in bundle.kernels.values()
            for kernel in stage_kernels
            if "layout" in kernel.function
        ]
        assert [kernel.layers for kernel in changes] == [("last",)]  # the client's result


def test_parts_of_rows_cross_as_both_sides_compute_on_them() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(convolution(3, 32), nn.ReLU(), convolution(32, 32), convolution(32, 16)).eval()
    model = tvm_split.load_model(network, (INPUT,))
    shard = tvm_split.Shard("0", "3", "rows", {A: 0.6, B: 0.4}, "each")
    bundle = tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(2), shards=[shard]))
    assert bundle.verified == "yes"
    ranks = {tensor.name: len(tensor.shape) for stage in bundle.program.stages for tensor in stage.outputs}
    ends = {name for name in ranks if name.startswith("layer_3")}
    assert len(ends) < len(ranks)
    assert {ranks[name] for name in ranks.keys() - ends} == {5}, ranks


def with_target(plan: tvm_split.Plan, machine: str, **changes: object) -> tvm_split.Plan:
    machines = [
        dataclasses.replace(original, target={**original.target, **changes}) if original.name == machine else original
        for original in plan.machines
    ]
    return dataclasses.replace(plan, machines=tuple(machines))


def test_machines_with_unlike_vectors_exchange_plain_images() -> None:
    model = tvm_split.load_model(Residual().eval(), (INPUT,))
    cluster = tvm_split.Cluster.in_process(2, threads=1)
    plan = tvm_split.plan(model, cluster, split={A: ["enter", "bend"], B: ["middle", "after", "pool", "last"]})
    wide = with_target(with_target(plan, A, mcpu="skylake-avx512", mattr=[]), B, mcpu="skylake-avx512", mattr=[])
    unlike = with_target(wide, B, mcpu="haswell")
    for retargeted, rank in ((wide, 5), (unlike, 4)):
        first, second = partition(model, retargeted).computations
        (sent,), (received,) = first.function.ret_ty.fields, [parameter.ty for parameter in second.function.params]
        assert sent.ndim == received.ndim == rank
