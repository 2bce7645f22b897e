"""Plans for latency that split layers automatically, and predictions of shards, through the public API."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from tests.models.torch_models import bert
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Link, Machine, SharedCores
from tvm_split.launchers.local import Local
from tvm_split.placement.corrections import Measured
from tvm_split.placement.request import PlanRequest
from tvm_split.planning.replan import replan

A, B, C = "machine-a", "machine-b", "machine-c"
IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))


def wide_convolutions() -> nn.Sequential:
    """Splitting it pays unless the network is slow: 75 million operations of a layer on small tensors."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


@pytest.fixture(scope="module")
def convolutions() -> tvm_split.Model:
    return tvm_split.load_model(wide_convolutions(), (IMAGE,))


def shared(plan: tvm_split.Plan) -> list[tuple[str, ...]]:
    return [stage.machines for stage in plan.stages if stage.sharding]


def linked(machines: tuple[Machine, ...], bytes_per_second: float, latency_seconds: float) -> Cluster:
    """Return a cluster whose machines do not share cores."""
    names = ["client", *(machine.name for machine in machines)]
    pairs = [(first, second) for place, first in enumerate(names) for second in names[place + 1 :]]
    links = tuple(Link(*pair, bytes_per_second, latency_seconds) for pair in pairs)
    return Cluster(
        machines,
        links,
        tuple(SharedCores((machine.name,), machine.threads or 1) for machine in machines),
        launcher=Local(),
    )


def test_latency_is_shared_where_that_is_faster(convolutions: tvm_split.Model) -> None:
    cluster = Cluster.in_process(machines=2, threads=1)
    plan = tvm_split.plan(convolutions, cluster, objective="latency")
    assert shared(plan)
    assert plan.prediction is not None
    assert plan.prediction.latency_seconds < 0.7 * min(
        baseline.latency_seconds for baseline in plan.prediction.baselines
    )
    assert plan.prediction.lower_bound_seconds <= plan.prediction.latency_seconds
    assert any(alternative.name.startswith("whole layers") for alternative in plan.prediction.alternatives)
    without = tvm_split.plan(convolutions, cluster, objective="latency", auto_shards=False)
    assert not shared(without)
    assert without.prediction is not None
    assert without.prediction.latency_seconds > plan.prediction.latency_seconds
    assert not shared(tvm_split.plan(convolutions, cluster))
    bundle = tvm_split.compile(convolutions, plan)
    assert bundle.verified == "yes"
    with tvm_split.deploy(bundle, cluster) as deployment, torch.no_grad():
        (y,) = deployment.run(IMAGE)
        np.testing.assert_allclose(y, wide_convolutions()(IMAGE).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_attention_is_shared_where_that_is_faster() -> None:
    """Two machines read 12 MB of weights in half the time of one, and the small network on one."""
    mask = torch.ones(1, 12, dtype=torch.int64)
    two = linked((Machine(A), Machine(B)), 1e10, 1e-6)
    small = tvm_split.load_model(bert(), (TOKENS, mask))
    assert not shared(tvm_split.plan(small, two, objective="latency", estimate=True))
    model = tvm_split.load_model(bert(width=512, depth=1), (TOKENS, mask))
    plan = tvm_split.plan(model, two, objective="latency", estimate=True)
    assert shared(plan)
    assert {stage.sharding.axis for stage in plan.stages if stage.sharding} & {"heads", "channels"}
    assert tvm_split.compile(model, plan).verified == "yes"


def test_shares_are_by_speed_and_more_machines_share_more(convolutions: tvm_split.Model) -> None:
    unequal = linked((Machine(A, threads=1), Machine(B, threads=3)), 1e12, 0.0)
    plan = tvm_split.plan(convolutions, unequal, objective="latency", estimate=True)
    (first, *_) = [stage for stage in plan.stages if stage.sharding]
    shares = dict(zip(first.machines, first.shares, strict=True))
    assert shares[B] == pytest.approx(0.75, abs=0.08)
    three = linked((Machine(A), Machine(B), Machine(C)), 1e12, 0.0)
    two = tvm_split.plan(convolutions, three, objective="latency", estimate=True, maximum_machines=2)
    all_three = tvm_split.plan(convolutions, three, objective="latency", estimate=True)
    assert max(len(machines) for machines in shared(all_three)) == 3
    assert all(len(machines) == 2 for machines in shared(two))
    assert two.prediction is not None
    assert all_three.prediction is not None
    assert all_three.prediction.latency_seconds < two.prediction.latency_seconds


def test_shares_follow_what_was_measured(convolutions: tvm_split.Model) -> None:
    """A machine that is three times as slow as profiled gets a smaller share, and is corrected only once."""
    cluster = linked((Machine(A), Machine(B)), 1e12, 0.0)
    request = PlanRequest(objective="latency", estimate=True)
    current = tvm_split.plan(convolutions, cluster, objective="latency", estimate=True)
    assert shared(current)
    same, change = replan(convolutions, cluster, current, Measured({A: 1.0, B: 1.0}), request=request)
    assert (change.changed, same.stages) == (False, current.stages)
    slow = Measured({A: 1.0, B: 3.0})
    better, change = replan(convolutions, cluster, current, slow, request=request)
    assert change.changed
    assert change.gain > 0.2
    (first, *_) = [stage for stage in better.stages if stage.sharding]
    assert dict(zip(first.machines, first.shares, strict=True))[A] == pytest.approx(0.75, abs=0.08)
    assert better.prediction is not None
    assert dict(better.prediction.corrections.compute_ratios) == {A: 1.0, B: 3.0}
    again, change = replan(convolutions, cluster, better, slow, request=request)
    assert (change.changed, again.stages) == (False, better.stages)
    pinned = dataclasses.replace(request, pin={"0": B})
    moved, change = replan(convolutions, cluster, better, slow, request=pinned)
    assert change.changed
    assert next(stage for stage in moved.stages if "0" in stage.layers).machines == (B,)


def test_what_fits_on_no_machine_runs_on_three(three_workers: tvm_split.Cluster) -> None:
    """Weights of 4 MB on machines of 1.9 MB, planned automatically and by hand."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 4)).eval()
    x = torch.randn(1, 1000)
    model = tvm_split.load_model(network, (x,))
    endpoints = three_workers.endpoints()
    machines = tuple(Machine(name, memory_bytes=1_900_000, endpoint=endpoints[name]) for name in (A, B, C))
    small = Cluster(machines)
    by_hand = [tvm_split.Shard("0", "2", "channels", {A: 0.4, B: 0.3, C: 0.3})]
    for planned in (tvm_split.plan(model, small, estimate=True), tvm_split.plan(model, small, shards=by_hand)):
        assert shared(planned) == [(A, B, C)]
        with tvm_split.deploy(tvm_split.compile(model, planned), small) as deployment, torch.no_grad():
            (y,) = deployment.run(x)
            np.testing.assert_allclose(y, network(x).numpy(), rtol=1e-4, atol=1e-5)
            held = deployment.stats().weight_bytes
        assert held.keys() == {A, B, C}
        assert max(held.values()) < 1_900_000
    alone = tvm_split.plan(model, small, split={A: ["0"]})
    with pytest.raises(tvm_split.ClusterError, match=r"'machine-a' needs 0.004 GB .* but has 0.002 GB; move layers"):
        tvm_split.deploy(tvm_split.compile(model, alone, verify=False), small)
