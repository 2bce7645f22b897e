"""Layers with the same shapes share one kernel, however many there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import tvm_ffi
from torch import nn
from tvm import tirx

import tvm_split
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.stage import StageCompiler, kernels_of
from tvm_split.compiler.targets import host_target

LAYERS = 4


def repeated(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(module() for _ in range(LAYERS) for module in modules))


def network() -> nn.Module:
    """Equal blocks of every family: dense, narrow groups, depthwise, a norm; then equal blocks over one axis."""
    images = repeated(
        partial(nn.Conv2d, 32, 32, 3, padding=1),
        nn.ReLU,
        partial(nn.Conv2d, 32, 32, 3, padding=1, groups=8),
        partial(nn.Conv2d, 32, 32, 3, padding=1, groups=32),
        partial(nn.GroupNorm, 4, 32),
    )
    lines = repeated(partial(nn.Conv1d, 32, 32, 3, padding=1), nn.GELU)
    return nn.Sequential(images, nn.Flatten(2), lines, repeated(partial(nn.Linear, 48, 48), partial(nn.LayerNorm, 48)))


def test_every_workload_is_compiled_once() -> None:
    torch.manual_seed(0)
    model = tvm_split.load_model(network().eval(), (torch.randn(1, 32, 6, 8),))
    plan = tvm_split.plan(model, Cluster.in_process(1, threads=1))
    (part,) = partition(model, plan).computations
    modules = StageCompiler(host_target(1)).lower(part.function)
    scheduled = modules["schedule"]
    kernels = [
        function.without_attr("global_symbol")
        for _, function in scheduled.functions_items()
        if isinstance(function, tirx.PrimFunc)
    ]
    assert not any(tvm_ffi.structural_equal(*pair) for pair in itertools.combinations(kernels, 2))
    # Every convolution and product has one function, and as many calls as layers.
    calls = [kernel.function for kernel in kernels_of(modules, model.layers)]
    for word, families in {"conv2d": 4, "matmul": 1, "group_norm": 1, "layer_norm": 1}.items():
        named = [function for function in calls if word in function]
        assert len(named) == families * LAYERS, named
        assert len(set(named)) == families, named
