"""The trace of ResNet-50 on two workers, and where the viewers are."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tvm_split
from rpc_runtime.program.events import FLIGHT, RECEIVE, SEND
from tests.helpers.waiting import eventually
from tests.models import torch_models
from tests.viewers.lab import COUNT, Lab, Run


@pytest.fixture(scope="session")
def bundle() -> tvm_split.Bundle:
    model = tvm_split.load_model(torch_models.resnet50(seed=1), (torch.zeros(1, 3, 224, 224),), name="resnet50")
    plan = tvm_split.plan(model, tvm_split.Cluster.local(2), stages=2, estimate=True)
    return tvm_split.compile(model, plan, verify=False)


def _is_complete(events: Counter[str]) -> bool:
    return events[SEND] == events[RECEIVE] and events[FLIGHT] == COUNT


@pytest.fixture(scope="session")
def run(bundle: tvm_split.Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    x = np.random.default_rng(0).normal(size=(1, 3, 224, 224)).astype(np.float32)
    folder = tmp_path_factory.mktemp("run")
    with tvm_split.Cluster.local(2) as cluster, tvm_split.deploy(bundle, cluster) as deployment:
        with deployment.tracing() as recording:
            for _ in deployment.stream([(x,)] * COUNT):
                pass
            eventually(lambda: _is_complete(Counter(event.kind for event in recording.trace)), "all is sent")
        trace = recording.trace
        yield Run(trace, folder, deployment.stats())


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()
