"""What a plan that was not searched for must keep to."""

import dataclasses

import pytest

from tests.helpers.planner.profiles import A, B, C, chain_problem, chain_profile
from tvm_split.planner.problem import Stage
from tvm_split.planner.search import candidate, evaluate, keeps_demands, possible_plans
from tvm_split.planner.search.instance import instance_of

PROFILE = chain_profile({A: [0.01, 0.02], B: [0.01, 0.02], C: [0.01, 0.02]})
STAGES = (Stage((A,), ("layer_0",)), Stage((B, C), ("layer_1",), (0.5, 0.5)))


@pytest.mark.parametrize(
    ("demands", "kept"),
    [
        ({}, True),
        ({"stages": 2, "maximum_machines": 3}, True),
        ({"stages": 1}, False),
        ({"maximum_machines": 2}, False),
        ({"pins": (("layer_0", A),)}, True),
        ({"pins": (("layer_0", B),)}, False),
        ({"pins": (("layer_1", B),)}, False),  # one replica is not on it
        ({"kept_off": (("layer_1", A),)}, True),
        ({"kept_off": (("layer_1", C),)}, False),
        ({"maximum_period_seconds": 0.011}, True),
        ({"maximum_period_seconds": 0.009}, False),
        ({"maximum_latency_seconds": 0.031}, True),
        ({"maximum_latency_seconds": 0.029}, False),
    ],
)
def test_demands(demands, kept):
    problem = chain_problem(PROFILE, replicas=True, **demands)
    assert keeps_demands(problem, STAGES) == kept


def test_memory():
    problem = chain_problem(PROFILE, memory={B: 10})
    plans = {"both": STAGES, "none": STAGES[:1]}
    assert not [*possible_plans(problem, plans)]
    assert keeps_demands(problem, STAGES)
    enough = dataclasses.replace(problem, machines=chain_problem(PROFILE).machines)
    assert [*possible_plans(enough, plans)] == [("both", STAGES, evaluate(enough, STAGES))]


def test_plans_are_compared_on_one_instance_of_the_problem(monkeypatch):
    """Of hundreds of machines each takes a tenth of a second to be made."""
    made = []
    monkeypatch.setattr(candidate, "instance_of", lambda problem: made.append(problem) or instance_of(problem))
    problem = chain_problem(PROFILE)
    plans = {name: (Stage((name,), ("layer_0", "layer_1")),) for name in (A, B, C)}
    assert [name for name, *_ in possible_plans(problem, plans)] == [A, B, C]
    assert made == [problem]
