"""Strategies: plans of built-in and other strategies are validated; a plan that breaks a demand is refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.placement.oracle import judge
from tests.helpers.placement.problems import random_problem
from tests.helpers.placement.profiles import A, B, chain_problem, chain_profile
from tests.helpers.toy import toy_plugin_installed
from tvm_split.errors import PlanError
from tvm_split.placement.strategy import STRATEGIES, solve_by

PROFILE = chain_profile({A: [0.01, 0.02], B: [0.01, 0.02]})


@settings(max_examples=30)
@given(st.sampled_from(["best", "first-fit"]), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_a_plan_keeps_to_what_is_demanded(name: str, seed: int, chain: bool, replicas: bool) -> None:
    problem = random_problem(seed, pieces=5, machines=3, chain=chain, replicas=replicas)
    try:
        solution = solve_by(name, problem, 1.0)
    except PlanError:
        return
    judged = judge(problem, [(stage.machines, list(stage.layers)) for stage in solution.stages])
    assert judged is not None
    if all(len(stage.machines) == 1 for stage in solution.stages):
        evaluation = solution.evaluation
        assert judged == pytest.approx((evaluation.period_seconds, evaluation.latency_seconds), rel=1e-9, abs=1e-15)


def test_a_package_adds_a_strategy() -> None:
    with toy_plugin_installed():
        assert "toy" in STRATEGIES
        solution = solve_by("toy", chain_problem(PROFILE), 1.0)
        assert [stage.machines for stage in solution.stages] == [(A,)]
        assert solution.method == "found by strategy 'toy'"
        assert solution.evaluation.period_seconds == pytest.approx(0.03)  # not what the strategy reports


def test_a_strategy_cannot_misreport_its_plan() -> None:
    with toy_plugin_installed(), pytest.raises(PlanError, match="plan of strategy 'toy' cannot be used: its period is"):
        solve_by("toy", replace(chain_problem(PROFILE), maximum_period_seconds=0.02), 1.0)


def test_a_name_that_is_no_strategy() -> None:
    with pytest.raises(PlanError, match="no strategy 'luck'; there are: best, first-fit"):
        solve_by("luck", chain_problem(PROFILE), 1.0)
