"""Scenarios of plans: what is simulated is what was predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.planner.profiles import A, B, C, chain_problem, chain_profile, planned
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import PlanError
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Stage
from tvm_split.planner.profile import StreamingCost
from tvm_split.planner.search import evaluate
from tvm_split.simulation.of_plans import scenario_of_plan, scenario_of_problem, with_measured_compute
from tvm_split.simulation.scenario import MachineTimes, Scenario
from tvm_split.simulation.simulate import Simulation, simulate

SECONDS = st.floats(1e-3, 0.1)


def told(scenario: Scenario) -> tuple[float | None, float | None]:
    """Period, and the latency of one alone."""
    found: Simulation = simulate(scenario, micro_batches=100)
    return found.period_seconds, None if found.single is None else found.single.mean_seconds


@settings(max_examples=25)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=5), st.floats(1e5, 1e9), st.floats(1.0, 1.5))
def test_a_plan_is_simulated_as_it_is_predicted(
    seconds: list[tuple[float, float]], bandwidth: float, contention: float
) -> None:
    times = {A: [each[0] for each in seconds], B: [each[1] for each in seconds]}
    profile = chain_profile(times, bytes_per_second=bandwidth, contention=contention, latency_seconds=1e-5)
    plan = planned(profile)
    assert plan.prediction is not None
    period, latency = told(scenario_of_plan(plan))
    assert period == pytest.approx(plan.prediction.period_seconds, rel=1e-6)
    assert latency == pytest.approx(plan.prediction.latency_seconds, rel=1e-6)


def test_plans_and_problems_say_the_same_of_replicas_that_share_cores_with_the_client() -> None:
    profile = chain_profile({A: [0.02, 0.01], B: [0.02, 0.01], C: [0.02, 0.01]}, latency_seconds=1e-4)
    streaming = StreamingCost(0.001, 0.0, 1.0, 0.001, 1.0)
    profile = replace(
        profile,
        machines=tuple(replace(each, streaming=streaming) for each in profile.machines),
        shared_cores=(SharedCores((A, B, C, "client"), 2),),
    )
    stages = (Stage((A, B), ("layer_0",), (0.5, 0.5)), Stage((C,), ("layer_1",)))
    plan, problem = planned(profile, stages), chain_problem(profile)
    assert plan.prediction is not None
    of_plan, of_problem = scenario_of_plan(plan), scenario_of_problem(problem, stages)
    assert of_plan.client_seconds == pytest.approx(of_problem.client_seconds) == pytest.approx(0.002)
    assert of_plan.shared_cores == of_problem.shared_cores == profile.shared_cores
    assert told(of_plan) == pytest.approx(told(of_problem), rel=1e-6)
    period, least = told(of_plan)[0], evaluate(problem, stages).period_seconds
    assert period is not None
    assert least <= period < 1.1 * least  # now and then a core has nothing to do


def test_what_was_measured_takes_the_place_of_what_was_predicted() -> None:
    plan = planned(chain_profile({A: [0.02, 0.01], B: [0.02, 0.01]}), maximum_machines=2, stages=2)
    scenario = scenario_of_plan(plan)
    first, stage = plan.stages[0].machine, plan.stages[0].name
    slower = with_measured_compute(scenario, {first: 0.05})
    before, measured = scenario.machines[first].stages[stage], slower.machines[first].stages[stage]
    assert measured.stream_seconds == pytest.approx(0.05)
    assert measured.single_seconds == pytest.approx(before.single_seconds * 0.05 / before.stream_seconds)
    assert told(slower)[0] == pytest.approx(0.05, rel=1e-6)
    costly = replace(before, stream_seconds=before.stream_seconds + 0.004, transfer_seconds=0.004)
    machines = {**scenario.machines, first: MachineTimes({stage: costly})}
    busy = with_measured_compute(replace(scenario, machines=machines), {first: 0.05}).machines[first].stages[stage]
    assert busy.stream_seconds == pytest.approx(0.054)
    assert busy.single_seconds == pytest.approx(measured.single_seconds)
    with pytest.raises(PlanError, match="'lamp' was measured, and the plan does not use it"):
        with_measured_compute(scenario, {"lamp": 1.0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda p: p["machines"][0].update(machine="lamp"),
            "it names 'lamp', and the plan's machines are machine-a, mac",
        ),
        (lambda p: p["links"][0].update(destination="lamp"), "it names 'lamp', and the plan's machines are machine-a"),
        (
            lambda p: p["links"][1].update(source=p["links"][1]["destination"], destination=p["links"][1]["source"]),
            "machine-[ab] sends to machine-[ab], whose stage does not follow; make the plan anew",
        ),
        (lambda p: p["machines"].pop(), "it says nothing of 'machine-b'; make the plan anew"),
    ],
)
def test_a_prediction_of_other_machines_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    content = planned(chain_profile({A: [0.02, 0.01], B: [0.02, 0.01]}), stages=2).to_dict()
    content = json.loads(json.dumps(content))
    change(content["prediction"])
    with pytest.raises(PlanError, match=f"prediction does not fit together: {words}"):
        scenario_of_plan(Plan.from_dict(content))


def test_plans_of_which_nothing_is_known_are_refused() -> None:
    plan = planned(chain_profile({A: [0.02, 0.01], B: [0.02, 0.01]}), stages=2)
    with pytest.raises(PlanError, match="has no prediction"):
        scenario_of_plan(replace(plan, prediction=None))
