"""Compiled kernels lead back to the model: every layer's work is in exactly one of them."""

from __future__ import annotations

import pytest
import torch

import tvm_split
from tests.models import torch_models
from tvm_split.planner.cost import model_operations

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
    # Folding and reading views in place take away some of what only maps or moves elements; the products stay.
    assert sum(kernel.operations for kernel in kernels) == pytest.approx(model_operations(model), rel=0.06)
    assert not any(kernel.is_slow for kernel in kernels)
    products = {kernel.layers[0] for kernel in kernels if kernel.rule in ("conv2d", "winograd", "matmul")}
    assert len(products) > 4
    assert products <= set(model.layer_names)
