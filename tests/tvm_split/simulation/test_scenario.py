"""Scenarios of plans with sharded stages: drawn by hand, random, and compared with predictions."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rpc_runtime.program.events import COMPUTE
from rpc_runtime.program.routes import CLIENT
from tests.helpers.placement.profiles import A, B, C, chain_problem, chain_profile, planned as planned_best
from tests.helpers.placement.steps import random_graph, step
from tests.helpers.scenarios import busiest
from tvm_split.cluster.machine import SharedCores
from tvm_split.errors import PlanError
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.placement.prediction import CodedLink, predict
from tvm_split.placement.problem import Sharding, Stage
from tvm_split.placement.profile import StreamingCost
from tvm_split.placement.request import PlanRequest
from tvm_split.placement.solution import solution_of
from tvm_split.placement.step_graph import StepGraph, Transfer
from tvm_split.simulation.scenario import Scenario, scenario_of_plan, with_measured_compute
from tvm_split.simulation.simulate import Simulation, simulate

FREE = {"bytes_per_second": math.inf, "latency_seconds": 0.0}
JOINED = StepGraph(
    (step("a0", A, 2.0), step("b0", B, 3.0), step("a1", A, 1.0)),
    (
        Transfer("x_a", CLIENT, ("a0",), 50.0),
        Transfer("x_b", CLIENT, ("b0",), 50.0),
        Transfer("half_a", "a0", ("a1",), 100.0),
        Transfer("half_b", "b0", ("a1",), 100.0),
        Transfer("y", "a1", (), 50.0),
    ),
)
"""Two parts and one exchange: a concatenates b's result with its own."""


def planned(
    parts: StepGraph,
    *,
    transfer_seconds: float = 0.0,
    coded: dict[tuple[str, str], CodedLink] | None = None,
    **links: float,
) -> Plan:
    """A plan whose prediction has these parts."""
    profile = chain_profile({name: [1.0] for name in (A, B, C)}, **links)  # type: ignore[arg-type]
    streaming = StreamingCost(transfer_seconds, client_transfer_seconds=transfer_seconds)
    profile = replace(profile, machines=tuple(replace(machine, streaming=streaming) for machine in profile.machines))
    problem = chain_problem(profile, "latency")
    prediction = predict(problem, solution_of(problem, (), graph=parts), profile, coded)
    machines = tuple(PlannedMachine(name, {"kind": "llvm"}, 1) for name in (A, B, C))
    used = tuple(dict.fromkeys(part.machines[0] for part in parts.steps))
    sharding = Sharding("rows", "each") if len(used) > 1 else None
    stage = Stage(used, ("layer_0",), (1 / len(used),) * len(used), "stage", sharding)
    return Plan("net", "latency", "test", machines, (stage,), prediction, request=PlanRequest(objective="latency"))


def begins(simulation: Simulation, stage: str) -> list[float]:
    """The starts of a stage's micro-batches, in seconds."""
    events = [event for event in simulation.trace if (event.stage, event.kind) == (stage, COMPUTE)]
    return [event.start_nanoseconds * 1e-9 for event in events]


def test_one_exchange_in_a_stream() -> None:
    """The last stage in order has priority; a machine that waits for the other begins the next micro-batch.

    second    0   1   2   3   4   5   6   7   8   9
    a         a0══════a0══════a1══a0══════a1══a0═══
    b         b0══════════b0══════════b0══════════
    """
    simulation = simulate(scenario_of_plan(planned(JOINED, **FREE)))
    assert begins(simulation, "a0")[:4] == pytest.approx([0.0, 2.0, 5.0, 8.0])
    assert begins(simulation, "a1")[:3] == pytest.approx([4.0, 7.0, 10.0])
    assert begins(simulation, "b0")[:4] == pytest.approx([0.0, 3.0, 6.0, 9.0])
    assert simulation.period_seconds == pytest.approx(3.0)
    assert {machine.machine: machine.compute_share for machine in simulation.machines} == pytest.approx(
        {A: 1.0, B: 1.0}
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([math.inf, 300.0]), st.sampled_from([0.0, 0.013]))
def test_one_input_takes_what_is_predicted(seed: int, bytes_per_second: float, latency: float) -> None:
    plan = planned(random_graph(seed), bytes_per_second=bytes_per_second, latency_seconds=latency)
    assert plan.prediction is not None
    simulation = simulate(scenario_of_plan(plan), micro_batches=2)
    assert simulation.single is not None
    assert simulation.single.mean_seconds == pytest.approx(plan.prediction.latency_seconds, rel=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.02]))
def test_parts_are_what_their_machine_does(seed: int, transfer_seconds: float) -> None:
    plan = planned(random_graph(seed), transfer_seconds=transfer_seconds, bytes_per_second=300.0)
    prediction = plan.prediction
    assert prediction is not None
    for machine in prediction.machines:
        steps = [predicted for predicted in prediction.steps if predicted.machines == (machine.machine,)]
        for field in ("compute_seconds", "alone_seconds", "transfer_seconds"):
            whole = math.fsum(getattr(predicted, field)[0] for predicted in steps)
            assert whole == pytest.approx(getattr(machine, field), abs=1e-12)
    assert busiest(scenario_of_plan(plan)) <= prediction.period_seconds * (1 + 1e-9)


def test_codecs_shorten_what_crosses_and_nothing_else() -> None:
    half = {(B, A): CodedLink(0.5, 0.25)}
    links = {"bytes_per_second": 100.0, "latency_seconds": 0.5}
    plain, coded = (scenario_of_plan(planned(JOINED, coded=codecs, **links)) for codecs in (None, half))
    assert plain.links[B, A].wire_seconds == pytest.approx({"half_b": 1.0})
    assert coded.links[B, A].wire_seconds == pytest.approx({"half_b": 0.5})
    assert coded.links[CLIENT, A] == plain.links[CLIENT, A]
    assert coded.program == plain.program


def test_what_was_measured_of_a_machine_is_shared_out_over_its_parts() -> None:
    plan = planned(JOINED, transfer_seconds=0.1, **FREE)
    scenario = with_measured_compute(scenario_of_plan(plan), {A: 6.0})
    stages = scenario.machines[A].stages
    # Receiving the input and b's half, and sending the result, add to that.
    assert stages["a0"].stream_seconds == pytest.approx(4.0 + 0.1)
    assert stages["a1"].stream_seconds == pytest.approx(2.0 + 0.2)
    assert (stages["a0"].single_seconds, stages["a1"].single_seconds) == pytest.approx((4.0, 2.0))
    with pytest.raises(PlanError, match="'lamp' was measured, and the plan does not use it"):
        with_measured_compute(scenario, {"lamp": 1.0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["steps"][0].update(name="b0"), "two steps have the same name"),
        (lambda p: p["steps"][0].update(shares=[0.5, 0.5]), "step 'a0' has not one value for each of its machines"),
        (lambda p: p["transfers"][2].update(source="lamp"), "half_a goes from lamp to a1, which does not follow it"),
        (lambda p: p["transfers"][3].update(tensor="half_a"), "half_a is made by a0 and by b0"),
        (lambda p: p.update(links=[]), "nothing is predicted of the link from client to machine-a"),
        (lambda p: p.update(machines=[]), "nothing is predicted of machine 'machine-a'"),
    ],
)
def test_what_does_not_fit_together_is_named(change: Callable[[dict[str, Any]], None], words: str) -> None:
    content = json.loads(json.dumps(planned(JOINED).to_dict()))
    change(content["prediction"])
    with pytest.raises(PlanError, match=words):
        scenario_of_plan(Plan.from_dict(content))


@pytest.mark.parametrize(("transport", "shares"), [("shm", True), ("grpc", False), ("", False)])
def test_links_of_parts_lie_in_memory_as_those_of_stages(transport: str, shares: bool) -> None:
    plan = planned(JOINED)
    assert plan.prediction is not None
    links = tuple(replace(link, transport=transport) for link in plan.prediction.links)
    scenario = scenario_of_plan(replace(plan, prediction=replace(plan.prediction, links=links)))
    assert {link.shares_memory for link in scenario.links.values()} == {shares}


SECONDS = st.floats(1e-3, 0.1)


def period_and_latency(scenario: Scenario) -> tuple[float | None, float | None]:
    """The period, and the latency of a single micro-batch."""
    simulation: Simulation = simulate(scenario, micro_batches=100)
    return simulation.period_seconds, None if simulation.single is None else simulation.single.mean_seconds


@settings(max_examples=25)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=5), st.floats(1e5, 1e9), st.floats(1.0, 1.5))
def test_a_plan_is_simulated_as_it_is_predicted(
    seconds: list[tuple[float, float]], bandwidth: float, contention: float
) -> None:
    times = {A: [duration[0] for duration in seconds], B: [duration[1] for duration in seconds]}
    profile = chain_profile(times, bytes_per_second=bandwidth, contention=contention, latency_seconds=1e-5)
    plan = planned_best(profile)
    assert plan.prediction is not None
    period, latency = period_and_latency(scenario_of_plan(plan))
    assert period == pytest.approx(plan.prediction.period_seconds, rel=1e-6)
    assert latency == pytest.approx(plan.prediction.latency_seconds, rel=1e-6)


def test_replicas_that_share_cores_with_the_client() -> None:
    profile = chain_profile({A: [0.02, 0.01], B: [0.02, 0.01], C: [0.02, 0.01]}, latency_seconds=1e-4)
    streaming = StreamingCost(0.001, client_transfer_seconds=0.001)
    machines = tuple(replace(machine, streaming=streaming) for machine in profile.machines)
    profile = replace(profile, machines=machines, shared_cores=(SharedCores((A, B, C, "client"), 2),))
    plan = planned_best(profile, (Stage((A, B), ("layer_0",), (0.5, 0.5)), Stage((C,), ("layer_1",))))
    scenario = scenario_of_plan(plan)
    assert plan.prediction is not None
    assert scenario.client_seconds == pytest.approx(0.002)
    assert scenario.shared_cores == profile.shared_cores
    period, least = period_and_latency(scenario)[0], plan.prediction.period_seconds
    assert period is not None
    assert least <= period < 1.1 * least  # sometimes a core is idle


def test_plans_of_which_nothing_is_known_are_refused() -> None:
    plan = planned_best(chain_profile({A: [0.02, 0.01], B: [0.02, 0.01]}), stages=2)
    with pytest.raises(PlanError, match="has no prediction"):
        scenario_of_plan(replace(plan, prediction=None))
