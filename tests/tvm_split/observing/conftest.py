"""A small network on two machines."""

import pytest
import torch
from torch import nn

import tvm_split


@pytest.fixture(scope="module")
def bundle() -> tvm_split.Bundle:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    model = tvm_split.load_model(network, (torch.ones(1, 4),))
    cluster = tvm_split.Cluster.local(2)
    plan = tvm_split.plan(model, cluster, split={"machine-a": ["0"], "machine-b": ["2"]}, estimate=True)
    return tvm_split.compile(model, plan, verify=False)
