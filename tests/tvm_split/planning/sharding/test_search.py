"""What the search of splits inside layers does with its time, with faults of rewrites, and with many exchanges."""

import math
import time

import pytest
import torch
from torch import nn

import tvm_split
from relay_passes.sharding.rule import Operation, Rule
from relay_passes.sharding.rules import RULES
from tvm_split.placement.plan import Plan
from tvm_split.placement.problem import Stage
from tvm_split.placement.request import PlanRequest
from tvm_split.placement.solution import STAGE_SECONDS
from tvm_split.planning.planner import Planner
from tvm_split.planning.sharding.attempts import Attempts
from tvm_split.planning.sharding.search import ShardSearch


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return tvm_split.load_model(nn.Sequential(*layers).eval(), (torch.zeros(1, 3, 32, 32),))


@pytest.fixture(scope="module")
def cluster() -> tvm_split.Cluster:
    return tvm_split.Cluster.in_process(machines=2, threads=1)


def no_measurements(stages: tuple[Stage, ...]) -> Plan:
    raise AssertionError(f"nothing is measured, but a plan of {stages} is asked for")


def test_the_search_ends_at_its_deadline(model: tvm_split.Model, cluster: tvm_split.Cluster) -> None:
    request = PlanRequest(objective="latency")
    planner = Planner(model, cluster, request)
    search = ShardSearch(model, planner.profile, planner.problem, request, no_measurements)
    assert search.candidates(math.inf)
    assert not search.attempts.was_late
    assert search.candidates(time.monotonic() - 1) == ()
    assert search.attempts.notes == ("the time limit ended the search of splits inside layers",)


def test_a_fault_of_a_rewrite_ends_no_planning(
    model: tvm_split.Model, cluster: tvm_split.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a rule that an extension has added: the plan names the region and the reason."""

    def faulty(operation: Operation) -> Rule:
        raise ZeroDivisionError("no groups")

    assert any(stage.sharding for stage in tvm_split.plan(model, cluster, objective="latency").stages)
    monkeypatch.setitem(RULES, "relax.nn.relu", faulty)
    plan = tvm_split.plan(model, cluster, objective="latency")
    assert plan.prediction is not None
    assert "'0' to '3' by rows (fused) could not be built (ZeroDivisionError: no groups)" in plan.prediction.method


def test_a_refusal_is_an_answer_but_a_fault_is_noted() -> None:
    attempts, stages = Attempts(), (Stage(("a", "b"), ("first", "last"), (0.5, 0.5)),)

    def refused() -> None:
        raise tvm_split.PlanError("too few channels")

    assert attempts.built(stages, refused, may_refuse=True) is None
    assert attempts.notes == ()
    assert attempts.built(stages, refused) is None
    assert len(attempts.notes) == 1
    assert attempts.built(stages, lambda: 3) == 3


def test_a_plan_is_worth_its_exchanges(cluster: tvm_split.Cluster) -> None:
    """Forty products of little work, over links that cost nothing: each exchange would still take a hand-over."""
    torch.manual_seed(0)
    layers = [layer for _ in range(20) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = tvm_split.load_model(nn.Sequential(*layers).eval(), (torch.zeros(1, 256),))
    prediction = tvm_split.plan(model, cluster, objective="latency").prediction
    assert prediction is not None
    steps = max(sum(machine in step.machines for step in prediction.steps) for machine in cluster.machine_names)
    alone = min(baseline.latency_seconds for baseline in prediction.baselines)
    assert prediction.latency_seconds + STAGE_SECONDS * (steps - 1) <= alone * (1 + 1e-9)
