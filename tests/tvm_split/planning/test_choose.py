"""Which solution is chosen: without machines that gain too little, and of whole or sharded layers."""

import dataclasses

import pytest

from rpc_runtime.program.routes import CLIENT
from tests.helpers.placement.profiles import A, B, chain_problem, chain_profile
from tests.helpers.placement.steps import evaluate_stages, step
from tvm_split.placement.problem import Sharding, Stage
from tvm_split.placement.search import solve
from tvm_split.placement.solution import STAGE_SECONDS, Solution, solution_of
from tvm_split.placement.step_graph import StepGraph, Transfer
from tvm_split.planning.choose import MARGIN, choose, with_fewest_machines


def test_a_gain_that_no_measurement_shows_is_not_worth_a_machine():
    problem = chain_problem(chain_profile({A: [0.1, 0.001], B: [0.1, 0.001]}))
    best = solve(problem)
    assert sum(len(stage.machines) for stage in best.stages) == 2
    solution = with_fewest_machines(problem, best)
    assert len(solution.stages) == 1
    assert solution.evaluation == evaluate_stages(problem, solution.stages)
    assert solution.lower_bound_seconds == best.lower_bound_seconds
    assert solution.gap == pytest.approx(1 - best.lower_bound_seconds / solution.evaluation.period_seconds)
    assert 0 < solution.gap < MARGIN
    assert "2 machines" in solution.why_no_more_machines
    assert best.stages in [alternative.stages for alternative in solution.alternatives]


def test_a_small_gain_is_not_worth_a_much_larger_latency():
    times = {A: [0.01, 0.001], B: [0.01, 0.001]}
    near, far = (chain_problem(chain_profile(times, latency_seconds=latency)) for latency in (1e-5, 0.02))
    assert len(with_fewest_machines(near, solve(near)).stages) == 2
    far = dataclasses.replace(far, links=tuple(
        dataclasses.replace(link, latency_seconds=1e-5 if CLIENT in (link.source, link.destination) else 0.02)
        for link in far.links
    ))  # fmt: skip
    solution = with_fewest_machines(far, solve(far))
    assert len(solution.stages) == 1
    assert "latency" in solution.why_no_more_machines


@pytest.mark.parametrize(
    ("seconds", "latency_seconds", "demands"),
    [
        ([0.1, 0.01], 1e-4, {}),  # a gain
        ([0.1, 0.001], 1e-4, {"stages": 2}),  # a requested number of stages
        ([0.1, 0.001], 1e-4, {"minimum_throughput": 1 / 0.1005}),  # a demand
        ([0.001, 0.001], 0.05, {}),  # a large gain, whatever the latency
    ],
)
def test_what_keeps_all_machines(seconds, latency_seconds, demands):
    problem = chain_problem(chain_profile({A: seconds, B: seconds}, latency_seconds=latency_seconds), **demands)
    best = solve(problem)
    assert len(best.stages) == 2
    assert with_fewest_machines(problem, best) is best


PROBLEM = chain_problem(chain_profile({A: [0.01, 0.01], B: [0.01, 0.01]}), "latency")
WHOLE = dataclasses.replace(solution_of(PROBLEM, [Stage((A,), ("layer_0", "layer_1"))], 0.018), method="searched")


def sharded(seconds: float, axis: str = "rows") -> Solution:
    """A solution in which both machines compute one stage together, in so many seconds, without transfers."""
    stage = Stage((A, B), ("layer_0", "layer_1"), (0.5, 0.5), sharding=Sharding(axis, "fused"))
    return solution_of(PROBLEM, (stage,), graph=StepGraph((step("a", A, seconds), step("b", B, seconds)), ()))


def test_a_sharded_plan_that_gains_is_chosen_and_the_others_are_listed() -> None:
    better, other = sharded(0.011), sharded(0.012, "channels")
    chosen = choose(WHOLE, [other, better], 0.01, "sharded plans searched", ["the time limit ended the search"])
    assert chosen.stages == better.stages
    assert chosen.lower_bound_seconds == pytest.approx(0.01)
    assert [plan.stages for plan in chosen.alternatives] == [other.stages, WHOLE.stages]
    assert all("this one 11 ms" in plan.why for plan in chosen.alternatives)
    assert chosen.alternatives[0].name == f"channels (fused) sharded over {A} and {B}"
    assert chosen.method.startswith("sharded plans searched")
    assert chosen.method.endswith("the time limit ended the search")


@pytest.mark.parametrize(
    ("candidates", "relaxed_seconds", "reason"),
    [
        ([sharded(0.0199)], 0.01, "a split inside layers gains too little"),
        ([sharded(0.03)], 0.01, "no split inside layers pays"),
        ([], 0.01, "no better split inside layers was found"),
        ([], WHOLE.value_seconds, "no split inside layers can pay"),
    ],
)
def test_why_the_plan_of_whole_layers_stays(candidates, relaxed_seconds, reason) -> None:
    chosen = choose(WHOLE, candidates, relaxed_seconds)
    assert chosen.stages == WHOLE.stages
    assert reason in chosen.why_no_more_machines
    assert chosen.lower_bound_seconds == min(WHOLE.lower_bound_seconds, relaxed_seconds)
    assert [plan.stages for plan in chosen.alternatives] == [plan.stages for plan in candidates]


def test_without_a_plan_of_whole_layers_a_sharded_one_is_chosen() -> None:
    assert choose(None, [sharded(0.03), sharded(0.02)], 0.01).value_seconds == pytest.approx(0.02)


def test_a_bound_that_a_plan_refutes_is_no_bound() -> None:
    measured = sharded(0.02)
    assert measured.bounded(0.015).lower_bound_seconds == 0.015
    assert measured.bounded(0.02 * (1 + 1e-9)).lower_bound_seconds == measured.value_seconds
    assert measured.bounded(0.03).lower_bound_seconds == 0


def test_each_hand_over_counts() -> None:
    """Two steps on each machine, with an exchange in between, take as long as one but for the hand-over."""
    steps = [step(f"{machine}{number}", machine, 0.0055) for number in (0, 1) for machine in (A, B)]
    exchange = (Transfer("x", f"{A}0", (f"{B}1",), 0.0), Transfer("y", f"{B}0", (f"{A}1",), 0.0))
    stages = sharded(1.0).stages
    handing_over = solution_of(PROBLEM, stages, graph=StepGraph(tuple(steps), exchange))
    assert handing_over.compared_seconds == pytest.approx(handing_over.value_seconds + STAGE_SECONDS)
    assert sharded(0.01).compared_seconds == sharded(0.01).value_seconds
