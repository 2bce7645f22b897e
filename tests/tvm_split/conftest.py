"""Fixtures for the tests of all front-end packages."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tvm_split
from tests.helpers.scripted_kernels import Noise, ScriptedKernels
from tvm_split.profiling import kernel_timing, link_model, link_probing


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    """Give kernels the times of `ScriptedKernels` and accept any times of links: the test machine may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernel_timing,
            "open_session",
            lambda cluster, timeout_seconds, machine: ScriptedKernels(machine.name, Noise()),
        )
        patch.setattr(link_model, "DISAGREEMENT", math.inf)
        patch.setattr(link_probing, "SERIES_SECONDS", 0.01)
        yield


@pytest.fixture(scope="session")
def bundle() -> tvm_split.Bundle:
    """A small network on two machines."""
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    model = tvm_split.load_model(network, (torch.ones(1, 4),))
    cluster = tvm_split.Cluster.local(2)
    plan = tvm_split.plan(model, cluster, split={"machine-a": ["0"], "machine-b": ["2"]}, estimate=True)
    return tvm_split.compile(model, plan, verify=False)
