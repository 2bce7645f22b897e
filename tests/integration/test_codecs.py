"""Links with codecs, from the plan to the results: every codec compared with torch, and which codec a plan chooses."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

import tvm_split
from rpc_runtime.program.codecs import CODECS, NONE
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.relay import Relay
from tests.helpers.smooth_network import CROSSING_BYTES, CUT, smooth_network
from tests.helpers.waiting import eventually
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.cluster.machine import Link, Machine
from tvm_split.errors import ClusterError, PlanError
from tvm_split.launchers.local import Local
from tvm_split.placement.plan import Plan

A, B = "machine-a", "machine-b"
Endpoints = Mapping[str, WorkerEndpoint]
SLOW_BYTES_PER_SECOND = 100e6 / 8
TOLERANCES = {"fp16": 2e-3, "bf16": 2e-2, "int8": 3e-2}
"""How much a codec may change the results, relative to their range; `EXACT` is the limit for compiling."""
EXACT = 1e-4


@pytest.fixture(scope="module")
def workers(three_workers: Workers) -> Endpoints:
    return {name: three_workers.endpoints()[name] for name in (A, B)}


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return smooth_network()[0]


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return smooth_network()[1]


@pytest.fixture(scope="module")
def model(network: torch.nn.Module, x: torch.Tensor) -> tvm_split.Model:
    return tvm_split.load_model(network, (x,))


SPLIT = dict(zip((A, B), CUT, strict=True))


def joined_by(workers: Endpoints, *links: Link) -> Cluster:
    return Cluster(tuple(Machine(name, endpoint=end) for name, end in workers.items()), links)


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def sent_for_each(deployment: tvm_split.Deployment) -> float:
    """Return the bytes per micro-batch that the first stage has sent."""
    stage = deployment.stats().stages[0]
    return stage.bytes_sent / stage.micro_batches


IN_SHORT = ("lz4", "int8")


@pytest.mark.parametrize(
    "codec", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.slow) for name in CODECS]
)
def test_every_codec_gives_what_torch_gives(
    workers: Endpoints, network: torch.nn.Module, x: torch.Tensor, model: tvm_split.Model, codec: str, tmp_path: Path
) -> None:
    cluster = joined_by(
        workers,
        Link(A, B, 1e9, transport="grpc", codec=codec),
        Link(CLIENT, A, 1e9, transport="grpc", codec=codec),
        Link(B, CLIENT, 1e9, transport="grpc", codec=codec),
    )
    plan = tvm_split.plan(model, cluster, split=SPLIT)
    between = [route for route in plan.codecs if (route.source, route.destination) == (A, B)]
    assert [route.codec for route in between] == ([codec] if codec != NONE else [])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    bundle = tvm_split.compile(model, plan)
    bundle.save(tmp_path / "bundle")
    with tvm_split.deploy(tvm_split.Bundle.load(tmp_path / "bundle"), cluster) as deployment:
        with torch.no_grad():
            expected = network(x).numpy()
        (result,) = deployment.run(x)
        assert error_of(result, expected) <= TOLERANCES.get(codec, EXACT)
        # Longer than what is under way at once: in a short stream all may be sent before the measured part begins.
        for _ in deployment.stream([(x,)] * 200):
            pass
        expected_bytes = pytest.approx(CROSSING_BYTES / (between[0].ratio or 1.0 if between else 1.0), rel=1e-3)
        # A sent tensor is counted after it was sent, and may arrive before it is counted.
        eventually(lambda: sent_for_each(deployment) == expected_bytes, "all that was sent is counted")
        report = deployment.report()
    if codec == NONE:
        return
    (planned,) = between
    assert planned.ratio is not None
    assert planned.ratio > 1.05
    lossy = [route for route in plan.codecs if CODECS[route.codec].is_lossy]
    stated = sum(route.output_error or 0 for route in lossy)
    assert (stated > EXACT / 10) == CODECS[codec].is_lossy
    assert error_of(result, expected) <= stated + EXACT
    (link,) = [link for link in report.links if (link.source, link.destination) == (A, B)]
    assert link.codecs == (codec,)
    assert link.bytes.measured == expected_bytes


@pytest.fixture(scope="module")
def slow_link(workers: Endpoints) -> Iterator[str]:
    with Relay(workers[B].address, bytes_per_second=SLOW_BYTES_PER_SECOND) as relay:
        yield relay.address


def slow_cluster(workers: Endpoints, address: str, codec: str = "auto") -> Cluster:
    return joined_by(workers, Link(A, B, SLOW_BYTES_PER_SECOND, address=address, codec=codec))


@pytest.mark.parametrize("transport", ["auto", pytest.param("shm", marks=pytest.mark.slow)])
def test_where_memory_is_shared_codecs_are_passed_over_and_that_is_said(
    workers: Endpoints, model: tvm_split.Model, network: torch.nn.Module, x: torch.Tensor, transport: str
) -> None:
    cluster = joined_by(workers, Link(A, B, 1e6, transport=transport, codec="int8"), Link(CLIENT, A, 1e6, codec="auto"))
    plan = tvm_split.plan(model, cluster, split=SPLIT)
    ((tensor, codec),) = [(route.tensor, route.codec) for route in plan.codecs]
    assert codec == "int8"
    remark = f"{A} → {B}: int8 is not used if both ends share memory, which is expected; {tensor} is then exact"
    assert plan.remarks == (remark,)
    with tvm_split.deploy(tvm_split.compile(model, plan), cluster) as deployment, torch.no_grad():
        assert error_of(deployment.run(x)[0], network(x).numpy()) <= EXACT
        (link,) = [link for link in deployment.report().links if (link.source, link.destination) == (A, B)]
    assert (link.transport, link.codecs) == ("shm", ())


def test_a_codec_that_fits_no_tensor_is_told_with_the_reason() -> None:
    embedding = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)).eval()
    model = tvm_split.load_model(embedding, (torch.tensor([[1, 2]]),))
    cluster = Cluster(
        (Machine(A, target={"kind": "llvm"}),),
        (Link(CLIENT, A, 1e6, transport="grpc", codec="fp16"),),
        launcher=Local(),
    )
    plan = tvm_split.plan(model, cluster, split={A: ["0", "1"]})
    (input_name,) = [tensor.name for tensor in model.inputs]
    why = "fp16 is for float32 and float64, and this is int64"
    assert plan.remarks == (f"{CLIENT} → {A}: {input_name} is sent without a codec: {why}",)
    assert [(route.source, route.destination) for route in plan.codecs] == [(A, CLIENT)]  # the way back


def test_without_inputs_to_try_it_on_a_named_codec_is_predicted_by_its_bytes() -> None:
    """This holds also for links between machines that compute layers together."""
    layers = torch.nn.Embedding(5, 64), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    model = tvm_split.load_model(torch.nn.Sequential(*layers).eval(), (torch.tensor([[1, 2]]),))
    model = replace(model, example_inputs=None)
    shard = tvm_split.Shard("1", "3", "channels", {A: 0.5, B: 0.5}, "each")
    plans = {}
    for codec in ("none", "fp16", "lz4"):
        links = tuple(
            Link(*ends, 1e5, 0.001, transport="grpc", codec=codec) for ends in permutations((CLIENT, A, B), 2)
        )
        cluster = Cluster(tuple(Machine(name, target={"kind": "llvm"}) for name in (A, B)), links, launcher=Local())
        plans[codec] = tvm_split.plan(model, cluster, split={A: ["0"]}, shards=shard, predict=True, estimate=True)
    predictions = {codec: plan.prediction for codec, plan in plans.items()}
    sizes, latencies = {}, {}
    for codec, prediction in predictions.items():
        assert prediction is not None
        sizes[codec] = {(link.source, link.destination): link.bytes for link in prediction.links}
        latencies[codec] = prediction.latency_seconds
    assert sizes["none"] == sizes["lz4"]
    for ends, size in sizes["none"].items():
        assert sizes["fp16"][ends] == (size if ends[0] == CLIENT else size / 2)
    assert latencies["fp16"] < 0.8 * latencies["none"] == pytest.approx(0.8 * latencies["lz4"])
    assert {(route.ratio, route.output_error) for route in plans["fp16"].codecs} == {(2.0, None)}
    assert {(route.ratio, route.output_error) for route in plans["lz4"].codecs} == {(None, None)}


def test_lossy_codecs_together_keep_to_what_is_allowed(
    workers: Endpoints, model: tvm_split.Model, slow_link: str
) -> None:
    cluster = slow_cluster(workers, slow_link)
    errors = []
    for allowed in (1.0, 1e-3, 1e-9):
        plan = tvm_split.plan(model, cluster, split=SPLIT, allow_lossy=allowed)
        (chosen,) = plan.codecs
        assert chosen.output_error is not None
        assert chosen.output_error <= allowed
        errors.append(chosen.codec)
    assert errors[0] == "int8"
    assert not CODECS[errors[-1]].is_lossy


def test_what_is_asked_and_cannot_be_is_said(
    workers: Endpoints, model: tvm_split.Model, slow_link: str, tmp_path: Path
) -> None:
    cluster = slow_cluster(workers, slow_link)
    plan = tvm_split.plan(model, cluster, split=SPLIT)
    bundle = tvm_split.compile(model, plan, verify=False)
    with pytest.raises(ClusterError, match=rf"'{A}' to '{B}' has codec 'int8'.*was planned with"):
        tvm_split.deploy(bundle, slow_cluster(workers, slow_link, "int8"))
    elsewhere = replace(plan, codecs=(replace(plan.codecs[0], source=CLIENT),))
    with pytest.raises(PlanError, match="this tensor does not take that route; tensors on it:"):
        tvm_split.compile(model, elsewhere)
    with pytest.raises(PlanError, match="allow_lossy is -1"):
        tvm_split.plan(model, cluster, split=SPLIT, allow_lossy=-1)
