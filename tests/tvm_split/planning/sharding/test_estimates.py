"""Estimates of parts of small networks, compared with the pieces' times and the compiled program's transfers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import tvm_split
from tests.models.torch_models import vgg
from tvm_split.placement.corrections import calibrated
from tvm_split.placement.plan import Plan
from tvm_split.placement.profile import ClusterProfile, Corrections
from tvm_split.placement.request import PlanRequest
from tvm_split.planning.planner import Planner
from tvm_split.planning.sharding.estimates import PartEstimates, profile_parts

A, B = "machine-a", "machine-b"
HALVES = {A: 0.5, B: 0.5}


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    return tvm_split.load_model(network.eval(), (torch.zeros(1, 3, 16, 16),))


@pytest.fixture(scope="module")
def cluster() -> tvm_split.Cluster:
    return tvm_split.Cluster.in_process(machines=2, threads=1)


def profile_of(model: tvm_split.Model, cluster: tvm_split.Cluster) -> ClusterProfile:
    return Planner(model, cluster, PlanRequest()).profile


def planned(model: tvm_split.Model, cluster: tvm_split.Cluster, *shards: tvm_split.Shard) -> Plan:
    return tvm_split.plan(model, cluster, shards=shards)


def test_a_machine_twice_as_slow_takes_twice_as_long(model: tvm_split.Model, cluster: tvm_split.Cluster) -> None:
    profile = profile_of(model, cluster)
    first, second = profile.machines
    slow = replace(
        second,
        bytes_per_second=second.bytes_per_second / 2,
        pieces={
            name: replace(time, seconds=2 * time.seconds, contended_seconds=3 * time.seconds)
            for name, time in second.pieces.items()
        },
    )
    plan = planned(model, cluster, tvm_split.Shard("0", "3", "rows", HALVES))
    fast = {step.name: step for step in PartEstimates(model, profile).steps_of(plan).steps}
    for hostname, ratio in ((second.hostname, 2.0), (first.hostname, 3.0)):
        changed = replace(profile, machines=(first, replace(slow, hostname=hostname)))
        for step in PartEstimates(model, changed).steps_of(plan).steps:
            before = fast[step.name].seconds[0]
            assert step.seconds == (pytest.approx(before * (1.0 if step.machines == (A,) else 2.0)),)
            if step.machines == (B,):
                assert step.contended_seconds == (pytest.approx(before * ratio),)


def test_weights_are_read_by_each_machine_that_computes_rows(cluster: tvm_split.Cluster) -> None:
    """Half of the rows of a layer that mostly reads its weights takes nearly as long as all rows."""
    network = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1024, 3, padding=1), nn.Conv2d(1024, 4, 1))
    model = tvm_split.load_model(network.eval(), (torch.zeros(1, 4, 16, 16),))
    profile = profile_of(model, cluster)
    plans = {axis: planned(model, cluster, tvm_split.Shard("1", "1", axis, HALVES)) for axis in ("rows", "channels")}

    def slowest(speed: float) -> dict[str, float]:
        machines = tuple(replace(machine, bytes_per_second=speed) for machine in profile.machines)
        estimates = PartEstimates(model, replace(profile, machines=machines))
        ahead = estimates.looked_ahead(plans["rows"], 1)
        seconds = {
            axis: {step.name: step.seconds[0] for step in estimates.steps_of(plan).steps}
            for axis, plan in plans.items()
        }
        rows = seconds["rows"]["stage_1_machine_b_0"]
        assert ahead["1", B] == pytest.approx(rows)
        return {"rows": rows, "channels": seconds["channels"]["stage_1_machine_b_0"]}

    whole = profile.machines[0].pieces["1"].seconds
    weights = next(piece.weight_bytes for piece in profile.pieces if piece.name == "1")
    assert slowest(math.inf) == {axis: pytest.approx(whole / 2, rel=0.1) for axis in plans}
    assert slowest(weights / whole) == {"rows": pytest.approx(whole), "channels": pytest.approx(whole / 2)}


A, B = "machine-a", "machine-b"
pytestmark = pytest.mark.usefixtures("busy_machine")


@pytest.mark.slow
def test_parts_are_timed_in_their_own_shapes_on_workers(three_workers: tvm_split.Cluster) -> None:
    model = tvm_split.load_model(vgg().eval(), (torch.zeros(1, 3, 16, 16),))
    shards = [tvm_split.Shard("features.0", "features.7", "rows", {A: 0.6, B: 0.4}, "each")]
    plan = tvm_split.plan(model, three_workers, shards=shards, predict=True)
    assert plan.prediction is not None
    assert plan.prediction.profiled_at > 0
    assert {machine.machine: machine.estimated_share for machine in plan.prediction.machines} == {A: 0.0, B: 0.0}
    bundle = tvm_split.compile(model, plan, verify=False)
    with tvm_split.deploy(bundle, three_workers) as deployment:
        # Enough that every machine computes some while the pipeline is full.
        report = tvm_split.bench(deployment, (torch.zeros(1, 3, 16, 16),), rounds=1, micro_batches=40)
    assert report.latency.predicted == plan.prediction.latency_seconds
    assert {
        machine.machine for machine in report.machines if machine.compute.predicted and machine.compute.measured
    } == {A, B}
    sizes = {(link.source, link.destination): link.bytes for link in report.links}
    assert all(size.predicted for size in sizes.values())
    crossing = [
        route.tensor.size_bytes for route in bundle.program.routes if (route.source, route.destination) == (A, B)
    ]
    assert sizes[A, B].predicted == sum(crossing)
    # Corrections of a machine's profile apply to parts, too.
    profile = Planner(model, three_workers, PlanRequest()).profile
    corrections = (Corrections(), Corrections(((A, 2.0),)))
    estimates = [PartEstimates(model, calibrated(profile, correction)) for correction in corrections]
    plain, slower = (profile_parts(model, [plan], three_workers, estimate)[0].steps for estimate in estimates)
    assert {step.machines for step in plain} == {(A,), (B,)}
    for before, after in zip(plain, slower, strict=True):
        factor = 2.0 if before.machines == (A,) else 1.0
        assert after.seconds == (pytest.approx(factor * before.seconds[0]),)
        assert after.contended_seconds == (pytest.approx(factor * before.contended_seconds[0]),)
