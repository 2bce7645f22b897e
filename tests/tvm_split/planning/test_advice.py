"""Advice to use one machine."""

import dataclasses

import pytest

from tests.helpers.placement.profiles import A, B, chain_problem, chain_profile, predicted
from tvm_split.placement.by_hand import named
from tvm_split.placement.plan import Plan
from tvm_split.placement.search import solve
from tvm_split.planning.advice import one_machine_advice
from tvm_split.planning.choose import with_fewest_machines

EQUAL = {A: [0.002] * 4, B: [0.002] * 4}
SLOW = {A: [0.001] * 4, B: [0.1] * 4}


def plan_of(profile, objective="throughput", memory=None, choose=lambda problem, solution: solution, **constraints):
    problem = chain_problem(profile, objective, memory, **constraints)
    solution = choose(problem, solve(problem))
    return Plan("net", objective, "measured", (), named(solution.stages), predicted(problem, profile, best=solution))


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
