"""Plans from models and clusters: measured on worker processes, estimated, by hand; and improved by measurements."""

import dataclasses

import numpy as np
import psutil
import pytest
import torch

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.models.small_onnx_model import small_model
from tvm_split.cluster.machine import Link, Machine, SharedCores
from tvm_split.errors import OneMachineWarning, PlanError
from tvm_split.launchers.local import Local
from tvm_split.placement.corrections import Measured, calibrated
from tvm_split.placement.estimate import estimated_profile
from tvm_split.placement.profile import Corrections
from tvm_split.placement.request import PlanRequest
from tvm_split.planning.planner import Planner
from tvm_split.planning.replan import replan
from tvm_split.reached_workers import reached_workers
from tvm_split.simulation.scenario import scenario_of_plan
from tvm_split.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("busy_machine")
A, B = "machine-a", "machine-b"


@pytest.fixture(scope="module")
def model():
    return tvm_split.load_model(small_model())


@pytest.fixture(scope="module")
def wide():
    """Four layers of 67 million operations each, with narrow tensors between them: worth two machines."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).eval()
    return tvm_split.load_model(network, (torch.zeros(128, 512),))


def layers_on(plan):
    return {machine: stage.layers for stage in plan.stages for machine in stage.machines}


def layer_counts(plan):
    return {machine: len(layers) for machine, layers in layers_on(plan).items()}


def test_measured_on_workers_and_kept(model):
    steps = []
    plan = tvm_split.plan(model, tvm_split.Cluster.local(workers=2), on_progress=lambda *step: steps.append(step[0]))
    assert plan.origin == "measured"
    prediction = plan.prediction
    assert prediction.lower_bound_seconds <= prediction.period_seconds * (1 + 1e-9)
    assert {machine.estimated_share for machine in prediction.machines} == {0.0}
    assert [baseline.name for baseline in prediction.baselines if baseline.name.startswith("one machine")]
    assert prediction.profiled_at > 0
    assert steps[-1] == "searching for the best plan"
    again = tvm_split.plan(model, tvm_split.Cluster.local(workers=2))
    assert again.prediction.profiled_at == prediction.profiled_at
    assert again.prediction.machines[0].compute_seconds == prediction.machines[0].compute_seconds


def test_estimates_start_nothing(model):
    before = set(psutil.Process().children(recursive=True))
    plan = tvm_split.plan(model, tvm_split.Cluster.local(workers=2), estimate=True)
    assert plan.origin == "estimated"
    assert {machine.estimated_share for machine in plan.prediction.machines} == {1.0}
    assert plan.prediction.profiled_at == 0
    assert set(psutil.Process().children(recursive=True)) <= before


def test_workers_are_asked_once(model):
    """A plan needs no further answer of workers that have answered, here because they have ended."""
    with LocalWorkers([A, B]) as workers:
        machines = tuple(Machine(name, endpoint=endpoint) for name, endpoint in workers.endpoints.items())
        cluster, request = tvm_split.Cluster(machines), PlanRequest(split={B: ["conv_1"]})
        described = reached_workers(cluster, request)
    plan = tvm_split.plan(model, cluster, request=request, described=described)
    assert plan.machine(B).target["kind"] == "llvm"
    with pytest.raises(WorkerUnavailableError):
        tvm_split.plan(model, cluster, request=request)


def enough(*machines):
    """Return shared cores that are enough, however few this host has."""
    return (SharedCores((*machines, "client"), 8),)


def test_cores_that_are_shared_are_counted(wide):
    machines = Machine(A), Machine(B)
    one_core = tvm_split.Cluster(machines, shared_cores=(SharedCores((A, B, "client"), 1),), launcher=Local())
    assert len(tvm_split.plan(wide, one_core, estimate=True).stages) == 1
    forced = tvm_split.plan(wide, one_core, estimate=True, stages=2).prediction
    assert forced.limiting == "computing on the one core that machine-a, machine-b and the client share"
    assert forced.period_seconds == pytest.approx(sum(machine.compute_seconds for machine in forced.machines))
    two_cores = tvm_split.Cluster(machines, shared_cores=enough(A, B), launcher=Local())
    assert (
        tvm_split.plan(wide, two_cores, estimate=True, stages=2).prediction.period_seconds < 0.6 * forced.period_seconds
    )


def test_estimates_of_what_is_worth_two_machines(wide):
    plan = tvm_split.plan(wide, tvm_split.Cluster.local(workers=2), estimate=True)
    assert layers_on(plan) == {A: ("0", "1"), B: ("2", "3")}
    assert plan.prediction.links[1].bytes == 128 * 512 * 4
    slow = (Link(A, B, 1e5, 0.01),)
    alone = tvm_split.plan(wide, tvm_split.Cluster((Machine(A), Machine(B)), slow, launcher=Local()), estimate=True)
    assert len(alone.stages) == 1
    unequal = tvm_split.Cluster(
        (Machine(A, threads=1), Machine(B, threads=2)), shared_cores=enough(A, B), launcher=Local()
    )
    assert layer_counts(tvm_split.plan(wide, unequal, estimate=True)) == {A: 1, B: 3}


def test_who_takes_the_stages_of_a_lost_machine(wide, tmp_path):
    machines = Machine(A), Machine(B), Machine("desk", threads=4, standby=True)
    cluster = tvm_split.Cluster(machines, shared_cores=enough(A, B), launcher=Local())
    plan = tvm_split.plan(wide, cluster, estimate=True, fallback=True)
    assert [(one.machine, one.destination) for one in plan.prediction.fallbacks] == [(A, B), (B, A)]
    alone = tvm_split.plan(wide, cluster, estimate=True, maximum_machines=1).prediction
    assert [one.period_seconds for one in plan.prediction.fallbacks] == pytest.approx([alone.period_seconds] * 2)
    assert "Without machine-b: stage_1 → machine-a, " in str(plan)
    plan.save(tmp_path / "plan.json")
    assert tvm_split.Plan.load(tmp_path / "plan.json") == plan
    renamed = plan.renamed({A: "box"}).prediction.fallbacks
    assert [(one.machine, one.destination) for one in renamed] == [("box", B), (B, "box")]
    kept_off = tvm_split.plan(wide, cluster, estimate=True, fallback=True, keep_off={"3": A}, stages=2)
    assert [one.destination for one in kept_off.prediction.fallbacks] == [B, ""]
    assert "Without machine-b: stage_1 fit on no other machine" in str(kept_off)
    by_hand = {"split": {A: ["0", "1"], B: ["2", "3"]}, "estimate": True, "fallback": True}
    assert tvm_split.plan(wide, cluster, **by_hand, predict=True).prediction.fallbacks == plan.prediction.fallbacks
    with pytest.raises(PlanError, match=r"fallback: .*predict"):
        tvm_split.plan(wide, cluster, **by_hand)


def test_a_closed_link_is_not_used(wide):
    closed = (Link(A, B, 0.0, 0.0),)
    cluster = tvm_split.Cluster((Machine(A), Machine(B)), closed, launcher=Local())
    assert len(tvm_split.plan(wide, cluster, estimate=True).stages) == 1
    with pytest.raises(PlanError, match="link"):
        tvm_split.plan(wide, cluster, estimate=True, stages=2)


def test_in_process_nothing_is_measured(wide):
    plan = tvm_split.plan(wide, tvm_split.Cluster.in_process(machines=2, threads=1))
    assert plan.origin == "estimated"
    assert plan.prediction.links[0].seconds == 0
    assert tvm_split.plan(wide, tvm_split.Cluster.in_process()).prediction is None


def test_pins(wide):
    cluster = tvm_split.Cluster.local(workers=2)
    pinned = tvm_split.plan(wide, cluster, estimate=True, pin={"0": B})
    assert "0" in layers_on(pinned)[B]
    off = tvm_split.plan(wide, cluster, estimate=True, keep_off={"0": [A], "3": A})
    assert {"0", "3"} <= set(layers_on(off)[B])
    nowhere = {"keep_off": {"1": [A, B]}}
    for demands, message in (
        (nowhere, "'1'"),
        ({"maximum_latency_seconds": 1e-6}, "latency"),
    ):
        with pytest.raises(PlanError, match=message):
            tvm_split.plan(wide, cluster, estimate=True, **demands)


def test_limits_and_counts(wide):
    cluster = tvm_split.Cluster.local(workers=3)
    assert len(tvm_split.plan(wide, cluster, estimate=True, maximum_machines=1).stages) == 1
    assert len(tvm_split.plan(wide, cluster, estimate=True, stages=3).stages) == 3
    going_round = tvm_split.plan(wide, tvm_split.Cluster.local(workers=2), stages=4)
    assert [stage.machine for stage in going_round.stages] == [A, B, A, B]
    assert going_round.prediction is None


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        ({"pin": {"0": "machine-z"}}, "layer '0' is to be pinned to machine 'machine-z'; the cluster has machine-a"),
        (
            {"keep_off": {"0": "machine-z"}},
            "layer '0' is to be kept off machine 'machine-z'; the cluster has machine-a",
        ),
        ({"keep_off": {"99": A}}, "kept off machine 'machine-a': .* the model does not have; near it are"),
    ],
)
def test_pins_that_cannot_be_meant_are_refused_before_any_worker_is_asked(wide, demand, message):
    nobody = tvm_split.Cluster((Machine(A, endpoint=WorkerEndpoint(A, "127.0.0.1:9")),))
    with pytest.raises(PlanError, match=message):
        tvm_split.plan(wide, nobody, **demand)


@pytest.mark.parametrize("call", [tvm_split.plan, lambda *what: tvm_split.compile_and_deploy(what[0], None, what[1])])
def test_a_dead_worker_is_told_before_a_file_is_imported(call):
    nobody = tvm_split.Cluster((Machine(A, endpoint=WorkerEndpoint(A, "127.0.0.1:9")),))
    with pytest.raises(tvm_split.WorkerUnavailableError, match=r"127\.0\.0\.1:9 cannot be reached"):
        call("missing.onnx", nobody)


def test_demands_are_never_dropped(model):
    two_workers, one_worker = tvm_split.Cluster.local(workers=2), tvm_split.Cluster.local(workers=1)
    with pytest.raises(PlanError, match="by hand leaves nothing to search"):
        tvm_split.plan(model, two_workers, split={A: ["conv_1"]}, pin={"dense": B})
    with pytest.raises(PlanError, match="3 stages on 2 machines: machines get several stages"):
        tvm_split.plan(model, two_workers, stages=3, maximum_latency_seconds=1.0)
    with pytest.raises(PlanError, match="machine-b"):
        tvm_split.plan(model, one_worker, estimate=True, pin={"dense": B})
    with pytest.raises(PlanError, match="'size'"):
        tvm_split.plan(model, two_workers, objective="size")
    with pytest.raises(PlanError, match="no strategy 'nope'"):  # though one machine leaves nothing to search
        tvm_split.plan(model, one_worker, strategy="nope", estimate=True)


def test_a_split_by_hand_is_predicted_though_the_search_has_no_such_plans(wide):
    """Machines have several stages and send tensors to each other; the simulation agrees with the prediction."""
    cluster = tvm_split.Cluster.local(workers=2)
    profile = Planner(wide, cluster, PlanRequest(estimate=True)).profile
    once = tvm_split.plan(wide, cluster, split={A: ["0", "1"], B: ["2", "3"]}, profile=profile)
    twice = tvm_split.plan(wide, cluster, split={A: ["0", "2"], B: ["1", "3"]}, profile=profile)
    assert [step.stage for step in twice.prediction.steps] == [stage.name for stage in twice.stages]
    assert {machine.machine: machine.compute_seconds for machine in twice.prediction.machines} == pytest.approx(
        {machine.machine: machine.compute_seconds for machine in once.prediction.machines}, rel=0.2
    )
    assert twice.prediction.latency_seconds > once.prediction.latency_seconds
    assert twice.prediction.lower_bound_seconds <= twice.prediction.period_seconds
    better, change = replan(wide, cluster, twice, Measured({A: 1.0, B: 1.0}), request=PlanRequest(profile=profile))
    assert change.changed
    assert better.prediction.period_seconds < twice.prediction.period_seconds
    alone = simulate(scenario_of_plan(twice), micro_batches=2).single
    assert alone.mean_seconds == pytest.approx(twice.prediction.latency_seconds)


def test_replanning_asks_of_more_machines_what_planning_asks():
    """What was measured is what was predicted: the gain of a third machine, 2 %, is again not worth its latency."""
    network = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).eval()
    model = tvm_split.load_model(network, (torch.zeros(128, 512),))
    cluster = tvm_split.Cluster.in_process(machines=3, threads=1)
    profile = estimated_profile(model.description, cluster)
    slower = {"machine-a": 1.0, "machine-b": 1.7, "machine-c": 4.0}
    corrections = Corrections(
        tuple(slower.items()), tuple((link.source, link.destination, 1e9) for link in profile.links)
    )
    request = PlanRequest(profile=dataclasses.replace(calibrated(profile, corrections), shared_cores=()))
    plan = tvm_split.plan(model, cluster, request=request)
    assert len(plan.prediction.machines) == 2
    measured = Measured({machine.machine: 1.0 for machine in plan.prediction.machines})
    _, change = replan(model, cluster, plan, measured, threshold=0.01, request=request)
    assert not change.changed


def test_improved_by_what_happened(wide):
    cluster = tvm_split.Cluster.local(workers=2)
    profile = Planner(wide, cluster, PlanRequest(estimate=True)).profile
    current = tvm_split.plan(wide, cluster, profile=profile)
    slow = Measured({B: 3.0}, profiled_at=0.0)
    better, change = replan(wide, cluster, current, slow, request=PlanRequest(profile=profile))
    assert change.changed
    assert layer_counts(better) == {A: 3, B: 1}
    assert better.origin == "corrected by measurements"
    assert dict(better.prediction.corrections.compute_ratios) == {B: 3.0}
    same, change = replan(wide, cluster, better, slow, request=PlanRequest(profile=profile))
    assert not change.changed
    assert same.stages == better.stages
    as_predicted = Measured({A: 1.0, B: 1.0}, earlier=better.prediction.corrections, profiled_at=0.0)
    same, change = replan(wide, cluster, better, as_predicted, request=PlanRequest(profile=profile))
    assert not change.changed
    assert same.prediction.period_seconds == pytest.approx(better.prediction.period_seconds)


def test_the_precision_stays_that_of_the_plan(wide):
    cluster = tvm_split.Cluster.local(workers=2)
    half = tvm_split.plan(wide, cluster, precision="float16", estimate=True)
    slow = Measured({B: 3.0}, profiled_at=0.0)
    better, change = replan(wide, cluster, half, slow, request=PlanRequest(estimate=True))
    assert change.changed
    assert (half.precision, better.precision) == ("float16", "float16")


def test_what_cannot_be_improved(wide):
    cluster = tvm_split.Cluster.local(workers=2)
    profile = Planner(wide, cluster, PlanRequest(estimate=True)).profile
    current = tvm_split.plan(wide, cluster, profile=profile)
    with pytest.raises(PlanError, match="profiled again"):
        replan(wide, cluster, current, Measured({A: 2.0}, profiled_at=123.0), request=PlanRequest(profile=profile))
    lost = dataclasses.replace(current, stages=(dataclasses.replace(current.stages[0], layers=("0",)),))
    with pytest.raises(PlanError, match="cuts through layers"):
        replan(wide, cluster, lost, Measured({A: 2.0}), request=PlanRequest(profile=profile))
    for field, value in {"split": {A: ["0"]}, "shards": "0:rows:machine-a=0.5,machine-b=0.5"}.items():
        with pytest.raises(PlanError, match=f"{field}: .*tvm_split.plan"):
            replan(wide, cluster, current, Measured(), **{field: value})


def test_a_tiny_network_is_not_distributed():
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).eval()
    x = torch.randn(1, 16)
    with pytest.warns(OneMachineWarning, match=r"machine-[ab] .*does .* ms, .* ms"):
        deployment = tvm_split.compile_and_deploy(
            network, (x,), tvm_split.Cluster.local(workers=2), objective="latency", auto_shards=False
        )
    with deployment:
        assert len(deployment.stages) == 1
        (y,) = deployment.run(x)
    np.testing.assert_allclose(y, network(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimate", [False, True])
def test_a_network_that_computes_and_sends_nothing(estimate):
    nothing = tvm_split.load_model(torch.nn.Identity(), (torch.zeros(0, 2),))
    for cluster in (tvm_split.Cluster.in_process(2), tvm_split.Cluster.local(2)):
        prediction = tvm_split.plan(nothing, cluster, stages=1, estimate=estimate).prediction
        assert min(prediction.period_seconds, prediction.latency_seconds) > 0
        # A stream and a single input are measured separately.
        assert not estimate or prediction.period_seconds <= prediction.latency_seconds
        assert 0 <= prediction.gap <= 1
