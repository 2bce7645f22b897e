"""Which solution is chosen: without machines that gain too little, and of whole or sharded layers."""

import dataclasses

import pytest

from rpc_runtime.program.routes import CLIENT
from tests.helpers.placement.profiles import A, B, chain_problem, chain_profile
from tests.helpers.placement.steps import evaluate_stages
from tvm_split.placement.search import solve
from tvm_split.planning.choose import MARGIN, with_fewest_machines


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
