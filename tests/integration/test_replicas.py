"""Models whose stages have replicas, from the plan to the results, compared with torch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm

import tvm_split
from tests.models.torch_graphs import Skip
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.targets import host_target
from tvm_split.compiler.verification import one_by_one, verify_bundle
from tvm_split.launchers.local import Local
from tvm_split.placement.plan import Plan

INPUT = torch.randn(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    torch.manual_seed(0)
    return tvm_split.load_model(Skip().eval(), (INPUT,))


def with_replicas(planned: Plan, stage: int, shares: dict[str, float]) -> Plan:
    changed = replace(planned.stages[stage], machines=tuple(shares), shares=tuple(shares.values()))
    return replace(planned, stages=(*planned.stages[:stage], changed, *planned.stages[stage + 1 :]))


def on_three(model: tvm_split.Model, cluster: tvm_split.Cluster, shares: dict[str, float]) -> Plan:
    """The skip connection bypasses a stage with replicas, and returns to its first machine."""
    everywhere = {"machine-a": ["first", "add"], "machine-b": ["middle"], "machine-c": ["last"]}
    planned = tvm_split.plan(model, cluster, split=everywhere)
    assert [stage.machine for stage in planned.stages] == ["machine-a", "machine-b", "machine-a", "machine-c"]
    return with_replicas(planned, 1, shares)


def test_answers_are_those_of_torch(model: tvm_split.Model, three_workers: tvm_split.Cluster) -> None:
    bundle = tvm_split.compile(model, on_three(model, three_workers, {"machine-b": 0.67, "machine-c": 0.33}))
    assert bundle.verified == "yes"
    torch.manual_seed(0)
    network = Skip().eval()
    batches = [INPUT + index for index in range(20)]
    with tvm_split.deploy(bundle, three_workers) as deployment:
        for batch, (output,) in zip(batches, deployment.stream((b,) for b in batches), strict=True):
            with torch.no_grad():
                np.testing.assert_allclose(output, network(batch).numpy(), rtol=1e-5, atol=1e-5)
        executions = [(stage.name, stage.machine, stage.micro_batches) for stage in deployment.stats().stages]
    assert executions == [
        ("stage_0", "machine-a", 20),
        ("stage_1", "machine-b", 13),
        ("stage_1", "machine-c", 7),
        ("stage_2", "machine-a", 20),
        ("stage_3", "machine-c", 20),
    ]


def test_replicas_for_one_target_share_library_and_weights(model: tvm_split.Model, tmp_path: Path) -> None:
    cluster = tvm_split.Cluster.local(3)
    bundle = tvm_split.compile(model, on_three(model, cluster, {"machine-b": 1.0, "machine-c": 1.0}))
    first, second = bundle.program.replicas["stage_1"]
    assert (first.library, first.weights) == (second.library, second.weights)
    assert (first.replica_schedule, second.replica_schedule, first.replica, second.replica) == ((0, 1), (0, 1), 0, 1)
    bundle.save(tmp_path)
    assert tvm_split.Bundle.load(tmp_path) == bundle


@pytest.fixture(scope="module")
def for_two_targets(model: tvm_split.Model) -> Plan:
    quickly_compiled = {**host_target(1), "opt-level": 0}  # other code than the default's, which runs here too
    machines = (Machine("machine-a"), Machine("machine-b"), Machine("machine-c", target=quickly_compiled))
    split = {"machine-a": ["first"], "machine-b": ["middle"], "machine-c": ["last"]}
    planned = tvm_split.plan(model, tvm_split.Cluster(machines, launcher=Local()), split=split)
    return with_replicas(planned, 1, {"machine-b": 1.0, "machine-c": 1.0})


def test_replicas_for_two_targets_are_two_libraries(model: tvm_split.Model, for_two_targets: Plan) -> None:
    bundle = tvm_split.compile(model, for_two_targets)
    assert bundle.verified == "yes"
    first, second = bundle.program.replicas["stage_1"]
    assert first.library != second.library
    assert set(bundle.kernels) == {"stage_0", "stage_1", "stage_1 on machine-c", "stage_2"}
    alone = one_by_one(bundle.program)
    assert [[(s.machine, s.replica, s.replica_schedule) for s in program.stages][1] for program in alone] == [
        ("machine-b", 0, (0,)),
        ("machine-c", 0, (0,)),
    ]


def test_a_second_replica_that_computes_something_else_is_found(model: tvm_split.Model, for_two_targets: Plan) -> None:
    bundle = tvm_split.compile(model, for_two_targets, verify=False)
    stages = list(bundle.program.stages)
    position = stages.index(bundle.program.replicas["stage_1"][1])
    weight = stages[position].weights[0]
    zeros = tvm.runtime.tensor(np.zeros(weight.tensor.shape, weight.tensor.dtype))
    wrong = bundle.blobs.add_weight(weight.tensor.name, zeros)
    stages[position] = replace(stages[position], weights=(wrong, *stages[position].weights[1:]))
    tampered = replace(bundle, program=replace(bundle.program, stages=tuple(stages)))
    cut = partition(model, for_two_targets)
    with pytest.raises(tvm_split.VerificationError, match=r"\(with stage_1 of machine-c\)"):
        verify_bundle(model, for_two_targets, tampered, lambda: cut)
