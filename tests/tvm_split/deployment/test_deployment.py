"""How many micro-batches a deployment has under way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

import tvm_split
from tests.helpers.planner.predictions import machine_prediction, prediction
from tvm_split.deployment.deployment import _planned_in_flight

X = torch.ones(1, 8)


@pytest.fixture(scope="module")
def bundle() -> tvm_split.Bundle:
    network = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2))).eval()
    model = tvm_split.load_model(network, (X,))
    split = {"machine-a": ["0"], "machine-b": ["1"]}
    return tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(2), split=split))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_no_more_than_asked_for(bundle: tvm_split.Bundle, in_flight: int) -> None:
    fed = 0

    def endless() -> Iterator[torch.Tensor]:
        nonlocal fed
        for fed in itertools.count(1):  # noqa: B007
            yield X

    with tvm_split.deploy(bundle, tvm_split.Cluster.local(2), in_flight=in_flight) as deployment:
        stream = deployment.stream(endless())
        for taken in range(1, 100):
            next(stream)
            assert fed <= taken + in_flight + 1  # one waits until there is room
        stream.close()


def test_a_plan_for_latency_says_how_many(bundle: tvm_split.Bundle) -> None:
    expected = prediction((machine_prediction("machine-a", 0.01), machine_prediction("machine-b", 0.01)))
    planned = dataclasses.replace(bundle.plan, objective="latency", prediction=expected)
    assert _planned_in_flight(planned) == expected.in_flight
    assert _planned_in_flight(dataclasses.replace(planned, objective="throughput")) is None
    assert _planned_in_flight(dataclasses.replace(planned, prediction=None)) is None
    estimated = dataclasses.replace(expected, profiled_at=0.0)
    assert _planned_in_flight(dataclasses.replace(planned, prediction=estimated)) is None
