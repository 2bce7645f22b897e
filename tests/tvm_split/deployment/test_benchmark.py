"""Benchmarks and reports of real deployments; the tests do not depend on the measured values."""

import dataclasses

import numpy as np
import pytest

import tvm_split
from tests.helpers.placement.predictions import machine_prediction, prediction
from tests.models.small_onnx_model import INPUT_SHAPE, small_model

A, B = "machine-a", "machine-b"
SPLIT = {A: ["conv_1", "relu_1"], B: ["conv_2", "flatten", "dense"]}


@pytest.fixture(scope="module")
def bundle():
    """The small network on two machines; the prediction of its plan is far too optimistic."""
    model = tvm_split.load_model(small_model())
    plan = tvm_split.plan(model, tvm_split.Cluster.local(workers=2), split=SPLIT)
    expected = prediction((machine_prediction(A, 1e-9), machine_prediction(B, 1e-9)))
    return tvm_split.compile(model, dataclasses.replace(plan, prediction=expected))


@pytest.fixture
def inputs():
    return [np.random.default_rng(seed).standard_normal(INPUT_SHAPE).astype(np.float32) for seed in range(2)]


def test_on_workers(bundle, inputs, three_workers):
    steps = []
    with tvm_split.deploy(bundle, three_workers) as deployment:
        deployment.run(inputs[0])
        assert [machine.micro_batches for machine in deployment.report().machines] == [1, 1]
        report = tvm_split.bench(
            deployment, inputs, rounds=2, micro_batches=100, on_progress=lambda *step: steps.append(step)
        )
        whole = deployment.report()
    assert (report.runs, report.streamed) == (10, 200)
    assert whole.streamed > report.streamed
    assert [machine.machine for machine in report.machines] == [A, B]
    for machine in report.machines:
        assert machine.micro_batches > 0
        assert machine.compute.measured > 0
        assert machine.compute.ratio == machine.compute.measured / machine.compute.predicted
        assert machine.receive.measured is not None
        assert machine.send.measured is not None
    assert [(link.source, link.destination) for link in report.links] == [("client", A), (A, B), (B, "client")]
    assert report.links[1].bytes.measured == 2 * 8 * 6 * 6 * 4
    assert all(link.seconds.measured is not None for link in report.links)
    assert report.period.measured > 0
    assert report.latency.measured > 0
    assert report.advice
    assert [done for _, done, _ in steps] == list(range(1, steps[-1][2] + 1))


def test_what_cannot_be_measured(bundle, inputs):
    with (
        tvm_split.deploy(bundle, tvm_split.Cluster.in_process(machines=2, threads=1)) as deployment,
        pytest.raises(tvm_split.InputError, match="micro_batches is 2"),
    ):
        tvm_split.bench(deployment, inputs, micro_batches=2)
