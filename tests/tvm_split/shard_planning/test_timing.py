"""The parts of shared layers, timed on the workers that will compute them, and measured again when they do."""

from __future__ import annotations

import pytest
import torch

import tvm_split
from tests.models.torch_models import vgg
from tvm_split.planner.profile import Corrections
from tvm_split.planner.replan import calibrated
from tvm_split.planner.request import PlanRequest
from tvm_split.posing import pose
from tvm_split.shard_planning.estimates import PartEstimates
from tvm_split.shard_planning.timing import profile_parts

A, B = "machine-a", "machine-b"
pytestmark = pytest.mark.usefixtures("busy_machine")


def test_parts_are_timed_in_their_own_shapes_on_workers(three_workers: tvm_split.Cluster) -> None:
    model = tvm_split.load_model(vgg().eval(), (torch.zeros(1, 3, 16, 16),))
    shards = [tvm_split.Shard("features.0", "features.7", "rows", {A: 0.6, B: 0.4}, "each")]
    found = tvm_split.plan(model, three_workers, shards=shards, predict=True)
    assert found.prediction is not None
    assert found.prediction.profiled_at > 0
    assert {each.machine: each.estimated_share for each in found.prediction.machines} == {A: 0.0, B: 0.0}
    bundle = tvm_split.compile(model, found, verify=False)
    with tvm_split.deploy(bundle, three_workers) as deployment:
        # So many that every machine has some that find the pipeline full.
        report = tvm_split.bench(deployment, (torch.zeros(1, 3, 16, 16),), rounds=1, micro_batches=40)
    assert report.latency.predicted == found.prediction.latency_seconds
    assert {each.machine for each in report.machines if each.compute.predicted and each.compute.measured} == {A, B}
    sizes = {(each.source, each.destination): each.bytes for each in report.links}
    assert all(each.predicted for each in sizes.values())
    crossing = [each.tensor.size_bytes for each in bundle.program.routes if (each.source, each.destination) == (A, B)]
    assert sizes[A, B].predicted == sum(crossing)
    # What runs have said of a machine since it was profiled counts for parts, too.
    profile = pose(model, three_workers, PlanRequest()).profile
    corrections = (Corrections(), Corrections(((A, 2.0),)))
    estimates = [PartEstimates(model, calibrated(profile, each)) for each in corrections]
    plain, slower = (profile_parts(model, [found], three_workers, each)[0].steps for each in estimates)
    assert {each.machines for each in plain} == {(A,), (B,)}
    for before, after in zip(plain, slower, strict=True):
        factor = 2.0 if before.machines == (A,) else 1.0
        assert after.seconds == (pytest.approx(factor * before.seconds[0]),)
        assert after.contended_seconds == (pytest.approx(factor * before.contended_seconds[0]),)
