"""Parts of sharded layers, timed on the workers and compared with measurements of the deployment."""

from __future__ import annotations

import pytest
import torch

import tvm_split
from tests.models.torch_models import vgg
from tvm_split.planner.profile import Corrections
from tvm_split.planner.replan import calibrated
from tvm_split.planner.request import PlanRequest
from tvm_split.planning_problem import build_planning_problem
from tvm_split.shard_planning.estimates import PartEstimates
from tvm_split.shard_planning.timing import profile_parts

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
    profile = build_planning_problem(model, three_workers, PlanRequest()).profile
    corrections = (Corrections(), Corrections(((A, 2.0),)))
    estimates = [PartEstimates(model, calibrated(profile, correction)) for correction in corrections]
    plain, slower = (profile_parts(model, [plan], three_workers, estimate)[0].steps for estimate in estimates)
    assert {step.machines for step in plain} == {(A,), (B,)}
    for before, after in zip(plain, slower, strict=True):
        factor = 2.0 if before.machines == (A,) else 1.0
        assert after.seconds == (pytest.approx(factor * before.seconds[0]),)
        assert after.contended_seconds == (pytest.approx(factor * before.contended_seconds[0]),)
