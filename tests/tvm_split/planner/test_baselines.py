"""Plans by simple rules, and plans without the machines that gain too little."""

import dataclasses
import itertools

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.program.routes import CLIENT
from tests.helpers.planner.layer_graphs import graph
from tests.helpers.planner.profiles import A, B, chain_problem, chain_profile, graph_of
from tests.helpers.planner.steps import evaluate_stages
from tvm_split.cluster.machine import Machine
from tvm_split.errors import PlanError
from tvm_split.planner.baselines import (
    EQUAL_LAYERS,
    EQUAL_PARAMETERS,
    MARGIN,
    ONE_MACHINE,
    baseline_stages,
    one_machine_advice,
    proportional_cuts,
    stages_of_equal_cost,
    with_fewest_machines,
)
from tvm_split.planner.build_problem import stages_of_layers
from tvm_split.planner.plan import Plan
from tvm_split.planner.predict import predict_solution
from tvm_split.planner.search import solve


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=12).flatmap(
        lambda weights: st.tuples(st.just(weights), st.lists(st.floats(0.01, 100), min_size=1, max_size=len(weights)))
    )
)
def test_every_part_gets_something(case):
    weights, shares = case
    cuts = proportional_cuts(weights, shares)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(weights), len(shares) + 1)
    assert all(start < end for start, end in itertools.pairwise(cuts))


def placed(stages):
    return [(stage.machines, len(stage.layers)) for stage in stages]


def test_the_usual_ways():
    profile = chain_profile({A: [0.001] * 4, B: [0.001] * 4})
    problem = chain_problem(profile)
    layers = {"layer_0": 1, "layer_1": 1, "layer_2": 1, "layer_3": 3}
    baselines = baseline_stages(problem, layers)
    assert placed(baselines[f"{ONE_MACHINE}, {A}"]) == [((A,), 4)]
    assert placed(baselines[f"{ONE_MACHINE}, {B}"]) == [((B,), 4)]
    assert placed(baselines[EQUAL_LAYERS]) == [((A,), 3), ((B,), 1)]
    assert placed(baselines[EQUAL_PARAMETERS]) == [((A,), 2), ((B,), 2)]


@pytest.mark.parametrize("seconds", [{A: [0.001] * 3}, {A: [0.001], B: [0.001]}])
def test_where_nothing_can_be_split(seconds):
    problem = chain_problem(chain_profile(seconds))
    baselines = baseline_stages(problem, {piece.name: 1 for piece in problem.pieces})
    assert list(baselines) == [f"{ONE_MACHINE}, {machine}" for machine in seconds]


def chain(count: int, independent: tuple[str, ...] = ()):
    names = [f"layer{index}" for index in range(count)]
    return graph({name: names[index - 1 : index] if index else [] for index, name in enumerate(names)}, independent)


def test_a_table_makes_no_stage_of_its_own() -> None:
    layers = chain(3, independent=("layer0",))
    stages = stages_of_equal_cost(layers, {"layer0": 9.0, "layer1": 1.0, "layer2": 1.0}, [Machine("a"), Machine("b")])
    assert [stage.layers for stage in stages] == [("layer0", "layer1"), ("layer2",)]


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match=r"4 stages were asked for, but the model can be cut into 3 at most"):
        stages_of_equal_cost(chain(3), dict.fromkeys(["layer0", "layer1", "layer2"], 1.0), [*map(Machine, "abcd")])


def test_a_gain_that_no_measurement_shows_is_with_fewest_machines():
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


EQUAL = {A: [0.002] * 4, B: [0.002] * 4}
SLOW = {A: [0.001] * 4, B: [0.1] * 4}


def plan_of(profile, objective="throughput", memory=None, choose=lambda problem, solution: solution, **constraints):
    problem = chain_problem(profile, objective, memory, **constraints)
    solution = choose(problem, solve(problem))
    stages = stages_of_layers(graph_of(profile), profile, solution.stages)
    return Plan("net", objective, "measured", (), stages, predict_solution(problem, profile, solution))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plan_of(chain_profile(EQUAL)), None),
        (lambda: plan_of(chain_profile(EQUAL), maximum_machines=1), None),
        (lambda: plan_of(chain_profile({A: [0.002]})), None),
        (lambda: dataclasses.replace(plan_of(chain_profile(EQUAL), maximum_machines=1), prediction=None), None),
        (lambda: plan_of(chain_profile(EQUAL, bytes_per_second=5e4)), "no split is faster than one machine alone"),
        (lambda: plan_of(chain_profile(EQUAL), "latency"), "machine-a alone does 8.202 ms"),
        (
            lambda: plan_of(chain_profile({A: [0.1, 0.001], B: [0.1, 0.001]}), choose=with_fewest_machines),
            "more machines gain too little: machine-a alone does 9.9",
        ),
        (lambda: plan_of(chain_profile(SLOW), stages=2), "one machine alone would be faster: machine-a does 250 "),
        # Its memory is too small for the whole network.
        (lambda: plan_of(chain_profile(SLOW, weight_bytes=1_000_000), memory={A: 3_500_000, B: 3_500_000}), None),
    ],
)
def test_advice_where_one_machine_is_better(make, words):
    advice = one_machine_advice(make(), 2)
    assert advice is None if words is None else words in advice
